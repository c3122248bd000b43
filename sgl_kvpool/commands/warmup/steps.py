"""Compilation steps of a server, in sequence, after failures too, and the cache folders of their results."""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from sgl_kvpool import compiler
from sgl_kvpool.commands.processes.progress import progress
from sgl_kvpool.commands.warmup.served import Served
from sgl_kvpool.folders import CACHE, named
from sgl_kvpool.layout import MLAKVCacheLayout

#: Lines shown of a compiler's message.
_LINES = 20
#: Suffixes of compiled files. Other files there (sources, logs, locks) may be left by a failed build.
_COMPILED = (".so", ".cubin", ".hsaco")


@dataclass(frozen=True)
class Cache:
    """A cache folder, which `variable` moves; `folder` gives the path for a process that imports SGLang."""

    name: str
    variable: str
    folder: Callable[[], Path]

    def compiled(self) -> dict[Path, int]:
        """Compiled files and their times of modification in ns; none where this account may not look."""
        found = {}
        for path in (Path(place, name) for place, _, names in os.walk(self.folder()) for name in names):
            if path.suffix in _COMPILED:
                with contextlib.suppress(FileNotFoundError):  # another process may replace it now
                    found[path] = path.stat().st_mtime_ns
        return found


def _below(
    variable: str, name: str, above: str = "SGLANG_CACHE_DIR", default: str = "~/.cache/sglang"
) -> Path:
    return named(variable, f"{os.environ.get(above) or default}/{name}")


#: Folders by a short name. SGLang puts those of Triton and FlashInfer into its own.
CACHES = {
    "own": Cache("sgl-kvpool", compiler.VARIABLE, compiler.folder),
    "torch": Cache(
        "torch's extensions",
        "TORCH_EXTENSIONS_DIR",
        lambda: _below("TORCH_EXTENSIONS_DIR", "torch_extensions", *CACHE),
    ),
    "sglang": Cache(
        "SGLang's kernels",
        "SGLANG_JIT_CACHE_DIR",
        lambda: named("SGLANG_JIT_CACHE_DIR", "~/.cache/sglang/jit"),
    ),
    "triton": Cache("Triton", "TRITON_CACHE_DIR", lambda: _below("TRITON_CACHE_DIR", "triton")),
    "flashinfer": Cache(
        "FlashInfer",
        "FLASHINFER_WORKSPACE_BASE",
        lambda: _below("FLASHINFER_WORKSPACE_BASE", "") / ".cache" / "flashinfer",
    ),
}
#: Variables by device, for the help text.
VARIABLES = {
    "cpu": [CACHES[name].variable for name in ("own", "torch")],
    "cuda": [CACHES[name].variable for name in ("own", "torch", "triton", "flashinfer")],
}


@dataclass(frozen=True)
class Step:
    """Code that is compiled at its first use; an exception of `use` is the reason of its failure."""

    name: str
    caches: tuple[Cache, ...]
    use: Callable[[], object]


def carry_out(steps: Sequence[Step]) -> list[str]:
    """Print and return each step's state: "compiled" (its caches have new files), "cached" or "FAILED"."""
    states = []
    for step in steps:
        before, began, reason = [cache.compiled() for cache in step.caches], time.perf_counter(), ""
        with progress(step.name):
            try:
                step.use()
            except Exception as error:  # compilers and loaders raise anything; later steps may still work
                reason = f": {type(error).__name__}: {error}"
        seconds = time.perf_counter() - began
        is_cached = before == [cache.compiled() for cache in step.caches]
        states.append("FAILED" if reason else "cached" if is_cached else "compiled")
        first, *rest = reason.splitlines() or [""]
        rest = ["...", *rest[-_LINES:]] if len(rest) > _LINES else rest
        print(f"{seconds:7.1f} s  {states[-1]:9}  {step.name}{first}", *rest, sep="\n    ", flush=True)
    return states


_TRITON, _FLASHINFER = (CACHES["triton"],), (CACHES["flashinfer"],)


