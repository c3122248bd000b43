"""Arguments that do not work with layouts and arrangements; attention backends are in :mod:`.attention`.

Each refusal is an error at server start that names value, reason and way out.
"""

from __future__ import annotations

from typing import Any

from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.memory.arrangement import KVArrangement
from sgl_kvpool.refusal import Refusal, use
from sgl_kvpool.sglang_plugin.models import is_hybrid, layers_with_rows, model_name, row_format_of
from sgl_kvpool.sglang_plugin.options import ARRANGEMENT, HOST_ENGINE, HOST_LAYOUT, HOST_SHARING, LAYOUT
from sgl_kvpool.sglang_plugin.rules.features import LAYOUT_FEATURES, disaggregates, first_in_use
from sgl_kvpool.transfer.host_options import (
    CPU_ENGINE,
    GPU_ENGINE_NAMES,
    HOST_IO_BACKENDS,
    HOST_LABELS,
    HostTierOptions,
)

__all__ = [
    "check_dtype",
    "check_features",
    "check_host_model",
    "check_host_tier",
    "check_model",
    "check_without_tier",
    "has_host_tier",
]


def check_dtype(layout: MLAKVCacheLayout, kv_cache_dtype: str, *, is_dsa: bool) -> None:
    """Refuse a `--kv-cache-dtype` that contradicts the layout; the error lists what each layout accepts."""
    if kv_cache_dtype in layout.accepted_kv_cache_dtypes(is_dsa=is_dsa):
        return
    table = "; ".join(
        f"{member}: {', '.join(member.accepted_kv_cache_dtypes(is_dsa=is_dsa))}"
        for member in MLAKVCacheLayout
    )
    raise Refusal(
        f"--kv-cache-dtype {kv_cache_dtype} contradicts --kv-cache-layout {layout}; leave it out, or use "
        f"what each layout accepts ({table})"
    )


def check_features(layout: MLAKVCacheLayout, arrangement: KVArrangement, view: Any) -> None:
    """Refuse arguments that do not work with layout and arrangement; `view` has ServerArgs' fields."""
    refused = [f for f in LAYOUT_FEATURES if f.arrangements is None or f.arrangements(arrangement)]
    found = first_in_use(refused, view)
    if found is None:
        return
    feature, text = found
    ours = f"{ARRANGEMENT.flag} {arrangement}" if feature.arrangements else f"{LAYOUT.flag} {layout}"
    raise Refusal(f"{text} does not work with {ours}: {feature.reason}; leave out one of the two")


def has_host_tier(view: Any) -> bool:
    """Whether a server will build a host tier."""
    # SGLang reads the offload argument on decode servers only.
    offloads = view.disaggregation_mode == "decode" and view.disaggregation_decode_enable_offload_kvcache
    return view.enable_hierarchical_cache or offloads


def check_without_tier(options: HostTierOptions, view: Any) -> None:
    """Refuse a store, or options of a host tier, on a server without a host tier."""
    flag = "--enable-hierarchical-cache"
    nothing = HostTierOptions()
    for option, value, default in (
        (HOST_LAYOUT, options.layout, nothing.layout),
        (HOST_ENGINE, options.engine, nothing.engine),
        (HOST_SHARING, options.sharing, nothing.sharing),
    ):
        if value != default:
            raise Refusal(
                f"{option.flag} {value} (or {option.env}) does nothing without {flag}; add that, or leave "
                "it out"
            )
    # Prefill and decode servers are exempt.
    if view.hicache_storage_backend is not None and not disaggregates(view.disaggregation_mode):
        raise Refusal(
            f"--hicache-storage-backend {view.hicache_storage_backend} does nothing without {flag}; add "
            "that, or leave it out"
        )


def check_host_tier(
    layout: MLAKVCacheLayout, arrangement: KVArrangement, options: HostTierOptions, view: Any
) -> None:
    """Refuse arguments that do not work with the host tier; without a tier, a store and options of a tier."""
    if not has_host_tier(view):
        check_without_tier(options, view)
        return
    flag = "--enable-hierarchical-cache"
    if not view.enable_hierarchical_cache:
        flag = "--disaggregation-decode-enable-offload-kvcache"
    able = {"cpu": (CPU_ENGINE,), "cuda": GPU_ENGINE_NAMES}.get(view.device, ())
    if not able:
        raise Refusal(
            f"{flag} does not work with {LAYOUT.flag} {layout} on {view.device}: sgl-kvpool has engines for "
            "cpu and cuda; leave it out"
        )
    if options.engine != HOST_ENGINE.default and options.engine not in able:
        raise Refusal(
            f"{HOST_ENGINE.flag} {options.engine} does not work on {view.device}; leave it out, or "
            f"{use(able)}"
        )
    if options.engine == "copy_engine" and options.host_layout(layout) is not layout:
        raise Refusal(
            f"{HOST_ENGINE.flag} copy_engine copies rows as they are, and {HOST_LAYOUT.flag} "
            f"{options.layout} changes them; use staged, which encodes into a buffer from which the copy "
            "engine takes them, or kernel"
        )
    if options.takes(layout, arrangement, view.device):
        _check_host_arguments(layout, view)


