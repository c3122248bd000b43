"""Implementations, dtype and refusals of a server whose model has sparse attention (DSA).

SGLang has one attention backend for such models and, in it, implementations for prefill and decode.
`sgl_kvpool.attention.topk_transform` decides which of them work with a layout. Before SGLang chooses, this
module declares those that the user left open, if SGLang would choose wrongly; afterwards it checks the pair.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sgl_kvpool import env
from sgl_kvpool.attention.decode_config import MAX_LATENT_RANK
from sgl_kvpool.attention.readers import DSA_BACKEND, PHASES, SGLANG_READERS, sglang_dsa_reads
from sgl_kvpool.attention.topk_transform import (
    DECODE_MODES,
    IMPLEMENTATIONS,
    KVPOOL_DECODE,
    SPARSE_BF16,
    UnsupportedCombination,
    check_combination,
    nearest_pair,
)
from sgl_kvpool.layout import POOL_ALIGN_BYTES, MLAKVCacheLayout
from sgl_kvpool.memory.arrangement import KVArrangement
from sgl_kvpool.refusal import Refusal
from sgl_kvpool.sglang_plugin import models
from sgl_kvpool.sglang_plugin.models import device_name, has_own_draft, is_rocm, model_name, row_format_of
from sgl_kvpool.sglang_plugin.options import ARRANGEMENT, LAYOUT
from sgl_kvpool.sglang_plugin.registry import fields, uses
from sgl_kvpool.sglang_plugin.rules.features import BACKEND_FIELDS, READER_FEATURES, check_features, flag_of

#: SGLang's names of the backend; the second is the old one.
_NAMES = (DSA_BACKEND, "nsa")
_IMPLEMENTATION_FIELDS = ("dsa_prefill_backend", "dsa_decode_backend")

uses("sglang.srt.configs.model_config.get_dsa_index_kpool", "model rules", takes=("config",))
fields(*_IMPLEMENTATION_FIELDS, "cp_strategy", "enable_mixed_chunk")


def prepare(
    layout: MLAKVCacheLayout, arrangement: KVArrangement, model_config: Any, server_args: Any
) -> dict:
    """Arguments to declare for a DSA model, by field; Refusal if one of the user's contradicts the layout."""
    from sglang.srt.arg_groups.overrides import resolving_view

    name = model_name(model_config)
    device = device_name(resolving_view(server_args))
    if device != "cuda":
        raise Refusal(
            f"{LAYOUT.flag} {layout} serves models with sparse attention, such as {name}, on NVIDIA GPUs "
            f"only, and the device is {device}; serve it without {LAYOUT.flag}"
        )
    if arrangement is not KVArrangement.LAYER_MAJOR:
        raise Refusal(
            f"{ARRANGEMENT.flag} {arrangement} does not work with {name}: the kernels of sparse attention "
            "need the rows of a layer to be adjacent; leave it out"
        )
    if wrong := _given(BACKEND_FIELDS, server_args, lambda value: value not in _NAMES):
        raise _not_sparse(" and ".join(wrong), name, _leave_out(wrong))
    if not has_own_draft(server_args):
        check_draft_backend(server_args.speculative_draft_attention_backend, name)
    declared = {"kv_cache_dtype": layout.sglang_kv_cache_dtype(is_dsa=True)}
    if sglang_dsa_reads(layout):
        return declared
    _check_reader(layout, model_config)
    if wrong := _given(_IMPLEMENTATION_FIELDS, server_args, lambda value: value != SPARSE_BF16):
        raise UnsupportedCombination(
            f"{' and '.join(wrong)} cannot read rows of {LAYOUT.flag} {layout}",
            f"{_leave_out(wrong)}, and prefill uses {SPARSE_BF16} over decoded rows, and decode uses "
            f"{KVPOOL_DECODE}, under SGLang's name {SPARSE_BF16}",
        )
    # On Hopper SGLang would choose fa3 for decode, which attends rows as they are stored.
    return declared | dict.fromkeys(_IMPLEMENTATION_FIELDS, SPARSE_BF16)


def _given(fields: tuple[str, ...], view: Any, is_wrong: Callable[[str], bool]) -> list[str]:
    """The arguments among `fields` whose values are wrong, as the user writes them."""
    values = {field: getattr(view, field) for field in fields}
    return [
        f"{flag_of(name)} {value}" for name, value in values.items() if value is not None and is_wrong(value)
    ]


def _leave_out(arguments: list[str]) -> str:
    return "leave it out" if len(arguments) == 1 else "leave them out"


def check_draft_backend(backend: str | None, name: str) -> None:
    """Refuse a draft's explicit backend that does not support sparse attention.

    A separate draft model is checked when its pool is built, since its attention is not known before.
    """
    if backend not in (None, *_NAMES):
        raise _not_sparse(f"--speculative-draft-attention-backend {backend}", name, "leave it out")