def steps_on_cpu() -> list[Step]:
    """Steps on a CPU, the same for every model and layout: the code includes all layouts and conversions."""
    from sgl_kvpool.attention import cpu as attention
    from sgl_kvpool.codec import compiled as codec
    from sgl_kvpool.transfer.cpu_engine import engine_class

    return [
        Step("CPU codec", (CACHES["own"],), partial(codec.module, required=True)),
        Step("attention on CPUs", (CACHES["own"],), partial(attention.module, required=True)),
        Step("transfer engine cpu", (CACHES["own"],), partial(engine_class, required=True)),
        _page_hash(),
    ]


def steps_on_cuda(served: Served) -> list[Step]:
    """Steps on CUDA: transfer engines, then the steps of each layout of a model."""
    from sgl_kvpool.commands.warmup.attention import publish
    from sgl_kvpool.transfer.gpu_engine import gpu_calls

    publish(served, "cuda")
    steps = [
        Step("transfer engines staged, copy_engine, kernel", (CACHES["own"],), gpu_calls),
        _page_hash(),
    ]
    return steps + steps_of_model(served, "cuda")


def steps_of_model(served: Served, device: str) -> list[Step]:
    """Steps of attention over rows, for each layout."""
    of_layout = _dense if served.top_k is None else _sparse
    return [step for layout in served.layouts for step in of_layout(served, layout, device)]


def _dense(served: Served, layout: MLAKVCacheLayout, device: str) -> list[Step]:
    from sgl_kvpool.commands.warmup.attention import Attention

    attention = draft = Attention(served, layout, device)
    if served.dcp_size > 1:  # a draft has all rows, and the heads of one rank
        draft = Attention(replace(served, dcp_size=1), layout, device)
    uses: list[tuple[str, Callable[[], object]]] = [
        ("decode", partial(attention.decode_or_verify, "DECODE", 1))
    ]
    if queries := served.draft_tokens:
        extend = partial(draft.decode_or_verify, "DRAFT_EXTEND_V2", queries)
        uses += [
            ("verification of drafts", partial(attention.decode_or_verify, "TARGET_VERIFY", queries)),
            ("extend of a draft", partial(_of_one_rank, extend)),
            ("steps of a draft", partial(_of_one_rank, draft.draft_step)),
        ]
        if draft is not attention:
            prefill = partial(draft.prefill, in_chunks=True)
            uses.append(("prefill of a draft in chunks", partial(_of_one_rank, prefill)))
    steps = [Step(f"{layout}: {name}", _TRITON, use) for name, use in uses]
    steps += [
        Step(f"{layout}: reading rows as keys", _TRITON, attention.read_rows),
        Step(f"{layout}: prefill in chunks", _TRITON, partial(attention.prefill, in_chunks=True)),
    ]
    if served.qk_rope_head_dim:  # FlashInfer's kernels need rotary values
        both = (*_TRITON, *_FLASHINFER)
        steps += [
            Step(f"{layout}: prefill in one call", both, partial(attention.prefill, in_chunks=False)),
            Step(f"{layout}: prefill in the MHA form", both, attention.multi_head),
        ]
    return steps


def _of_one_rank(use: Callable[[], object]) -> None:
    """As drafts run on each of several ranks (`hooks/dense_ranks.py`)."""
    from sglang.srt.runtime_context import get_parallel

    with get_parallel().override(dcp_enabled=False, attn_dcp_size=1, attn_dcp_rank=0):
        use()


def _sparse(served: Served, layout: MLAKVCacheLayout, device: str) -> list[Step]:
    from sgl_kvpool.commands.warmup.attention import SparseRows
    from sgl_kvpool.srt.facts.topk_transform import is_ours

    rows, steps = SparseRows(served, layout, device), []
    if not layout.is_sglang_native or served.dcp_size > 1:
        steps.append(Step(f"{layout}: writing rows", _TRITON, rows.store))
    if is_ours(layout, served.dcp_size):
        steps.append(Step(f"{layout}: top-k lists", _TRITON, rows.read))
    return steps


def _page_hash() -> Step:
    def use() -> None:
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        get_storage_hash_str(list(range(64)), None, page_size=64)

    return Step("SGLang's hash of pages, for stores", (CACHES["torch"],), use)