def _check_host_arguments(layout: MLAKVCacheLayout, view: Any) -> None:
    """Refuse values of SGLang's arguments that our host tier does not support."""
    for option, value, taken, reason in (
        (
            "--hicache-mem-layout",
            view.hicache_mem_layout,
            HOST_LABELS,
            "the host tier keeps all layers of a page together",
        ),
        ("--hicache-io-backend", view.hicache_io_backend, HOST_IO_BACKENDS, "it is for Ascend NPUs"),
    ):
        if value not in taken:
            raise Refusal(
                f"{option} {value} does not work with {LAYOUT.flag} {layout}: {reason}; leave it out, or "
                f"{use(taken)}"
            )


def check_host_model(
    layout: MLAKVCacheLayout,
    arrangement: KVArrangement,
    options: HostTierOptions,
    model_config: Any,
    view: Any,
) -> None:
    """Refuse a host layout whose rows are not narrower, and pools that our tier cannot describe."""
    from sglang.srt.configs.model_config import get_dsa_index_kpool_compress

    from sgl_kvpool.transfer.conversion import host_layout_problem

    ours = options.takes(layout, arrangement, view.device)
    if ours and is_hybrid(model_config):
        _check_states(layout, model_config, view)
    # Compressed index keys have a tail per request outside of the pages (`srt.pool.regions`).
    if ours and get_dsa_index_kpool_compress(model_config.hf_config):
        raise Refusal(
            f"{model_name(model_config)} has compressed index keys, whose tails do not lie in the pages of a "
            f"host tier of sgl-kvpool; leave out {HOST_LAYOUT.flag} and {HOST_ENGINE.flag} to use SGLang's "
            f"own tier with {LAYOUT.flag} {layout}, or leave out --enable-hierarchical-cache"
        )
    rows = row_format_of(model_config, layout)
    problem = host_layout_problem(rows, options.host_layout(layout))
    if problem is not None:
        raise Refusal(f"{HOST_LAYOUT.flag} {options.layout} does not work: {problem}")


def _check_states(layout: MLAKVCacheLayout, model_config: Any, view: Any) -> None:
    """Refuse states of a hybrid model that our host tier cannot store."""
    from sglang.srt.distributed.utils import get_pp_indices

    flag, remedy = "--enable-hierarchical-cache", f"or serve without {LAYOUT.flag}"
    for field, replay in (
        ("enable_linear_replayssm", "--enable-linear-replayssm"),
        ("enable_linear_replayssm_spec", "--enable-linear-replayssm-spec"),
    ):
        if getattr(view, field):
            raise Refusal(
                f"{replay} does not work with {flag} and {LAYOUT.flag} {layout}: a state loaded from the "
                "host would be combined with tokens that the slot's former owner was to replay; leave out "
                f"one of the two, {remedy}"
            )
    layers, with_rows = model_config.num_hidden_layers, set(layers_with_rows(model_config) or ())
    for rank in range(view.pp_size):
        stage = range(*get_pp_indices(layers, rank, view.pp_size))
        if not 0 < len(with_rows.intersection(stage)) < len(stage):
            raise Refusal(
                f"--pp-size {view.pp_size} gives layers {stage.start} to {stage.stop - 1} of "
                f"{model_name(model_config)} a stage of their own, which has no rows or no states for "
                f"{flag}; use fewer stages, {remedy}"
            )


def check_model(layout: MLAKVCacheLayout, model_config: Any) -> None:
    """Refuse models whose KV cache is not MLA, or whose geometry no layout stores."""
    from sglang.srt.configs.model_config import AttentionArch

    name = model_name(model_config)
    remedy = "serve it without --kv-cache-layout"
    if model_config.attention_arch != AttentionArch.MLA:
        raise Refusal(
            f"--kv-cache-layout {layout} stores rows of multi-head latent attention (MLA), and {name} "
            f"uses {model_config.attention_arch.name}; {remedy}"
        )
    with_rows = layers_with_rows(model_config)
    if with_rows is not None and not with_rows:
        raise Refusal(
            f"--kv-cache-layout {layout} stores rows of multi-head latent attention (MLA), and all "
            f"{model_config.num_hidden_layers} layers of {name} keep states instead; {remedy}"
        )
    if model_config.is_hybrid_swa:
        raise Refusal(
            f"{name} mixes MLA with sliding windows, which --kv-cache-layout {layout} does not support; "
            f"{remedy}"
        )
    row_format_of(model_config, layout)
