"""Encode and decode KV rows. Arguments are checked here; Triton runs on CUDA, C++ and torch elsewhere.

Shapes: T tokens, S slots of a pool, R latent ("nope") and P rotary ("rope") values per token. Sizes
and offsets come from a `sgl_kvpool.layout.RowFormat`; ``docs/rows.md`` states the arithmetic.

Examples
--------
>>> import torch
>>> from sgl_kvpool import MLAKVCacheLayout
>>> fmt = MLAKVCacheLayout("fp4").row_format(kv_lora_rank=512, qk_rope_head_dim=64)
>>> rows = encode_rows(torch.zeros(3, 512), torch.ones(3, 64), fmt)
>>> rows.shape, decode_rows(rows, fmt).shape
(torch.Size([3, 416]), torch.Size([3, 576]))
"""

import torch

from sgl_kvpool.codec import checks, compiled
from sgl_kvpool.layout import MLAKVCacheLayout, RowFormat

__all__ = ["decode_rows", "encode_rows", "fake_quant", "gather_parts", "gather_rows", "prepare", "store_rows"]


def encode_rows(
    k_nope: torch.Tensor, k_rope: torch.Tensor | None, fmt: RowFormat, k_scale: float = 1.0
) -> torch.Tensor:
    """Encode new tokens into rows.

    `k_nope` [T, R]: bfloat16; or float16, float32 or float8_e4m3fn, whose values are rounded to bfloat16
      first. Any row stride.
    `k_rope` [T, P] or None: Same dtypes as `k_nope`; None (or no columns) if and only if P is 0.
    `k_scale`: Divisor of the values before they are stored, for layouts with `uses_k_scale`; other layouts
      ignore it. Must be finite and positive as float32.
    Returns [T, fmt.row_bytes], uint8: Rows with every byte defined; padding bytes are zero.
    TypeError: if a dtype is not listed above.
    ValueError: if shapes do not fit `fmt`, tensors are on different devices or `k_scale` is unusable; with
      ``KVPOOL_CHECK_FINITE=1`` also for NaN or infinity in a segment that is not copied bit by bit.
    """
    k_nope, k_rope = checks.values(k_nope, k_rope, fmt)
    k_scale = checks.scale(k_scale, fmt)
    checks.finite(k_nope, k_rope, fmt, slots=None)
    rows = torch.empty(len(k_nope), fmt.row_bytes, dtype=torch.uint8, device=k_nope.device)
    _backend(rows).encode_rows(rows, k_nope, k_rope, fmt, k_scale)
    return rows


def decode_rows(
    rows: torch.Tensor, fmt: RowFormat, dtype: torch.dtype = torch.bfloat16, k_scale: float = 1.0
) -> torch.Tensor:
    """Decode rows into values.

    `rows` [T, fmt.row_bytes], uint8: Any row stride.
    `dtype`: bfloat16, float16 or float32. Values are decoded in float32, then cast.
    `k_scale`: The k_scale with which the rows were encoded.
    Returns [T, R + P], `dtype`.
    TypeError, ValueError: as `encode_rows`.
    """
    checks.row_buffer(rows, fmt, name="rows")
    checks.output_dtype(dtype)
    k_scale = checks.scale(k_scale, fmt)
    out = torch.empty(len(rows), fmt.head_dim, dtype=dtype, device=rows.device)
    _backend(rows).gather_parts(rows, None, fmt, *_split(out, fmt), k_scale)
    return out


