"""GPU codec: one kernel quantises and scatters, another gathers and decodes, each in a single pass.

A program handles a few tokens, a row in chunks of up to 512 values (the largest power of two that
divides R), so every byte is read once and written once. With R = 512 a thread accesses latent values in
16-byte words (8 bytes for stores of e4m3) where strides and base addresses are multiples of 16 bytes;
accesses to scales and the rope may be shorter. The geometry is constexpr; strides are run-time numbers and
row offsets are int64.

``triton_segments.py`` reads and writes segments, the arithmetic is in
``triton_scalars.py``; this module handles rows and tokens.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from sgl_kvpool.codec.triton_segments import load_as, store_values
from sgl_kvpool.layout import RowFormat, Segment

#: Tokens per program. With 4 warps and R = 512, a thread then writes at least 16 bytes of FP4 codes in
#: `store_kernel` and of any output in `gather_kernel`; twice as many tokens would take more registers (read
#: from the compiled code, not timed).
_STORE_TOKENS = 8
_GATHER_TOKENS = 16
_WARPS = 4
_MAX_CHUNK = 512
#: Required alignment of a row's address, because rows hold float32 scales.
_ROW_ALIGNMENT_BYTES = 4


@triton.jit
def _row_pointers(rows_ptr, slots_ptr, slots_stride, row_stride, tokens, row_count, TOKENS):
    """Token numbers int64 [TOKENS, 1], row pointers, mask of existing tokens, mask of tokens with a row."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    exists = token < tokens
    if slots_ptr is None:
        return token, rows_ptr + token * row_stride, exists, exists
    else:
        slot = tl.load(slots_ptr + token * slots_stride, mask=exists, other=-1).to(tl.int64)
        # A slot beyond the pool would address another layer's memory.
        has_row = (slot >= 0) & (slot < row_count)
        return token, rows_ptr + slot * row_stride, exists, has_row


