"""Attention over rows on CPUs in C++, which g++ compiles at first use, in 20 s."""

from functools import cache
from pathlib import Path
from typing import Any

import torch

from sgl_kvpool import metrics
from sgl_kvpool.codec.compiled import row_layout
from sgl_kvpool.compiler import Module, cpu_flags
from sgl_kvpool.layout import RowFormat
from sgl_kvpool.memory.arrangement import PageStride

_SOURCE = Path(__file__).resolve().parent / "csrc" / "cpu_attention.cpp"


def capability() -> str:
    """Torch's name for this CPU's instructions, or the one of `cpu_flags` with bf16 products."""
    found = torch.backends.cpu.get_cpu_capability()
    return "AVX512_BF16" if found == "AVX512" and torch.cpu.get_capabilities()["avx512_bf16"] else found


@cache
def module(*, required: bool = False) -> Any:
    """The compiled attention. If the build fails: its error if `required`, else None, logged and counted."""
    try:
        return Module("sgl_kvpool_cpu_attention", _SOURCE, cpu_flags(capability(), exact=False)).load()
    except Exception as error:  # no compiler, no tvm-ffi, a cache folder that cannot be written
        if required:
            raise
        metrics.failed("attention_build", "attention on CPUs", error=error)
        return None


def attend_rows(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    q_rope: torch.Tensor | None,
    pool: torch.Tensor,
    entries: torch.Tensor,
    lists: torch.Tensor,
    limits: torch.Tensor,
    fmt: RowFormat,
    scale: float,
    k_scale: float,
    page: PageStride | None = None,
) -> None:
    """Attention as `mla_decode` describes it, by `module`; all tensors are on the CPU.

    `q`, `q_rope` and `out` are bfloat16, float16 or float32, `lse` float32. `lists` `[N, 3]` int64 holds for
    each list the element of `entries` (int32 or int64, its last stride) with which it begins, its first token
    and its number of tokens; token t attends the first `limits[t]` entries (int64) of its list. IndexError
    for a row beyond the pool.
    """
    # float16 is converted, because C++ has it on few compilers.
    dtype = q.dtype if q.dtype is torch.bfloat16 else torch.float32
    written = out.float() if out.dtype is torch.float16 else out
    rope = q[..., :0] if q_rope is None else q_rope
    module().attend_rows(
        written, lse, q.detach().to(dtype), rope.detach().to(dtype), pool, entries, lists, limits,
        row_layout(fmt), scale, k_scale, *(page or PageStride(1, 1)), torch.get_num_threads(),
    )  # fmt: skip
    if written is not out:
        out.copy_(written)
