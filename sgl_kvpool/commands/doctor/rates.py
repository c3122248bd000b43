"""Rates of this machine: the link between device and host, and rows of every layout."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from sgl_kvpool.codec import decode_rows, encode_rows
from sgl_kvpool.layout import MLAKVCacheLayout

#: 72 MiB of values on a GPU, where a launch takes as long as 4 MiB.
_TOKENS = {"cuda": 1 << 16, "cpu": 1 << 12}
_RANK, _ROPE = 512, 64
_LINK_BYTES = 256 << 20


def rates(device: str) -> dict[str, str]:
    """GB/s of a copy between device and pinned memory, and of BF16 values that are encoded and decoded."""
    values = torch.randn(_TOKENS[device], _RANK + _ROPE, generator=torch.Generator().manual_seed(0)).to(
        device, torch.bfloat16
    )
    found = {}
    if device == "cuda":
        host = torch.zeros(_LINK_BYTES, dtype=torch.uint8, pin_memory=True)
        there = torch.zeros_like(host, device=device)
        out = _gb_per_s(_LINK_BYTES, partial(host.copy_, there))
        back = _gb_per_s(_LINK_BYTES, partial(there.copy_, host))
        found["link"] = f"{out:.1f} GB/s to host memory, {back:.1f} GB/s back"
    nope, rope = values[:, :_RANK], values[:, _RANK:]
    for layout in MLAKVCacheLayout:
        fmt = layout.row_format(_RANK, _ROPE)
        rows = encode_rows(nope, rope, fmt)
        encoded = _gb_per_s(values.nbytes, partial(encode_rows, nope, rope, fmt))
        decoded = _gb_per_s(values.nbytes, partial(decode_rows, rows, fmt))
        found[f"{layout} rows"] = f"{encoded:.2f} GB/s of bf16 values encoded, {decoded:.2f} GB/s decoded"
    return found


def _gb_per_s(size_bytes: int, call: Callable[[], object]) -> float:
    """Median rate of five calls after two, launches included."""
    times = []
    for _ in range(7):
        began = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return size_bytes / statistics.median(times[2:]) / 1e9
