"""Argument checks of the codec. Each message names the value, the limit and what to use instead."""

import ctypes
import math

import torch

from sgl_kvpool import env
from sgl_kvpool.layout import Encoding, RowFormat

_INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
_OUTPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SLOT_DTYPES = (torch.int32, torch.int64)


def dtype_names(*dtypes: torch.dtype) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def allowed_dtype(tensor: torch.Tensor, name: str, allowed: tuple[torch.dtype, ...], on: str = "") -> None:
    if tensor.dtype not in allowed:
        raise TypeError(
            f"{name} is {dtype_names(tensor.dtype)}, allowed{on}: {dtype_names(*allowed)}; convert it first"
        )


def _matrix(tensor: torch.Tensor, name: str, columns: int, fmt: RowFormat) -> None:
    """Check for two axes, the expected width, and a stride of 1 within a row."""
    if tensor.dim() != 2 or tensor.shape[1] != columns:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, expected (rows, {columns}) for {fmt.tag}; reshape "
            "it, or build the RowFormat of this geometry with MLAKVCacheLayout.row_format"
        )
    if columns > 1 and tensor.numel() and tensor.stride(1) != 1:
        raise ValueError(
            f"{name} has stride {tensor.stride(1)} between values of a row, expected 1 (rows "
            "may have any stride); pass .contiguous() or a view with another order of axes"
        )


def same_device(a: torch.Tensor, a_name: str, b: torch.Tensor, b_name: str) -> None:
    if a.device != b.device:
        raise ValueError(f"{b_name} is on {b.device} and {a_name} on {a.device}; move one of them with .to()")


def optional_rope(tensor: torch.Tensor | None, fmt: RowFormat, name: str) -> torch.Tensor | None:
    """The rope tensor, or None if the format has no rope; ValueError if tensor and format disagree."""
    width = fmt.qk_rope_head_dim
    if tensor is None and width:
        raise ValueError(
            f"{name} is None but {fmt.tag} stores {width} rotary values per row; pass [rows, "
            f"{width}], or build the RowFormat with qk_rope_head_dim=0"
        )
    if tensor is not None and not width:
        if tensor.shape[-1] == 0:
            return None
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} but {fmt.tag} stores no rotary values; pass "
            f"None, or build the RowFormat with qk_rope_head_dim={tensor.shape[-1]}"
        )
    return tensor


def values(
    k_nope: torch.Tensor, k_rope: torch.Tensor | None, fmt: RowFormat
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Inputs of an encoder, checked and rounded to bf16."""
    allowed_dtype(k_nope, "k_nope", _INPUT_DTYPES)
    _matrix(k_nope, "k_nope", fmt.kv_lora_rank, fmt)
    k_rope = optional_rope(k_rope, fmt, "k_rope")
    if k_rope is not None:
        allowed_dtype(k_rope, "k_rope", _INPUT_DTYPES)
        _matrix(k_rope, "k_rope", fmt.qk_rope_head_dim, fmt)
        if len(k_rope) != len(k_nope):
            raise ValueError(
                f"k_rope has {len(k_rope)} rows and k_nope {len(k_nope)}; pass one row of each per token"
            )
        same_device(k_nope, "k_nope", k_rope, "k_rope")
        k_rope = k_rope.to(torch.bfloat16, memory_format=torch.contiguous_format)
    # Otherwise torch may choose strides that kernels do not read, for rows that overlap.
    return k_nope.to(torch.bfloat16, memory_format=torch.contiguous_format), k_rope


def row_buffer(rows: torch.Tensor, fmt: RowFormat, name: str, *, written: bool = False) -> None:
    """Check the rows of a layer or other rows; rows to be written must not overlap."""
    if rows.dtype != torch.uint8:
        raise TypeError(f"{name} is {dtype_names(rows.dtype)}, expected uint8; pass {name}.view(torch.uint8)")
    _matrix(rows, name, fmt.row_bytes, fmt)
    if written and len(rows) > 1 and rows.stride(0) < fmt.row_bytes:
        raise ValueError(
            f"{name} has a row stride of {rows.stride(0)} bytes, less than the {fmt.row_bytes} bytes of a "
            "row, so that writing one row would change the next; allocate it without overlap"
        )


def slots(indices: torch.Tensor, tokens: int | None, rows: torch.Tensor) -> None:
    """Check the slots of `rows`, one per token; values are checked on a CPU only."""
    allowed_dtype(indices, "slots", _SLOT_DTYPES)
    if indices.dim() != 1 or (tokens is not None and len(indices) != tokens):
        expected = "(tokens,)" if tokens is None else f"({tokens},)"
        raise ValueError(
            f"slots has shape {tuple(indices.shape)}, expected {expected}; flatten it, one slot per token"
        )
    same_device(rows, "row_buffer", indices, "slots")
    if indices.device.type == "cpu" and len(indices):
        largest = int(indices.max())
        if largest >= len(rows):
            raise IndexError(
                f"slot {largest} is outside of a pool of {len(rows)} rows; mark tokens without a row by -1"
            )


def output_dtype(dtype: torch.dtype) -> None:
    if dtype not in _OUTPUT_DTYPES:
        raise TypeError(
            f"rows decode to {dtype_names(*_OUTPUT_DTYPES)}, not to {dtype_names(dtype)}; decode to one of "
            "these and convert"
        )


def output(
    tensor: torch.Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype, rows: torch.Tensor,
    *, dense: bool = True,
) -> None:  # fmt: skip
    """Check a tensor to be written; if `dense`, values along its last axis have to be contiguous."""
    if tensor.dtype != dtype:
        raise TypeError(
            f"{name} is {dtype_names(tensor.dtype)}, expected {dtype_names(dtype)}; allocate another, or ask "
            "for its dtype"
        )
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, expected {shape}; slice or reshape it to that"
        )
    if dense and shape[-1] > 1 and tensor.numel() and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} has stride {tensor.stride(-1)} between values, expected 1; allocate another"
        )
    same_device(rows, "row_buffer", tensor, name)
    without_overlap(tensor, name)


def without_overlap(tensor: torch.Tensor, name: str) -> None:
    """Refuse a tensor to be written if two of its values may share memory."""
    extent = 1
    for stride, size in sorted((abs(tensor.stride(i)), n) for i, n in enumerate(tensor.shape) if n > 1):
        if stride < extent:
            raise ValueError(
                f"{name} has strides {tuple(tensor.stride())} for shape {tuple(tensor.shape)}, so that a "
                "write to one value would change another; allocate it without overlap"
            )
        extent += stride * (size - 1)


def scale(k_scale: float, fmt: RowFormat) -> float:
    """k_scale rounded to float32, as kernels use it; 1.0 for layouts without k_scale."""
    try:
        rounded = ctypes.c_float(k_scale).value
    except (TypeError, OverflowError):
        raise TypeError(f"k_scale={k_scale!r} is no number; pass the layer's scale") from None
    if not (math.isfinite(rounded) and rounded > 0):
        raise ValueError(
            f"k_scale={k_scale!r} is {rounded!r} in float32, which is not finite and positive; "
            "pass the layer's scale, or 1.0 for a model without KV scales"
        )
    return rounded if fmt.layout.uses_k_scale else 1.0


def finite(
    k_nope: torch.Tensor, k_rope: torch.Tensor | None, fmt: RowFormat, slots: torch.Tensor | None
) -> None:
    """With KVPOOL_CHECK_FINITE, raise on NaN and infinity, which encoders otherwise replace; syncs CUDA."""
    if not env.flag(env.CHECK_FINITE):
        return
    if k_nope.is_cuda and torch.cuda.is_current_stream_capturing():
        return  # a graph capture cannot sync; its eager warm-up has been checked
    segments = [("k_nope", k_nope, fmt.nope)]
    if k_rope is not None and fmt.rope is not None:
        segments.append(("k_rope", k_rope, fmt.rope))
    for name, tensor, segment in segments:
        if segment.encoding is Encoding.BF16:
            continue  # stored bit by bit
        bad = ~torch.isfinite(tensor)
        if slots is not None:
            bad &= (slots >= 0).unsqueeze(-1)  # padded tokens are not stored
        if bool(bad.any()):
            token, column = bad.nonzero()[0].tolist()
            raise ValueError(
                f"{name}[{token}, {column}] is {tensor[token, column].item()} and "
                f"{int(bad.sum())} values of {name} are not finite; the model produced them, not "
                f"the cache. Unset {env.CHECK_FINITE} to store 0 and the largest value instead"
            )
