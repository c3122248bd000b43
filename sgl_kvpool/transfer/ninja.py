"""`ninja`, by which tvm-ffi and torch build; SGLang brings it."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["ninja_on_path"]


@contextmanager
def ninja_on_path() -> Iterator[None]:
    """For builds within: it is on the PATH of activated environments only."""
    if shutil.which("ninja") is not None:
        yield
        return
    path = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = os.pathsep.join([path, sysconfig.get_path("scripts")])
    try:
        yield
    finally:
        os.environ["PATH"] = path