def store_rows(
    row_buffer: torch.Tensor,
    slots: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor | None,
    fmt: RowFormat,
    k_scale: float = 1.0,
) -> None:
    """Encode tokens and write each row to its slot of a pool; on CUDA in one pass.

    `row_buffer` [S, fmt.row_bytes], uint8: The rows of a layer, with any stride, for instance in a
      token-major buffer. Only the rows of `slots` are written.
    `slots` [T], int32 or int64: A token with a negative slot is skipped. Slot 0 is an ordinary row here. If
      several tokens have the same slot, the contents of its row are undefined.
    `k_nope`, `k_rope`, `fmt`, `k_scale`: As `encode_rows`.
    IndexError: on a CPU, if a slot is S or more. On CUDA such a token is skipped, because a check would
      synchronize the stream.
    TypeError, ValueError: as `encode_rows`.
    """
    checks.row_buffer(row_buffer, fmt, name="row_buffer", written=True)
    k_nope, k_rope = checks.values(k_nope, k_rope, fmt)
    checks.slots(slots, len(k_nope), row_buffer)
    checks.same_device(row_buffer, "row_buffer", k_nope, "k_nope")
    k_scale = checks.scale(k_scale, fmt)
    checks.finite(k_nope, k_rope, fmt, slots=slots)
    _backend(row_buffer).store_rows(row_buffer, slots, k_nope, k_rope, fmt, k_scale)


def gather_rows(
    row_buffer: torch.Tensor,
    slots: torch.Tensor,
    fmt: RowFormat,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    k_scale: float = 1.0,
) -> torch.Tensor:
    """Gather the rows of some slots of a pool and decode them, in one pass.

    `row_buffer` [S, fmt.row_bytes], uint8: Any row stride.
    `slots` [T], int32 or int64: Slots to read; a negative slot gives zeros.
    `dtype`: bfloat16, float16 or float32.
    `out` [T, R + P]: Tensor of `dtype` with any row stride, written and returned if given.
    `k_scale`: The k_scale with which the rows were encoded.
    Returns [T, R + P], `dtype`.
    IndexError: on a CPU, if a slot is S or more; on CUDA such a slot gives zeros.
    TypeError, ValueError: as `encode_rows`, and if `out` has another shape, dtype or device.
    """
    checks.row_buffer(row_buffer, fmt, name="row_buffer")
    checks.output_dtype(dtype)
    checks.slots(slots, None, row_buffer)
    k_scale = checks.scale(k_scale, fmt)
    if out is None:
        out = torch.empty(len(slots), fmt.head_dim, dtype=dtype, device=row_buffer.device)
    else:
        checks.output(out, "out", (len(slots), fmt.head_dim), dtype, row_buffer)
    _backend(row_buffer).gather_parts(row_buffer, slots, fmt, *_split(out, fmt), k_scale)
    return out


def gather_parts(
    row_buffer: torch.Tensor,
    slots: torch.Tensor,
    fmt: RowFormat,
    nope_out: torch.Tensor,
    rope_out: torch.Tensor | None,
    k_scale: float = 1.0,
) -> None:
    """`gather_rows` into two tensors: latent values into one, rotary values into the other.

    `row_buffer`, `slots`, `fmt`, `k_scale`: As `gather_rows`.
    `nope_out` [T, R]: bfloat16, float16 or float32, any row stride.
    `rope_out` [T, P] or None: Same dtype as `nope_out`, any row stride; None (or no columns) if and only if P
      is 0.
    IndexError, TypeError, ValueError: as `gather_rows`.
    """
    checks.row_buffer(row_buffer, fmt, name="row_buffer")
    checks.slots(slots, None, row_buffer)
    checks.output_dtype(nope_out.dtype)
    k_scale = checks.scale(k_scale, fmt)
    checks.output(nope_out, "nope_out", (len(slots), fmt.kv_lora_rank), nope_out.dtype, row_buffer)
    rope_out = checks.optional_rope(rope_out, fmt, name="rope_out")
    if rope_out is not None:
        checks.output(rope_out, "rope_out", (len(slots), fmt.qk_rope_head_dim), nope_out.dtype, row_buffer)
    _backend(row_buffer).gather_parts(row_buffer, slots, fmt, nope_out, rope_out, k_scale)


