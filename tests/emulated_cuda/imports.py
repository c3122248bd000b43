"""Functions that are called as soon as a module has been imported."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from typing import Any


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules as usual, and calls a function after one of them has run."""

    def __init__(self) -> None:
        self.calls: dict[str, Callable[[], None]] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        call = self.calls.pop(name, None)
        if call is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_call(module: Any) -> None:
            run(module)
            call()

        spec.loader.exec_module = run_and_call  # type: ignore[method-assign]
        return spec


_finder = _Finder()


def after(name: str, call: Callable[[], None]) -> None:
    """Call a function once the module of this name has been imported; at once if it is already."""
    if name in sys.modules:
        call()
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.calls[name] = call
