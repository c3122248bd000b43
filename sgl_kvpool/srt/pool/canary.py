"""SGLang's canary (`--kv-canary`), which finds overwritten slots by hashes, over pools of rows.

A slot's hash covers rows of up to four layers, as many sources as SGLang's kernels take; SGLang's own
adapters hash the first layer.
"""

from typing import Any

import torch
from sglang.kernels.ops.kv_canary.consts import MAX_REAL_KV_SOURCES
from sglang.kernels.ops.kv_canary.verify import RealKvSource
from sglang.srt.kv_canary.buffer_group import CanaryBufferGroup, PoolKind
from sglang.srt.kv_canary.pool_patcher.api import register_pool_attacher
from sglang.srt.kv_canary.pool_patcher.buffer_alloc import alloc_canary_buf

from sgl_kvpool.srt.pool import dsa, hybrid, mla


def register() -> None:
    """Let the canary take pools of rows."""
    for one in (mla.LayoutMLATokenToKVPool, dsa.LayoutDSATokenToKVPool, hybrid.LayoutHybridLinearKVPool):
        register_pool_attacher(one, attach)


def attach(
    *, pool: Any, device: torch.device, read_bytes: int, kv_token_id_vs_position_offset: int
) -> tuple[CanaryBufferGroup, ...]:
    """SGLang's attacher of a `RowPool`; `read_bytes` of each row are hashed, from its begin.

    ValueError for rows whose bytes are not a multiple of 16, with `read_bytes` above 0.
    """
    rows = pool.row_pool
    layers = range(0, rows.layer_num, max(1, -(-rows.layer_num // MAX_REAL_KV_SOURCES)))
    sources = [_source(rows, index, read_bytes) for index in layers] if read_bytes else []
    head, tail = (alloc_canary_buf(num_slots=rows.size + rows.page_size, device=device) for _ in range(2))
    group = CanaryBufferGroup(
        kind=PoolKind.FULL, k_head=head, k_tail=tail, v_head=None, v_tail=None, swa_index_lut=None,
        real_kv_sources_k=tuple(sources), real_kv_sources_v=(),
        kv_token_id_vs_position_offset=kv_token_id_vs_position_offset,
    )  # fmt: skip
    return (group,)


def _source(rows: Any, index: int, read_bytes: int) -> RealKvSource:
    """The rows of a layer by SGLang's slots."""
    size, page_size = rows.row_format.row_bytes, 1
    found = rows.kv_buffer[index].squeeze(1).view(torch.uint8)
    if rows.page_stride is not None:  # row numbers skip the other layers of a page
        page_size, run = rows.page_size, rows.page_size * size
        found = rows.cross_layer.view(torch.uint8)[:, index * run : (index + 1) * run]
    return RealKvSource(
        tensor=found, page_size=page_size, num_bytes_per_token=size, read_bytes=min(read_bytes, size)
    )
