"""Programs of a checkout, which the wheel leaves out: benchmarks, servers, soaks, figures and their kit."""

from pathlib import Path

#: Folder of the checkout.
ROOT = Path(__file__).resolve().parent.parent
