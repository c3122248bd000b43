"""The emulated device in every process that has this folder on PYTHONPATH, once torch is imported.

SGLang decides while it is imported which device there is, and its servers' processes are started anew.
"""

import sys
from pathlib import Path

tests = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(tests), str(tests / "ptxrun"), str(tests / "transfer")]

from emulated_cuda import imports  # noqa: E402


def install():
    from emulated_cuda import plugin

    plugin.install()


imports.after("torch", install)
