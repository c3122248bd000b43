"""CPU codec in C++, which g++ compiles at first use, in 10 s.

Bytes and values equal those of `reference`, the fallback without a compiler, which is several times slower.
"""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from sgl_kvpool import metrics
from sgl_kvpool.codec import reference
from sgl_kvpool.compiler import Module, cpu_flags
from sgl_kvpool.layout import Encoding, RowFormat

#: Folder of the C++ sources.
CSRC = Path(__file__).resolve().parent / "csrc"

#: Ids of `Latent` and `Rope` in csrc/row_conversion.h, by the encodings of the values and of their scales.
_LATENT_IDS = {
    (Encoding.BF16, None): 0,
    (Encoding.E4M3, None): 1,
    (Encoding.E4M3, Encoding.FP32): 2,
    (Encoding.E2M1, Encoding.UE5M3): 3,
}
_ROPE_IDS = {(Encoding.BF16, None): 0, (Encoding.E4M3, None): 1}
#: Tensor classes whose memory C++ can read.
_PLAIN = (torch.Tensor, torch.nn.Parameter, type(None))


@cache
def row_layout(fmt: RowFormat) -> torch.Tensor:
    """Fields of a format as `RowLayout` of csrc/row_conversion.h, int64."""
    scale, rope, latent = fmt.scale, fmt.rope, fmt.layout.latent
    fields = [
        _LATENT_IDS[latent.values, latent.scales],
        0 if rope is None else _ROPE_IDS[rope.encoding, None],
        fmt.nope.count,
        0 if rope is None else rope.count,
        fmt.nope.offset_bytes,
        0 if scale is None else scale.offset_bytes,
        0 if rope is None else rope.offset_bytes,
        fmt.payload_bytes,
        fmt.row_bytes,
        int(fmt.layout.uses_k_scale),
    ]
    # On the CPU also if torch has another default device.
    return torch.tensor(fields, dtype=torch.int64, device="cpu")


@cache
def module(*, required: bool = False) -> Any:
    """The compiled codec. If the build fails: its error if `required`, else None, logged and counted."""
    try:
        flags = cpu_flags(torch.backends.cpu.get_cpu_capability())
        return Module("sgl_kvpool_cpu_codec", CSRC / "cpu_codec.cpp", flags).load()
    except Exception as error:  # no compiler, no tvm-ffi, a cache folder that cannot be written
        if required:
            raise
        metrics.failed("codec_build", "the CPU codec", error=error)
        return None


def encoder(fmt: RowFormat) -> Callable[..., None] | None:
    """`encode_rows` of csrc/cpu_codec.cpp; None if torch is as fast, or if the build fails."""
    if fmt.nope.encoding is Encoding.BF16:
        return None
    compiled = module()
    return None if compiled is None else compiled.encode_rows


def _is_plain(*tensors: torch.Tensor | None) -> bool:
    """False for tensors of other classes, such as torch's fake tensors: they have no memory to read."""
    return all(type(x) in _PLAIN for x in tensors)


def encode_rows(
    rows: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor | None, fmt: RowFormat, k_scale: float
) -> None:
    """As `reference.encode_rows`."""
    is_readable = _is_plain(rows, k_nope, k_rope) and rows.device.type == "cpu"
    encode = encoder(fmt) if is_readable else None
    if encode is None:
        reference.encode_rows(rows, k_nope, k_rope, fmt, k_scale)
        return
    k_nope = k_nope.detach().resolve_neg()  # tvm-ffi rejects tensors that require gradients
    rope = k_nope[:, :0] if k_rope is None else k_rope.detach().resolve_neg()
    encode(rows, k_nope, rope, row_layout(fmt), k_scale, torch.get_num_threads())


store_rows = partial(reference.store_rows, encode=encode_rows)


def gather_parts(
    row_buffer: torch.Tensor,
    slots: torch.Tensor | None,
    fmt: RowFormat,
    nope_out: torch.Tensor,
    rope_out: torch.Tensor | None,
    k_scale: float,
) -> None:
    """As `reference.gather_parts`."""
    is_readable = _is_plain(row_buffer, slots, nope_out, rope_out) and row_buffer.device.type == "cpu"
    compiled = module() if is_readable and nope_out.dtype is not torch.float16 else None
    if compiled is None:
        reference.gather_parts(row_buffer, slots, fmt, nope_out, rope_out, k_scale)
        return
    listed = torch.arange(len(nope_out), device="cpu") if slots is None else slots.long().contiguous()
    rope = nope_out[:, :0] if rope_out is None else rope_out
    threads = torch.get_num_threads()
    compiled.gather_rows(row_buffer, listed, nope_out, rope, row_layout(fmt), k_scale, threads)
