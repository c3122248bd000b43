"""Arguments and models that do not work with a host tier.

Each refusal is an error at server start that names the value, the reason and what to use instead.
"""

from collections.abc import Mapping
from typing import Any

from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.memory.arrangement import KVArrangement
from sgl_kvpool.refusal import Refusal, use
from sgl_kvpool.sglang_plugin.models import is_hybrid, layers_with_rows, model_name, row_format_of
from sgl_kvpool.sglang_plugin.options import HOST_ENGINE, HOST_LAYOUT, HOST_SHARING, LAYOUT, Option
from sgl_kvpool.sglang_plugin.registry import fields, uses
from sgl_kvpool.sglang_plugin.rules.features import disaggregates
from sgl_kvpool.transfer.host_options import (
    CPU_ENGINE,
    GPU_ENGINE_NAMES,
    HOST_IO_BACKENDS,
    HOST_LABELS,
    HostTierOptions,
)

uses("sglang.srt.configs.model_config.get_dsa_index_kpool_compress", "model rules", takes=("config",))
uses(
    "sglang.srt.distributed.utils.get_pp_indices",
    "model rules",
    takes=("num_hidden_layers", "pp_rank", "pp_size"),
)
fields("enable_deterministic_inference")
fields("enable_hierarchical_cache", "hicache_mem_layout", "hicache_io_backend", "hicache_storage_backend")
fields("disaggregation_decode_enable_offload_kvcache")
fields("enable_linear_replayssm", "enable_linear_replayssm_spec", "pp_size")


def has_host_tier(view: Any) -> bool:
    """Whether a server will build a host tier."""
    # SGLang reads the offload argument on decode servers only.
    offloads = view.disaggregation_mode == "decode" and view.disaggregation_decode_enable_offload_kvcache
    return view.enable_hierarchical_cache or offloads


def check_without_tier(requested: Mapping[Option, str], view: Any) -> None:
    """Refuse a store, or options of a host tier, on a server without a host tier."""
    flag = "--enable-hierarchical-cache"
    for option in (HOST_LAYOUT, HOST_ENGINE, HOST_SHARING):
        if requested[option] != option.default:
            raise Refusal(
                f"{option.flag} {requested[option]} (or {option.env}) does nothing without {flag}; add that, "
                "or leave it out"
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
    """Refuse arguments that do not work with the host tier of a server."""
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
            f"{options.layout} changes them; use {HOST_ENGINE.flag} staged, which encodes into a buffer from "
            f"which the copy engine takes them, or use {HOST_ENGINE.flag} kernel"
        )
    if view.enable_deterministic_inference and options.host_layout(layout) is not layout:
        raise Refusal(
            f"{HOST_LAYOUT.flag} {options.layout} rounds rows that come back from the host tier, so with "
            "--enable-deterministic-inference an answer would depend on where its prefix was; leave out one"
        )
    if options.serves(layout, arrangement, view.device):
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

    ours = options.serves(layout, arrangement, view.device)
    if ours and is_hybrid(model_config):
        _check_states(layout, model_config, view)
    # Compressed index keys have a tail per request outside of the pages (`srt.pool.regions`).
    if ours and get_dsa_index_kpool_compress(model_config.hf_config):
        remedy = "leave out --enable-hierarchical-cache"
        if not HostTierOptions().serves(layout, arrangement, view.device):
            ours_alone = f"{HOST_LAYOUT.flag}, {HOST_ENGINE.flag}, {HOST_SHARING.flag}"
            remedy = f"leave out {ours_alone} to use SGLang's own tier, or {remedy}"
        raise Refusal(
            f"{model_name(model_config)} has compressed index keys, whose tails do not lie in the pages of a "
            f"host tier of sgl-kvpool; {remedy}"
        )
    rows = row_format_of(model_config, layout)
    if (problem := host_layout_problem(rows, options.host_layout(layout))) is not None:
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
