"""Compilation steps of a server."""

from __future__ import annotations

from functools import partial

from sgl_kvpool.attention.readers import sglang_dsa_reads
from sgl_kvpool.commands.warmup.served import Served
from sgl_kvpool.commands.warmup.steps import CACHES, Step
from sgl_kvpool.layout import MLAKVCacheLayout

__all__ = ["steps_of_model", "steps_on_cpu", "steps_on_cuda"]

_TRITON, _FLASHINFER = (CACHES["triton"],), (CACHES["flashinfer"],)


def steps_on_cpu() -> list[Step]:
    """Steps on a CPU, the same for every model and layout: the code includes all layouts and conversions."""
    return [
        Step("CPU codec", (CACHES["tvm_ffi"],), _cpu_codec),
        Step("transfer engine cpu", (CACHES["tvm_ffi"],), _cpu_engine),
        _page_hash(),
    ]


def steps_on_cuda(served: Served) -> list[Step]:
    """Steps on CUDA: transfer engines, then the steps of each layout of a model."""
    from sgl_kvpool.commands.warmup.attention import publish

    publish(served, "cuda")
    # SGLang is installed, so engines are compiled by its loader.
    steps = [
        Step("transfer engines staged, copy_engine, kernel", (CACHES["sglang"],), _gpu_engines),
        _page_hash(),
    ]
    return steps + steps_of_model(served, "cuda")


def steps_of_model(served: Served, device: str) -> list[Step]:
    """Steps of attention over rows, for each layout."""
    of_layout = _dense if served.top_k is None else _sparse
    return [step for layout in served.layouts for step in of_layout(served, layout, device)]


def _dense(served: Served, layout: MLAKVCacheLayout, device: str) -> list[Step]:
    from sgl_kvpool.commands.warmup.attention import Attention

    attention = Attention(served, layout, device)
    modes = [("DECODE", 1)]
    if served.draft_tokens:
        modes += [("TARGET_VERIFY", served.draft_tokens), ("DRAFT_EXTEND_V2", served.draft_tokens)]
    steps = [
        Step(f"{layout}: {_WORDS[mode]}", _TRITON, partial(attention.decode_or_verify, mode, queries))
        for mode, queries in modes
    ]
    if served.draft_tokens:
        steps.append(Step(f"{layout}: steps of a draft", _TRITON, attention.draft_step))
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


_WORDS = {
    "DECODE": "decode",
    "TARGET_VERIFY": "verification of drafts",
    "DRAFT_EXTEND_V2": "extend of a draft",
}


def _sparse(served: Served, layout: MLAKVCacheLayout, device: str) -> list[Step]:
    from sgl_kvpool.commands.warmup.attention import SparseRows

    rows, steps = SparseRows(served, layout, device), []
    if not layout.is_sglang_native:
        steps.append(Step(f"{layout}: writing rows", _TRITON, rows.store))
    if not sglang_dsa_reads(layout):
        steps.append(Step(f"{layout}: top-k lists", _TRITON, rows.read))
    return steps


def _page_hash() -> Step:
    return Step("SGLang's hash of pages, for stores", (CACHES["torch"],), _hash_a_page)


def _cpu_codec() -> None:
    from sgl_kvpool.codec import compiled

    compiled.module(required=True)


def _cpu_engine() -> None:
    from sgl_kvpool.transfer.cpu_engine import engine_class

    engine_class(required=True)


def _gpu_engines() -> None:
    from sgl_kvpool.srt.host.gpu_calls import gpu_calls

    gpu_calls()


def _hash_a_page() -> None:
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    get_storage_hash_str(list(range(64)), None, page_size=64)
