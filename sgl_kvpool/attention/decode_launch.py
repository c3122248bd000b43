"""Launches the kernels of `mla_decode` on checked arguments, without allocations and without waiting."""

from functools import cache
from typing import Any

import torch

from sgl_kvpool.attention.decode_checks import DecodeParams
from sgl_kvpool.attention.decode_config import MAX_SPLITS, DecodeConfig
from sgl_kvpool.attention.triton_decode import decode_kernel
from sgl_kvpool.attention.triton_lists import merge_kernel
from sgl_kvpool.attention.triton_operands import VALUE_SCALE_EXPONENT
from sgl_kvpool.codec import triton as codec_triton
from sgl_kvpool.layout import Encoding, RowFormat
from sgl_kvpool.memory.arrangement import PageStride

_LOG2_E = 1.4426950408889634
#: Latent values per product; every `kv_lora_rank` is a multiple of it. Decoded rows without tile scales use
#: the largest power of two that divides `kv_lora_rank` (all 512 values), because a program waits for each
#: product. Copies of `bf16` rows to shared memory need fewer addresses with this size.
_CHUNK_VALUES = 128
#: Bytes of a decoded row that a load takes at a time, 16 for each of 8 threads: the same threads load the
#: latent and a `bf16` rope of a row, so that a thread needs the addresses of 4 rows of a block.
_LOADED_BYTES = 128
#: Partial results that a program of the merge kernel reads at a time, and the number of its warps.
_MERGE_TOGETHER = 32
MERGE_WARPS = 4