def _not_sparse(what: str, name: str, remedy: str) -> Refusal:
    """The error for an attention backend that model `name` cannot use."""
    return Refusal(
        f"{what} cannot compute the sparse attention (DSA) of {name}; {remedy}, and SGLang uses {DSA_BACKEND}"
    )


def _check_reader(layout: MLAKVCacheLayout, model_config: Any) -> None:
    """Refuse models and GPUs that our readers do not support."""
    import torch
    from sglang.srt.configs.model_config import get_dsa_index_kpool

    name, rank = model_name(model_config), model_config.kv_lora_rank
    row_bytes = row_format_of(model_config, layout).row_bytes
    if rank > MAX_LATENT_RANK or row_bytes % POOL_ALIGN_BYTES:
        raise Refusal(
            f"{name} has kv_lora_rank={rank}, whose rows of {LAYOUT.flag} {layout} have {row_bytes} bytes; "
            f"{KVPOOL_DECODE} supports up to kv_lora_rank {MAX_LATENT_RANK}, and rows of multiples of "
            f"{POOL_ALIGN_BYTES} bytes; use {LAYOUT.flag} {MLAKVCacheLayout.BF16}"
        )
    if model_config.dtype != torch.bfloat16:
        raise Refusal(
            f"--dtype {str(model_config.dtype).removeprefix('torch.')} does not work with {LAYOUT.flag} "
            f"{layout} and sparse attention, whose kernels multiply bfloat16; use --dtype bfloat16"
        )
    models.check_gpu(f"{LAYOUT.flag} {layout}", f"use {LAYOUT.flag} {MLAKVCacheLayout.BF16}")
    # SGLang reads `hf_config` when it resolves arguments and `hf_text_config` when it builds attention.
    configs = (model_config.hf_config, model_config.hf_text_config)
    if any(getattr(config, "learnable_sink", False) for config in configs):
        raise Refusal(
            f"{name} has learnable attention sinks, which are not computed over rows of {LAYOUT.flag} "
            f"{layout}; use {LAYOUT.flag} {MLAKVCacheLayout.BF16}"
        )
    index_kpool = get_dsa_index_kpool(model_config.hf_config)
    check_pair(layout, SPARSE_BF16, SPARSE_BF16, index_kpool=index_kpool)


def check_resolved(layout: MLAKVCacheLayout, model_config: Any, view: Any) -> None:
    """Refuse arguments with which some batch of a server with a layout would fail or read wrong rows."""
    from sglang.srt.arg_groups.overrides import attention_backends_of

    name = model_name(model_config)
    if env.flag(env.PREFILL_READS_ROWS):
        raise Refusal(
            f"{env.PREFILL_READS_ROWS}=1 does nothing for the attention backend {DSA_BACKEND}; leave it out"
        )
    for phase, backend in zip(PHASES, attention_backends_of(view), strict=True):
        if backend not in _NAMES:
            # If the user names the backend of one phase, SGLang sets the other.
            remedy = f"leave out {', '.join(map(flag_of, BACKEND_FIELDS))}"
            raise _not_sparse(f"the {phase} attention backend, {backend},", name, remedy)
    try:
        _check_modes(layout, model_config, view)
    except UnsupportedCombination as error:
        other = _other_layout(layout, model_config, view)
        if other is None:
            raise
        remedy = f"use {LAYOUT.flag} {other}, or {error.remedy}"
        raise UnsupportedCombination(error.problem, remedy, error.instead) from None
    if view.enable_prefill_cp and view.cp_strategy == "zigzag":
        raise Refusal(
            "--cp-strategy zigzag does not work with sparse attention, whose keys SGLang gathers from "
            "interleaved ranks only; use --cp-strategy interleave"
        )
    if not sglang_dsa_reads(layout):
        remedy = (
            f"use {LAYOUT.flag} {_default_narrow_layout()}, whose rows SGLang's kernels read, or leave it out"
        )
        check_features(READER_FEATURES, view, f"{LAYOUT.flag} {layout}", remedy)
    copied = SGLANG_READERS[layout].dsa_copied
    if wrong := _given(_IMPLEMENTATION_FIELDS, view, lambda value: value in copied):
        other = _other_layout(layout, model_config, view)
        raise Refusal(
            f"{' and '.join(wrong)} would quantise the whole pool of a layer in every call with "
            f"{LAYOUT.flag} {layout}, however few rows the batch refers to; "
            + ("" if other is None else f"use {LAYOUT.flag} {other}, or ")
            + _leave_out(wrong)
        )


def _default_narrow_layout() -> MLAKVCacheLayout:
    """The narrow layout whose rows SGLang's default implementations read on this GPU."""
    import torch

    if torch.cuda.get_device_capability() >= (10, 0):
        return MLAKVCacheLayout.FP8_NOPE_FP8_ROPE  # trtllm
    return MLAKVCacheLayout.FP8_NOPE_WITH_BLOCK_SCALE_BF16_ROPE  # flashmla_kv


