"""Imports scripts/bench_attention.py and the modules beside it."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

from sgl_kvpool import MLAKVCacheLayout

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
NAMES = ("cases", "device", "inputs", "limits", "measure", "peers", "report")


def imported():
    """The modules by the second part of their names, and `main`."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        modules = {name: importlib.import_module(f"attention_{name}") for name in NAMES}
        return SimpleNamespace(**modules, main=importlib.import_module("bench_attention").main)
    finally:
        sys.path.remove(str(SCRIPTS))


def fmt(layout):
    return MLAKVCacheLayout(layout).row_format(512, 64)