@cache
def decode_constants(
    fmt: RowFormat, config: DecodeConfig, heads: int, queries_per_list: int, page: PageStride | None
) -> dict[str, Any]:
    """Constexpr arguments of `decode_kernel` except ROW_STRIDE and NATIVE."""
    row = codec_triton.geometry(fmt)
    decoded = fmt.nope.encoding is not Encoding.BF16
    tile_scales = fmt.scale is not None and fmt.scale.encoding is Encoding.FP32
    if decoded and not tile_scales:
        chunk = fmt.kv_lora_rank & -fmt.kv_lora_rank  # sizes of a shape have to be powers of two
        loaded = min(chunk, _LOADED_BYTES * 8 // fmt.nope.encoding.bits)
    else:
        chunk = loaded = _CHUNK_VALUES
    return {
        **_of_all(config, heads, queries_per_list, page),
        "SCALE_BLOCK": row["BLOCK"],
        **{name: row[name] for name in ("R", "P", "NOPE", "NOPE_AT", "SCALE", "SCALE_AT", "ROPE", "ROPE_AT")},
        "CHUNK": chunk,
        "SLICE": loaded,
        "BLOCK": config.tile.block_rows,
        "SPLIT": config.splits > 1,
        "AHEAD": decoded,
    }


@cache
def gluon_constants(
    fmt: RowFormat, config: DecodeConfig, heads: int, queries_per_list: int, page: PageStride | None
) -> dict[str, Any]:
    """Constexpr arguments of a Gluon kernel except ROW_STRIDE."""
    row, tile = codec_triton.geometry(fmt), config.tile
    return {
        **_of_all(config, heads, queries_per_list, page),
        **{name: row[name] for name in ("R", "NOPE", "SCALE", "SCALE_AT", "ROPE", "ROPE_AT")},
        **(
            {"REG_PARTS": tile.register_parts, "WARPS": tile.warps, "SPLIT": config.splits > 1}
            if tile.kernel == "gluon"
            else {}
        ),
    }


def _of_all(
    config: DecodeConfig, heads: int, queries_per_list: int, page: PageStride | None
) -> dict[str, Any]:
    """Constexpr arguments that all decode kernels have."""
    page = page or PageStride(0, 0)
    return {
        "PAGE": page.page_size_tokens,
        "PAGE_ROWS": page.rows_per_page,
        "DCP_SIZE": page.dcp_size,
        "HEADS": heads,
        "QUERIES": queries_per_list,
        "BLOCK_H": config.tile.query_heads,
    }


@cache
def merge_constants(
    fmt: RowFormat, config: DecodeConfig, heads: int, queries_per_list: int
) -> dict[str, Any]:
    """Constexpr arguments of `merge_kernel` except NATIVE."""
    return {
        "HEADS": heads,
        "QUERIES": queries_per_list,
        "R": fmt.kv_lora_rank,
        "CHUNK": _CHUNK_VALUES,
        "BLOCK": config.tile.block_rows,
        "MOST": MAX_SPLITS,
        "TOGETHER": _MERGE_TOGETHER,
    }


def decode_kernel_fn(name: str) -> Any:
    """The decode kernel of a `TileConfig.kernel`; only Gluon's need a Triton with Gluon for Hopper."""
    if name == "gluon":
        from sgl_kvpool.attention.gluon_decode import gluon_decode_kernel

        return gluon_decode_kernel
    if name == "gluon_wide":
        from sgl_kvpool.attention.gluon_wide import gluon_wide_decode_kernel

        return gluon_wide_decode_kernel
    return decode_kernel


def launch(params: DecodeParams, partial: torch.Tensor, config: DecodeConfig) -> None:
    """Compute `params.out` and `params.lse`; `partial` is float32, at least `partial_elements` long, and
    unused without splits.
    """
    if len(params.out):
        with codec_triton.launching_on(params.row_buffer):
            _launch(params, partial, config)


def _launch(params: DecodeParams, partial: torch.Tensor, config: DecodeConfig) -> None:
    p, row_buffer = params, params.row_buffer
    out, lse, fmt = p.out, p.lse, p.fmt
    tokens, heads, rank = out.shape
    native = codec_triton.is_native(row_buffer.device)
    splits = config.splits
    query_heads = tokens * heads
    results = partial[: splits * query_heads * rank]
    results_lse = partial[splits * query_heads * rank : splits * query_heads * (rank + 1)]
    # FP4's operands are scaled by 2**VALUE_SCALE_EXPONENT.
    factor = p.k_scale * (2.0**-VALUE_SCALE_EXPONENT if fmt.nope.encoding is Encoding.E2M1 else 1.0)
    kernel = decode_kernel_fn(config.tile.kernel)
    if kernel is decode_kernel:
        constants = {**decode_constants(fmt, config, heads, p.queries_per_list, p.page), "NATIVE": native}
    else:
        constants = gluon_constants(fmt, config, heads, p.queries_per_list, p.page)
    kernel[(p.lists * splits * config.tiles,)](
        p.q,
        p.q_rope,
        row_buffer,
        p.kv_indices,
        p.kv_lens,
        p.list_index,
        out,
        lse,
        results,
        results_lse,
        len(row_buffer),
        len(p.kv_indices),
        p.kv_indices.shape[1],
        splits,
        config.min_blocks,
        query_heads,
        *p.q.stride()[:2],
        *((0, 0) if p.q_rope is None else p.q_rope.stride()[:2]),
        *p.kv_indices.stride(),
        *out.stride()[:2],
        *lse.stride(),
        p.scale * factor * _LOG2_E,
        factor,
        ROW_STRIDE=row_buffer.stride(0),
        **constants,
        num_warps=config.tile.warps,
        num_stages=config.tile.stages,
    )
    if splits > 1:
        merge_kernel[(query_heads, rank // _CHUNK_VALUES)](
            results,
            results_lse,
            p.kv_lens,
            p.list_index,
            out,
            lse,
            len(p.kv_indices),
            p.kv_indices.shape[1],
            splits,
            config.min_blocks,
            query_heads,
            *out.stride()[:2],
            *lse.stride(),
            **merge_constants(fmt, config, heads, p.queries_per_list),
            NATIVE=native,
            num_warps=MERGE_WARPS,
        )
