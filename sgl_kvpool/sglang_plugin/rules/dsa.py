"""Implementations, dtype and refusals of a server whose model has sparse attention (DSA).

SGLang has one attention backend for such models and, in it, implementations for prefill and decode.
`sgl_kvpool.attention.topk_transform` decides which of them work with a layout. Before SGLang chooses, this
module declares those that the user left open, if SGLang would choose wrongly; afterwards it checks the pair.
"""

from __future__ import annotations

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
from sgl_kvpool.sglang_plugin.models import device_name, has_own_draft, is_rocm, model_name, row_format_of
from sgl_kvpool.sglang_plugin.options import ARRANGEMENT, LAYOUT
from sgl_kvpool.sglang_plugin.rules import host_tier as host_tier_rules
from sgl_kvpool.sglang_plugin.rules.features import BACKEND_FIELDS, READER_FEATURES, first_in_use, flag_of

__all__ = [
    "check_draft_backend",
    "check_pair",
    "check_resolved",
    "check_stock",
    "is_ours",
    "layout_of_pool",
    "modes_in_use",
    "prepare",
    "stock_layout",
    "table_names",
]

#: SGLang's names of the backend; the second is the old one.
_NAMES = (DSA_BACKEND, "nsa")
_IMPLEMENTATION_FIELDS = ("dsa_prefill_backend", "dsa_decode_backend")


# -------------------------------------------------------------------- before SGLang resolves


def prepare(
    layout: MLAKVCacheLayout, arrangement: KVArrangement, model_config: Any, server_args: Any
) -> dict:
    """Arguments to declare for a DSA model, from the user's arguments.

    Parameters
    ----------
    layout : MLAKVCacheLayout
    arrangement : KVArrangement
    model_config : ModelConfig
        SGLang's configuration of the model.
    server_args : ServerArgs
        Its fields still hold the user's values.

    Returns
    -------
    dict
        Values by field of ServerArgs.

    Raises
    ------
    ValueError
        An argument does not work with the layout; the message names a way out.
    """
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
    for field in BACKEND_FIELDS:
        value = getattr(server_args, field)
        if value is not None:
            _check_backend(f"{flag_of(field)} {value}", value, name)
    if not has_own_draft(server_args):
        check_draft_backend(server_args.speculative_draft_attention_backend, name)
    host_tier_rules.check_dtype(layout, server_args.kv_cache_dtype, is_dsa=True)
    declared = {"kv_cache_dtype": layout.sglang_kv_cache_dtype(is_dsa=True)}
    if sglang_dsa_reads(layout):
        return declared
    _check_reader(layout, model_config)
    for field in _IMPLEMENTATION_FIELDS:
        value = getattr(server_args, field)
        if value not in (None, SPARSE_BF16):
            raise UnsupportedCombination(
                f"{flag_of(field)} {value} cannot read rows of {LAYOUT.flag} {layout}; leave it out, and "
                f"prefill uses {SPARSE_BF16} over decoded rows, and decode uses {KVPOOL_DECODE}, under "
                f"SGLang's name {SPARSE_BF16}"
            )
        # On Hopper SGLang would choose fa3 for decode, which attends rows as they are stored.
        declared[field] = SPARSE_BF16
    return declared


def check_draft_backend(backend: str | None, name: str) -> None:
    """Refuse a draft's explicit backend that does not support sparse attention.

    A separate draft model is checked when its pool is built, since its attention is not known before.
    """
    if backend is not None:
        _check_backend(f"--speculative-draft-attention-backend {backend}", backend, name)


