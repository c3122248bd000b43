"""Argument checks of `mla_decode`. Each message names the value, the limit and what to use instead."""

import ctypes
import math
from dataclasses import dataclass

import torch

from sgl_kvpool.attention.decode_config import MAX_LATENT_RANK, gpu_problem
from sgl_kvpool.codec import checks
from sgl_kvpool.codec.checks import dtype_names
from sgl_kvpool.layout import RowFormat
from sgl_kvpool.memory.arrangement import PageStride
from sgl_kvpool.refusal import whole_number

_QUERY_DTYPES = {
    "cuda": (torch.bfloat16, torch.float16),
    "cpu": (torch.bfloat16, torch.float16, torch.float32),
}
_INDEX_DTYPES = (torch.int32, torch.int64)
_ROW_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class DecodeParams:
    """Checked arguments of a call of `mla_decode`; `q` is [T, H, R] here, and `q_rope` [T, H, P] or None."""

    q: torch.Tensor
    q_rope: torch.Tensor | None
    row_buffer: torch.Tensor
    kv_indices: torch.Tensor
    kv_lens: torch.Tensor
    list_index: torch.Tensor | None
    fmt: RowFormat
    scale: float
    k_scale: float
    queries_per_list: int
    page: PageStride | None
    out: torch.Tensor
    lse: torch.Tensor

    @property
    def lists(self) -> int:
        """Number of groups of queries that share a list."""
        return len(self.q) // self.queries_per_list


def index(tensor: torch.Tensor, name: str, shape: tuple[int, ...], row_buffer: torch.Tensor) -> None:
    """Check a contiguous integer vector."""
    checks.allowed_dtype(tensor, name, _INDEX_DTYPES)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}; pass that many")
    if len(tensor) > 1 and tensor.stride(0) != 1:
        raise ValueError(f"{name} has stride {tensor.stride(0)}, expected 1; pass .contiguous()")
    checks.same_device(row_buffer, "row_buffer", tensor, name)


def queries(
    q: torch.Tensor, q_rope: torch.Tensor | None, row_buffer: torch.Tensor, fmt: RowFormat
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Views of the queries: latent part [T, H, R], and rotary part [T, H, P] or None if P is 0."""
    rank, rope = fmt.kv_lora_rank, fmt.qk_rope_head_dim
    allowed = _QUERY_DTYPES.get(q.device.type, _QUERY_DTYPES["cuda"])
    parts = [("q", q, rank + (rope if q_rope is None else 0))]
    if q_rope is not None:
        parts.append(("q_rope", q_rope, rope))
    for name, part, width in parts:
        checks.allowed_dtype(part, name, allowed, f" on {part.device.type}")
        if part.dim() != 3 or part.shape[2] != width:
            raise ValueError(
                f"{name} has shape {tuple(part.shape)}, expected (tokens, heads, {width}) for {fmt.tag}; "
                "reshape it, and pass q_rope only if q has the latent columns alone"
            )
        if width > 1 and part.numel() and part.stride(2) != 1:
            raise ValueError(
                f"{name} has stride {part.stride(2)} between the values of a head, expected 1; pass "
                ".contiguous()"
            )
        checks.same_device(row_buffer, "row_buffer", part, name)
    if q.shape[1] == 0:
        raise ValueError(f"q has shape {tuple(q.shape)} with no heads; pass at least one")
    if q_rope is None:
        return q[..., :rank], q[..., rank:] if rope else None
    if q_rope.dtype != q.dtype or q_rope.shape[:2] != q.shape[:2]:
        raise ValueError(
            f"q_rope is {dtype_names(q_rope.dtype)} {tuple(q_rope.shape)} and q {dtype_names(q.dtype)} "
            f"{tuple(q.shape)}; pass both parts of the same queries"
        )
    return q, q_rope if rope else None


def tokens_per_list(queries_per_list: int, tokens: int) -> int:
    """Number of groups of queries that share a list."""
    if tokens % whole_number("queries_per_list", queries_per_list):
        raise ValueError(
            f"queries_per_list={queries_per_list} does not divide the {tokens} queries; pass whole groups, "
            "and pad the last one with queries whose kv_lens are 0"
        )
    return tokens // queries_per_list


def lists(
    kv_indices: torch.Tensor, list_index: torch.Tensor | None, groups: int, row_buffer: torch.Tensor
) -> None:
    """Check that there are enough lists of rows."""
    checks.allowed_dtype(kv_indices, "kv_indices", _INDEX_DTYPES)
    if kv_indices.dim() != 2:
        raise ValueError(
            f"kv_indices has shape {tuple(kv_indices.shape)}, expected (lists, entries); reshape it, or pass "
            "kv_indices[None] for one list"
        )
    checks.same_device(row_buffer, "row_buffer", kv_indices, "kv_indices")
    if list_index is not None:
        index(list_index, "list_index", (groups,), row_buffer)
    elif len(kv_indices) < groups:
        raise ValueError(
            f"kv_indices has {len(kv_indices)} lists for {groups} groups of queries; pass one per group, or "
            "list_index"
        )


def page(value: tuple[int, int] | tuple[int, int, int] | None) -> PageStride | None:
    """Check the fields of a PageStride; None if slots are row numbers."""
    if value is None:
        return None
    known = isinstance(value, tuple) and len(value) in (2, 3) and all(type(x) is int for x in value)
    stride = PageStride(*value) if known else PageStride(0, 0)
    if not 1 <= stride.page_size_tokens <= stride.rows_per_page or stride.dcp_size < 1:
        raise ValueError(
            f"page={value!r}, expected (page_size_tokens, rows_per_page) with 1 <= page_size_tokens <= "
            "rows_per_page, and dcp_size >= 1 if given; take it from the pool's page_stride"
        )
    return None if stride == PageStride(stride.rows_per_page, stride.rows_per_page) else stride


def scale(value: float) -> float:
    """Check the softmax scale in float32, in which kernels use it."""
    value = float(value)
    if not math.isfinite(ctypes.c_float(value).value):
        raise ValueError(
            f"scale={value!r} is not finite in float32; pass the softmax scale, head_dim ** -0.5 as a rule"
        )
    return value


def rows_on_cuda(row_buffer: torch.Tensor, fmt: RowFormat) -> None:
    """Check the kernel's requirements on rows and device."""
    if (problem := gpu_problem(torch.cuda.get_device_capability(row_buffer.device))) is not None:
        device = row_buffer.device
        raise RuntimeError(f"mla_decode {problem} ({device}); serve with a stock attention backend")
    kernel_limits(row_buffer, fmt)


def kernel_limits(row_buffer: torch.Tensor, fmt: RowFormat) -> None:
    """Check the kernel's requirements on rows, which may be on any device."""
    if fmt.kv_lora_rank > MAX_LATENT_RANK:
        raise ValueError(
            f"kv_lora_rank={fmt.kv_lora_rank}; the CUDA kernel's accumulators hold {MAX_LATENT_RANK} values, "
            "serve such a model without --kv-cache-layout"
        )
    step = _ROW_ALIGNMENT_BYTES
    if row_buffer.data_ptr() % step or row_buffer.stride(0) % step:
        raise ValueError(
            f"row_buffer at address {row_buffer.data_ptr():#x} with a row stride of {row_buffer.stride(0)} "
            f"bytes; on CUDA both have to be multiples of {step}, build the RowFormat with "
            f"align_bytes={step} and align the pool"
        )
