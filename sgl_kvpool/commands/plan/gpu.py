"""A described Hopper GPU: SGLang's rules in this process see it instead of the machine's devices.

For a short-lived process without GPU tensors: the description cannot be undone.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

__all__ = ["HOPPER", "DescribedGPU", "describe"]

#: Compute capability of H100, H200 and H20.
HOPPER = (9, 0)
#: Streaming multiprocessors of an H100 SXM and an H200. Only the workspace of decode depends on them.
_SM_COUNT = 132


@dataclass(frozen=True)
class DescribedGPU:
    """The GPUs of a server.

    Attributes
    ----------
    memory_gib : float
        Memory of one GPU in units of 2^30 bytes: the MiB of `nvidia-smi` divided by 1024.
    count : int
    """

    memory_gib: float
    count: int

    @property
    def memory_mib(self) -> float:
        """Memory in the unit of SGLang's `get_device_memory_capacity`."""
        return self.memory_gib * 1024


def describe(gpu: DescribedGPU) -> None:
    """Make SGLang see `gpu` from now on; all modules with SGLang's rules must be imported before."""
    from sglang.srt.arg_groups import mamba_hook
    from sglang.srt.utils import common

    name = "a Hopper GPU of sgl-kvpool plan"
    properties = SimpleNamespace(
        major=HOPPER[0], minor=HOPPER[1], name=name, multi_processor_count=_SM_COUNT,
        total_memory=int(gpu.memory_gib * 2**30),
    )  # fmt: skip
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: gpu.count
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda *_: HOPPER
    torch.cuda.get_device_name = lambda *_: name
    torch.cuda.get_device_properties = lambda *_: properties
    _forget_answers()
    replace_everywhere(common.get_device_memory_capacity, lambda device=None: gpu.memory_mib)
    # This function asks the platform that SGLang chose at import, which was the CPU.
    replace_everywhere(mamba_hook._platform_supports_mamba_cache_extra_buffer, lambda: True)


def _forget_answers() -> None:
    """Clear SGLang's caches of machine properties."""
    for module in _sglang_modules():
        for value in list(vars(module).values()):
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()


def replace_everywhere(function: Callable, replacement: Callable) -> None:
    """Replace `function` in all modules of SGLang, under any name."""
    for module in _sglang_modules():
        for name, value in list(vars(module).items()):
            if value is function:
                setattr(module, name, replacement)


def _sglang_modules() -> list[Any]:
    return [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "sglang"]