def _check_backend(what: str, backend: str, name: str, remedy: str = "leave it out") -> None:
    """Refuse an attention backend that model `name` cannot use; `what` is its name in the error."""
    if backend not in _NAMES:
        raise Refusal(
            f"{what} does not compute the sparse attention (DSA) of {name}; {remedy}, and SGLang uses "
            f"{DSA_BACKEND}"
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
    capability = torch.cuda.get_device_capability()
    if capability < (9, 0):
        raise Refusal(
            f"{LAYOUT.flag} {layout} needs a Hopper GPU (compute capability 9.0), and this one has "
            f"{capability[0]}.{capability[1]}; use {LAYOUT.flag} {MLAKVCacheLayout.BF16}"
        )
    # SGLang reads `hf_config` when it resolves arguments and `hf_text_config` when it builds attention.
    configs = (model_config.hf_config, model_config.hf_text_config)
    if any(getattr(config, "learnable_sink", False) for config in configs):
        raise Refusal(
            f"{name} has learnable attention sinks, which are not computed over rows of {LAYOUT.flag} "
            f"{layout}; use {LAYOUT.flag} {MLAKVCacheLayout.BF16}"
        )
    index_kpool = get_dsa_index_kpool(model_config.hf_config)
    check_pair(layout, SPARSE_BF16, SPARSE_BF16, index_kpool=index_kpool)


# -------------------------------------------------------------------- after SGLang has resolved


def check_resolved(layout: MLAKVCacheLayout, model_config: Any, view: Any) -> None:
    """Refuse arguments with which some batch of a server with a layout would fail or read wrong rows.

    Parameters
    ----------
    layout : MLAKVCacheLayout
    model_config : ModelConfig
    view
        A resolving view of the server's arguments.

    Raises
    ------
    UnsupportedCombination, ValueError
    """
    from sglang.srt.arg_groups.overrides import attention_backends_of

    name = model_name(model_config)
    if env.flag(env.PREFILL_READS_ROWS):
        raise Refusal(
            f"{env.PREFILL_READS_ROWS}=1 does nothing for the attention backend {DSA_BACKEND}; leave it out"
        )
    for phase, backend in zip(PHASES, attention_backends_of(view), strict=True):
        # If the user names the backend of one phase, SGLang sets the other.
        remedy = f"leave out {', '.join(map(flag_of, BACKEND_FIELDS))}"
        _check_backend(f"the {phase} attention backend, {backend},", backend, name, remedy)
    _check_modes(layout, model_config, view)
    if not sglang_dsa_reads(layout):
        found = first_in_use(READER_FEATURES, view)
        if found is not None:
            feature, text = found
            raise Refusal(
                f"{text} does not work with {LAYOUT.flag} {layout}: {feature.reason}; leave out one of "
                "the two"
            )
    for field in _IMPLEMENTATION_FIELDS:
        name = getattr(view, field)
        if name in SGLANG_READERS[layout].dsa_copied:
            raise Refusal(
                f"{flag_of(field)} {name} would quantise the whole pool of a layer in every call with "
                f"{LAYOUT.flag} {layout}, however few rows the batch refers to; leave it out"
            )


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
                f"{flag_of(field)} {value} is not for NVIDIA GPUs; {nearest_pair(layout, *pair)}"
            )
    check_pair(
        layout,
        view.dsa_prefill_backend,
        view.dsa_decode_backend,
        modes=modes_in_use(view),
        index_kpool=get_dsa_index_kpool(model_config.hf_config),
    )


def check_pair(
    layout: MLAKVCacheLayout,
    prefill: str,
    decode: str,
    *,
    modes: tuple[str, ...] = (),
    index_kpool: int = 1,
) -> None:
    """`check_combination` for SGLang's names of implementations.

    Parameters
    ----------
    layout : MLAKVCacheLayout
    prefill, decode : str
        SGLang's names of the implementations.
    modes : tuple of str
        Forward modes of batches, besides those of every server.
    index_kpool : int
    """
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


# -------------------------------------------------------------------- which rows


def layout_of_pool(pool: Any) -> MLAKVCacheLayout | None:
    """Layout of the rows of a pool, ours or SGLang's; None for rows of no layout."""
    if is_ours(pool):
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


def is_ours(pool: Any) -> bool:
    """Whether a pool was made for a layout."""
    return hasattr(pool, "kv_cache_layout")


def stock_layout(view: Any) -> MLAKVCacheLayout | None:
    """Layout that SGLang itself will store, from its resolved arguments (`calculate_mla_kv_cache_dim`)."""
    prefill, decode = view.dsa_prefill_backend, view.dsa_decode_backend
    here = {"prefill": (prefill,), "decode": (decode,)}.get(view.disaggregation_mode, (prefill, decode))
    scaled = "trtllm" not in here and (prefill, decode) != ("tilelang", "tilelang")
    return _sglang_layout(view.kv_cache_dtype, scaled=scaled and view.kv_cache_dtype == "fp8_e4m3")