def fake_quant(
    k_nope: torch.Tensor,
    k_rope: torch.Tensor | None,
    layout: MLAKVCacheLayout | str,
    k_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Round tokens as a server's cache does, for training on its answers; the gradient passes unchanged.

    `k_nope` [T, R]: The latent after its norm: bfloat16, float16 or float32. Any row stride.
    `k_rope` [T, P] or None: The rotary key, in the dtype of `k_nope`; None for a model without rotary values.
    `layout`: Layout of the server.
    `k_scale`: The layer's k_scale in the server; ignored by layouts without `uses_k_scale`.
    Returns (Tensor [T, R], Tensor [T, P] or None): What the server reads back, bit for bit, in the dtype of
      `k_nope`: rounded to bfloat16, encoded, and decoded in float32. A value that the layout clamps has
      gradient 1 too. Transforms of `torch.func` work.
    TypeError, ValueError: as `encode_rows` and `MLAKVCacheLayout.row_format`, and if the dtypes differ.
    """
    for name, values in (("k_nope", k_nope), ("k_rope", k_rope)):
        if values is not None and values.dim() != 2:
            raise ValueError(f"{name} has {values.dim()} dimensions, expected [tokens, values]; reshape it")
    rope_values = 0 if k_rope is None else k_rope.shape[-1]
    fmt = MLAKVCacheLayout(layout).row_format(k_nope.shape[-1], rope_values)
    checks.output_dtype(k_nope.dtype)
    if k_rope is not None:
        checks.allowed_dtype(k_rope, "k_rope", (k_nope.dtype,), on=" beside k_nope of this dtype")
    return _StraightThrough.apply(k_nope, k_rope, fmt, k_scale)


class _StraightThrough(torch.autograd.Function):
    """Encode and decode; the gradients of the results are those of the inputs."""

    @staticmethod
    def forward(k_nope, k_rope, fmt: RowFormat, k_scale: float):
        rows = encode_rows(k_nope, k_rope, fmt, k_scale)
        nope = k_nope.new_empty(k_nope.shape)
        rope = None if k_rope is None else k_rope.new_empty(k_rope.shape)
        rope_out, k_scale = checks.optional_rope(rope, fmt, name="k_rope"), checks.scale(k_scale, fmt)
        _backend(rows).gather_parts(rows, None, fmt, nope, rope_out, k_scale)
        return nope, rope

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Without it torch.func refuses the function."""

    @staticmethod
    def backward(ctx, nope_gradient, rope_gradient):
        return nope_gradient, rope_gradient, None, None

    @staticmethod
    def jvp(ctx, nope_tangent, rope_tangent, *_):
        return nope_tangent, rope_tangent

    @staticmethod
    def vmap(info, in_dims, k_nope, k_rope, fmt: RowFormat, k_scale: float):
        """The tokens of all examples in one call, since a row depends on its token alone."""
        parts = [
            x if x is None else x.movedim(dim, 0) if dim is not None else x.expand(info.batch_size, *x.shape)
            for x, dim in zip((k_nope, k_rope), in_dims, strict=False)
        ]
        flat = (x if x is None else x.flatten(0, 1) for x in parts)
        results = zip(_StraightThrough.apply(*flat, fmt, k_scale), parts, strict=True)
        found = tuple(x if part is None else x.view(part.shape) for x, part in results)
        return found, tuple(None if x is None else 0 for x in found)


def prepare(fmt: RowFormat, device: torch.device | str) -> None:
    """Compile the CPU codec for a row format now, not at the first write; no effect on other devices."""
    if torch.device(device).type == "cpu":
        compiled.encoder(fmt)


def _split(values: torch.Tensor, fmt: RowFormat) -> tuple[torch.Tensor, torch.Tensor | None]:
    if fmt.rope is None:
        return values, None
    return values[:, : fmt.kv_lora_rank], values[:, fmt.kv_lora_rank :]


def _backend(rows: torch.Tensor):
    """Codec module for the device of `rows`; it has encode_rows, store_rows and gather_parts."""
    if rows.device.type == "cuda":
        # Imported on first use: a machine without a GPU may lack Triton.
        from sgl_kvpool.codec import triton

        if not triton.can_address(rows):
            raise ValueError(
                f"rows begin at address {rows.data_ptr():#x} and have a stride of {rows.stride(0)} bytes; "
                "on CUDA both must be multiples of 4; allocate the pool accordingly"
            )
        return triton
    return compiled