@triton.jit(do_not_specialize=["tokens", "row_count"])
def store_kernel(
    rows_ptr,  # uint8, written
    slots_ptr,  # int32 or int64, or None: token t goes to row t
    nope_ptr,  # bf16
    rope_ptr,  # bf16, None if P is 0
    tokens,
    row_count,
    row_stride,  # bytes
    slots_stride,  # in elements, like the next two strides
    nope_stride,
    rope_stride,
    k_scale,
    R: tl.constexpr,
    P: tl.constexpr,
    NOPE: tl.constexpr,
    NOPE_AT: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALE_AT: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_AT: tl.constexpr,
    BY_K_SCALE: tl.constexpr,  # whether values are divided by k_scale
    PADDING_AT: tl.constexpr,
    PADDING: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Quantise tokens and write each to its row."""
    token, rows, _exists, live = _row_pointers(
        rows_ptr, slots_ptr, slots_stride, row_stride, tokens, row_count, TOKENS
    )
    divisor = k_scale if BY_K_SCALE else None
    values = nope_ptr.to(tl.pointer_type(tl.int16)) + token * nope_stride
    for first in tl.static_range(0, R, CHUNK):
        bits = tl.load(values + first + tl.arange(0, CHUNK)[None, :], mask=live, other=0)
        store_values(bits, rows, live, divisor, first, CHUNK, NOPE, NOPE_AT, SCALE, BLOCK, SCALE_AT, NATIVE)
    if P > 0:
        values = rope_ptr.to(tl.pointer_type(tl.int16)) + token * rope_stride
        bits = tl.load(values + tl.arange(0, P)[None, :], mask=live, other=0)
        store_values(bits, rows, live, divisor, 0, P, ROPE, ROPE_AT, "", 0, 0, NATIVE)
    if PADDING > 0:
        tail = tl.arange(0, 16)[None, :]  # alignments are at most 16 bytes here
        zeros = tl.zeros([TOKENS, 16], tl.uint8)
        tl.store(rows + PADDING_AT + tail, zeros, mask=live & (tail < PADDING))


@triton.jit(do_not_specialize=["tokens", "row_count"])
def gather_kernel(
    rows_ptr, slots_ptr, nope_ptr, rope_ptr, tokens, row_count, row_stride, slots_stride, nope_stride,
    rope_stride, k_scale, R: tl.constexpr, P: tl.constexpr, NOPE: tl.constexpr, NOPE_AT: tl.constexpr,
    SCALE: tl.constexpr, BLOCK: tl.constexpr, SCALE_AT: tl.constexpr, ROPE: tl.constexpr,
    ROPE_AT: tl.constexpr, BY_K_SCALE: tl.constexpr, PADDING_AT: tl.constexpr, PADDING: tl.constexpr,
    CHUNK: tl.constexpr, TOKENS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Decode the row of each token; write zeros for a token without a row.

    Arguments are those of `store_kernel`, but values, bf16, fp16 or fp32, are written and rows are read.
    """
    token, rows, exists, live = _row_pointers(
        rows_ptr, slots_ptr, slots_stride, row_stride, tokens, row_count, TOKENS
    )
    DTYPE: tl.constexpr = nope_ptr.dtype.element_ty
    divisor = k_scale if BY_K_SCALE else None
    out = nope_ptr + token * nope_stride
    for first in tl.static_range(0, R, CHUNK):
        x = load_as(rows, live, divisor, first, CHUNK, NOPE, NOPE_AT, SCALE, BLOCK, SCALE_AT, NATIVE, DTYPE)
        tl.store(out + first + tl.arange(0, CHUNK)[None, :], x, mask=exists)
    if P > 0:
        out = rope_ptr + token * rope_stride
        x = load_as(rows, live, divisor, 0, P, ROPE, ROPE_AT, "", 0, 0, NATIVE, DTYPE)
        tl.store(out + tl.arange(0, P)[None, :], x, mask=exists)


def can_address(rows: torch.Tensor) -> bool:
    """Whether all rows start at multiples of 4 bytes."""
    return not (rows.data_ptr() % _ROW_ALIGNMENT_BYTES or rows.stride(0) % _ROW_ALIGNMENT_BYTES)


@cache
def geometry(fmt: RowFormat) -> dict[str, Any]:
    """Constexpr arguments of both kernels that a row format determines."""
    rank = fmt.kv_lora_rank

    def name(segment: Segment | None) -> str:
        return "" if segment is None else segment.encoding.value[0]

    def offset(segment: Segment | None) -> int:
        return 0 if segment is None else segment.offset_bytes

    return {
        "R": rank,
        "P": fmt.qk_rope_head_dim,
        "NOPE": name(fmt.nope),
        "NOPE_AT": offset(fmt.nope),
        "SCALE": name(fmt.scale),
        "BLOCK": fmt.scale_block_values,
        "SCALE_AT": offset(fmt.scale),
        "ROPE": name(fmt.rope),
        "ROPE_AT": offset(fmt.rope),
        "BY_K_SCALE": fmt.layout.uses_k_scale,
        "PADDING_AT": fmt.payload_bytes,
        "PADDING": fmt.padding_bytes,
        "CHUNK": min(rank & -rank, _MAX_CHUNK),
    }


@cache
def is_native(device: torch.device) -> bool:
    """Whether this device has IEEE-conforming conversions to and from e4m3 and bf16."""
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def launching_on(tensor: torch.Tensor) -> AbstractContextManager:
    """Launch on the device of a tensor: Triton takes the current device, whatever its arguments are on."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return nullcontext()


def encode_rows(
    rows: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor | None, fmt: RowFormat, k_scale: float
) -> None:
    """As `reference.encode_rows`."""
    store_rows(rows, None, k_nope, k_rope, fmt, k_scale)


def store_rows(
    row_buffer: torch.Tensor,
    slots: torch.Tensor | None,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor | None,
    fmt: RowFormat,
    k_scale: float,
) -> None:
    """As `reference.store_rows`; without `slots` token t goes to row t."""
    _launch(store_kernel, _STORE_TOKENS, row_buffer, slots, k_nope, k_rope, fmt, k_scale)


def gather_parts(
    row_buffer: torch.Tensor,
    slots: torch.Tensor | None,
    fmt: RowFormat,
    nope_out: torch.Tensor,
    rope_out: torch.Tensor | None,
    k_scale: float,
) -> None:
    """As `reference.gather_parts`."""
    _launch(gather_kernel, _GATHER_TOKENS, row_buffer, slots, nope_out, rope_out, fmt, k_scale)


def _launch(
    kernel: Any,
    tokens_per_program: int,
    row_buffer: torch.Tensor,
    slots: torch.Tensor | None,
    nope: torch.Tensor,
    rope: torch.Tensor | None,
    fmt: RowFormat,
    k_scale: float,
) -> None:
    tokens = len(nope)
    if tokens == 0:
        return
    with launching_on(row_buffer):
        kernel[(triton.cdiv(tokens, tokens_per_program),)](
            row_buffer,
            slots,
            nope,
            rope,
            tokens,
            len(row_buffer),
            row_buffer.stride(0),
            0 if slots is None else slots.stride(0),
            nope.stride(0),
            0 if rope is None else rope.stride(0),
            k_scale,
            **geometry(fmt),
            TOKENS=tokens_per_program,
            NATIVE=is_native(row_buffer.device),
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )
