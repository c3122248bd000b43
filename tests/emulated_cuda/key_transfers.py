"""Copies of index keys between SGLang's pools of the device and of the host, page by page.

What SGLang compiles or has in sgl_kernel for `page_first` host pools and `--hicache-io-backend kernel`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from emulated_cuda import operators, order

__all__ = ["EXPORTS", "replace_loads"]

#: cudaMemcpyKind.
_TO_DEVICE, _TO_HOST, _ON_DEVICE = 1, 2, 3


def _pages(indices: torch.Tensor) -> list[int]:
    """Page numbers, which a kernel reads in its order, and the host at once."""
    assert indices.dtype == torch.int64
    if indices.device.type == "cpu":
        return indices.tolist()
    stream = order.current_stream()
    operators.touch(indices.on_cpu, stream, stream.issue(f"page numbers at {order.place()}"), write=False)
    return indices.on_cpu.tolist()


def _copy(target: int, source: int, size_bytes: int, kind: int) -> None:
    from emulated_cuda.runtime import RUNTIME

    RUNTIME.cudaMemcpyAsync(target, source, size_bytes, kind, order.current_stream().cuda_stream)


def _store(host, host_pages, staging, pages, layers, page_size) -> None:
    """Pages of all layers to staging memory of the device, from there to the host's page-first memory."""
    assert page_size == 1  # numbers are of whole pages
    assert layers.dtype == torch.uint64
    assert host.device.type == "cpu"
    assert host_pages.device.type == "cpu"  # whose numbers are those of copies, not of a kernel
    assert len(host_pages) == len(pages) == len(staging)
    size_bytes = staging.shape[2] * staging.element_size()
    assert size_bytes % 16 == 0
    assert staging.shape[1] == host.shape[1] == len(layers)
    whole_bytes = staging.shape[1] * size_bytes
    for number, page in enumerate(_pages(pages)):
        for layer, source in enumerate(layers.on_cpu.tolist()):
            at = staging.data_ptr() + number * whole_bytes + layer * size_bytes
            _copy(at, source + page * size_bytes, size_bytes, _ON_DEVICE)
    for number, page in enumerate(_pages(host_pages)):
        at = staging.data_ptr() + number * whole_bytes
        _copy(host.data_ptr() + page * whole_bytes, at, whole_bytes, _TO_HOST)


def _load(
    src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim, block_quota=None, warps=32
) -> None:  # fmt: skip
    """A layer's pages of the host's page-first memory to the device."""
    assert src.device.type == "cpu"
    assert item_size % 8 == 0
    assert src_indices.device.type == dst_indices.device.type == "cuda"
    assert len(src_indices) == len(dst_indices)
    for source, target in zip(_pages(src_indices), _pages(dst_indices), strict=True):
        at = src.data_ptr() + source * src_layout_dim + layer_id * item_size
        _copy(dst.data_ptr() + target * item_size, at, item_size, _TO_DEVICE)


def replace_loads() -> None:
    sys.modules["sgl_kernel.kvcacheio"].transfer_kv_per_layer_mla_pf_lf = _load


#: Function of a module of `load_jit` -> what is called instead, with tensors of the device.
EXPORTS: dict[str, Callable[..., None]] = {"launch_all_mla_lf_pf_staged": _store}