def _other_layout(layout: MLAKVCacheLayout, model_config: Any, view: Any) -> MLAKVCacheLayout | None:
    """A narrow layout whose rows the resolved implementations read, if `layout` is not one; else None."""
    for other in MLAKVCacheLayout:
        if other is layout or not other.is_narrow or not sglang_dsa_reads(other):
            continue
        with suppress(UnsupportedCombination):
            _check_modes(other, model_config, view)
            return other
    return None


def check_stock(model_config: Any, view: Any) -> None:
    """Check the implementations over SGLang's own pool, with KVPOOL_FIX_TOPK=1 and no layout."""
    if view.use_ray:
        raise Refusal(
            f"--use-ray does not work with {env.FIX_TOPK}=1: Ray actors do not load SGLang plugins; leave "
            "out one of the two"
        )
    layout = stock_layout(view)
    if layout is not None and view.device == "cuda" and not is_rocm() and not view.enable_hisparse:
        _check_modes(layout, model_config, view)


def _check_modes(layout: MLAKVCacheLayout, model_config: Any, view: Any) -> None:
    from sglang.srt.configs.model_config import get_dsa_index_kpool

    for field in _IMPLEMENTATION_FIELDS:
        value = getattr(view, field)
        if value not in IMPLEMENTATIONS:
            pair = view.dsa_prefill_backend, view.dsa_decode_backend
            raise UnsupportedCombination(
                f"{flag_of(field)} {value} is not for NVIDIA GPUs", nearest_pair(layout, *pair)
            )
    check_pair(
        layout,
        view.dsa_prefill_backend,
        view.dsa_decode_backend,
        modes=modes_in_use(view),
        index_kpool=get_dsa_index_kpool(model_config.hf_config),
    )


def check_pair(
    layout: MLAKVCacheLayout, prefill: str, decode: str, *, modes: tuple[str, ...] = (), index_kpool: int = 1
) -> None:
    """`check_combination` for SGLang's names of implementations; `modes` besides those of every server."""
    pair = table_names(layout, prefill, decode)
    check_combination(layout, *pair, ("EXTEND", *DECODE_MODES, *modes), index_kpool=index_kpool)


def modes_in_use(view: Any) -> tuple[str, ...]:
    """Forward modes of a server's batches, besides prefill, decode and the modes of drafts."""
    return tuple(
        mode
        for mode, on in (
            ("MIXED", view.enable_mixed_chunk),
            ("SPLIT_PREFILL", view.enable_pdmux),
            ("DLLM_EXTEND", view.dllm_algorithm is not None),
        )
        if on
    )


def table_names(layout: MLAKVCacheLayout, prefill: str, decode: str) -> tuple[str, str]:
    """The table's names for SGLang's pair of implementations.

    For a layout that SGLang's kernels cannot read, SGLang's name for decode stands for our decode.
    """
    if not sglang_dsa_reads(layout) and (prefill, decode) == (SPARSE_BF16, SPARSE_BF16):
        return prefill, KVPOOL_DECODE
    return prefill, decode


def layout_of_pool(pool: Any) -> MLAKVCacheLayout | None:
    """Layout of the rows of a pool, ours or SGLang's; None for rows of no layout."""
    if hasattr(pool, "kv_cache_layout"):
        return pool.kv_cache_layout
    # SGLang's own pool has a dtype and a flag instead of a layout.
    dtypes = {"torch.bfloat16": "bfloat16", "torch.float8_e4m3fn": "fp8_e4m3"}
    return _sglang_layout(dtypes.get(str(pool.dtype)), scaled=pool.dsa_kv_cache_store_fp8)


def _sglang_layout(kv_cache_dtype: str | None, *, scaled: bool) -> MLAKVCacheLayout | None:
    """Layout of the rows that SGLang itself stores; None for rows of no layout."""
    for layout in filter(sglang_dsa_reads, MLAKVCacheLayout):
        if (layout.sglang_kv_cache_dtype(is_dsa=True), layout.is_packed) == (kv_cache_dtype, scaled):
            return layout
    return None


def stock_layout(view: Any) -> MLAKVCacheLayout | None:
    """Layout that SGLang itself will store, from its resolved arguments (`calculate_mla_kv_cache_dim`)."""
    prefill, decode = view.dsa_prefill_backend, view.dsa_decode_backend
    here = {"prefill": (prefill,), "decode": (decode,)}.get(view.disaggregation_mode, (prefill, decode))
    scaled = "trtllm" not in here and (prefill, decode) != ("tilelang", "tilelang")
    return _sglang_layout(view.kv_cache_dtype, scaled=scaled and view.kv_cache_dtype == "fp8_e4m3")
