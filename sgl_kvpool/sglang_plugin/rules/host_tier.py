"""What layouts and arrangements cannot be combined with; attention backends are in :mod:`.attention`.

Each is an error at start that names value, reason and way out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.memory.arrangement import KVArrangement
from sgl_kvpool.refusal import Refusal, use
from sgl_kvpool.sglang_plugin.models import is_hybrid, layers_with_rows, model_name, row_format_of
from sgl_kvpool.sglang_plugin.options import ARRANGEMENT, HOST_ENGINE, HOST_LAYOUT, LAYOUT
from sgl_kvpool.transfer.labels import (
    CPU_ENGINE,
    GPU_ENGINE_NAMES,
    HOST_IO_BACKENDS,
    HOST_LABELS,
    HostTierOptions,
)

__all__ = [
    "BACKEND_FIELDS",
    "FEATURES",
    "Feature",
    "check_dtype",
    "check_features",
    "check_host_model",
    "check_host_tier",
    "check_model",
    "check_without_tier",
    "flag_of",
    "has_host_tier",
]


#: Fields of SGLang's ServerArgs that name an attention backend of the target.
BACKEND_FIELDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


def flag_of(field: str) -> str:
    """A field of SGLang's ServerArgs as on the command line."""
    return "--" + field.replace("_", "-")


@dataclass(frozen=True)
class Feature:
    """A server argument that a layout, or an arrangement, is refused with.

    Attributes
    ----------
    field : str
        Of SGLang's ServerArgs.
    flag : str
        As the user writes it.
    reason : str
        Why the two do not go together.
    in_use : callable
        Tells from the field's value whether the feature is on.
    arrangements : callable, optional
        Which arrangements are refused, whatever the layout; without it every layout is.
    """

    field: str
    flag: str
    reason: str
    in_use: Callable[[Any], bool] = bool
    arrangements: Callable[[KVArrangement], bool] | None = None


def _disaggregates(mode: str | None) -> bool:
    return mode not in (None, "null")


def _shared_buffer(arrangement: KVArrangement) -> bool:
    return not arrangement.is_layer_packed


#: Features that build another pool, or read rows without knowing the layout.
FEATURES = (
    Feature("enable_unified_memory", "--enable-unified-memory", "it allocates a pool of its own"),
    Feature("enable_hisparse", "--enable-hisparse", "it allocates a pool of its own"),
    Feature("enable_kv_cache_sharding", "--enable-kv-cache-sharding", "it shards stock MLA rows"),
    Feature(
        "enable_dsa_cache_layer_split",
        "--enable-dsa-cache-layer-split",
        "it allocates a pool of its own",
    ),
    Feature(
        "dcp_size",
        "--dcp-size",
        "decode context parallelism scatters rows by rules of its own",
        in_use=lambda value: (value or 1) > 1,
    ),
    Feature(
        "enable_page_major_kv_layout",
        "--enable-page-major-kv-layout",
        "it allocates a pool of its own",
    ),
    Feature(
        "enable_unified_cache_external_linker",
        "--enable-unified-cache-external-linker",
        "the linker accepts SGLang's own pool classes only",
    ),
    Feature(
        "enable_linker_mla_dedup",
        "--enable-linker-mla-dedup",
        "the linker accepts SGLang's own pool classes only",
    ),
    Feature("enable_lmcache", "--enable-lmcache", "it computes the bytes of a row by itself"),
    Feature("enable_flexkv", "--enable-flexkv", "it computes the bytes of a row by itself"),
    Feature(
        "radix_cache_backend",
        "--radix-cache-backend",
        "a cache backend computes the bytes of a row by itself",
        in_use=lambda value: value is not None,
    ),
    Feature("use_ray", "--use-ray", "Ray actors do not load SGLang plugins"),
    Feature("grpc_mode", "--grpc-mode", "its launcher does not tell the schedulers of the layout"),
    Feature("smg_grpc_mode", "--smg-grpc-mode", "its launcher does not tell the schedulers of the layout"),
    Feature(
        "disaggregation_decode_host_receive_threshold",
        "--disaggregation-decode-host-receive-threshold",
        "SGLang receives into the host pool of retractions, which it has for multi-head pools only",
        in_use=lambda threshold: threshold < 1,
    ),
    Feature(
        "disaggregation_decode_retraction_backup",
        "--disaggregation-decode-retraction-backup",
        "SGLang has that host pool for multi-head pools only, and keeps retracted MLA rows in cpu_tensor",
        in_use=lambda backup: backup == "host_pool",
    ),
    Feature(
        "disaggregation_mode",
        "--disaggregation-mode",
        "SGLang sends each layer's pages as runs of its own, and here other layers' rows lie between them",
        in_use=_disaggregates,
        arrangements=_shared_buffer,
    ),
)


def check_dtype(layout: MLAKVCacheLayout, kv_cache_dtype: str, *, is_dsa: bool) -> None:
    """Refuse a `--kv-cache-dtype` that contradicts the layout, with the table of what does not."""
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
    """Refuse server arguments that do not go with layout and arrangement; `view` has ServerArgs' fields."""
    for feature in FEATURES:
        if feature.arrangements is None:
            refused, ours = True, f"{LAYOUT.flag} {layout}"
        else:
            refused, ours = feature.arrangements(arrangement), f"{ARRANGEMENT.flag} {arrangement}"
        value = getattr(view, feature.field)
        if refused and feature.in_use(value):
            text = feature.flag if value is True else f"{feature.flag} {value}"
            raise Refusal(f"{text} does not work with {ours}: {feature.reason}; leave out one of the two")


def has_host_tier(view: Any) -> bool:
    """Whether a server will build a host tier."""
    # SGLang looks at the second on decode servers only.
    offloads = view.disaggregation_mode == "decode" and view.disaggregation_decode_enable_offload_kvcache
    return view.enable_hierarchical_cache or offloads


def check_without_tier(options: HostTierOptions, view: Any) -> None:
    """Refuse a store, or what was asked for of a host tier, where there is none."""
    flag = "--enable-hierarchical-cache"
    for option, value in ((HOST_LAYOUT, options.layout), (HOST_ENGINE, options.engine)):
        if value != option.default:
            raise Refusal(
                f"{option.flag} {value} (or {option.env}) does nothing without {flag}; add that, or leave "
                "it out"
            )
    # A decode server may use the store without a tier.
    if view.hicache_storage_backend is not None and not _disaggregates(view.disaggregation_mode):
        raise Refusal(
            f"--hicache-storage-backend {view.hicache_storage_backend} does nothing without {flag}; add "
            "that, or leave it out"
        )


def check_host_tier(
    layout: MLAKVCacheLayout, arrangement: KVArrangement, options: HostTierOptions, view: Any
) -> None:
    """Refuse what a host tier cannot be used with, and a store or options without one."""
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
    """Refuse values of SGLang's arguments that our host tier does not take."""
    for option, value, taken, reason in (
        (
            "--hicache-mem-layout",
            view.hicache_mem_layout,
            HOST_LABELS,
            "the host tier keeps all layers of a page together",
        ),
        ("--hicache-io-backend", view.hicache_io_backend, HOST_IO_BACKENDS, "that is SGLang's for Ascend"),
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
    """Refuse a layout of the host tier whose rows are not narrower, and pools our tier cannot describe."""
    from sglang.srt.configs.model_config import get_dsa_index_kpool_compress

    from sgl_kvpool.transfer.conversion import host_layout_problem

    # Tails per request lie beside the pages (`pool.regions`).
    ours = options.takes(layout, arrangement, view.device)
    if ours and is_hybrid(model_config):
        _check_states(layout, model_config, view)
    if ours and get_dsa_index_kpool_compress(model_config.hf_config):
        raise Refusal(
            f"{model_name(model_config)} has compressed index keys, whose tails are in no page of a host "
            f"tier of sgl-kvpool; leave out {HOST_LAYOUT.flag} and {HOST_ENGINE.flag}, which is SGLang's "
            f"own tier with {LAYOUT.flag} {layout}, or --enable-hierarchical-cache"
        )
    rows = row_format_of(model_config, layout)
    problem = host_layout_problem(rows, options.host_layout(layout))
    if problem is not None:
        raise Refusal(f"{HOST_LAYOUT.flag} {options.layout} does not work: {problem}")


def _check_states(layout: MLAKVCacheLayout, model_config: Any, view: Any) -> None:
    """Refuse states of a hybrid model that our host tier does not carry."""
    from sglang.srt.distributed.utils import get_pp_indices

    flag, remedy = "--enable-hierarchical-cache", f"or serve without {LAYOUT.flag}"
    for field, replay in (
        ("enable_linear_replayssm", "--enable-linear-replayssm"),
        ("enable_linear_replayssm_spec", "--enable-linear-replayssm-spec"),
    ):
        if getattr(view, field):
            raise Refusal(
                f"{replay} does not work with {flag} and {LAYOUT.flag} {layout}: a state that comes back "
                "from the host would meet the tokens that the slot's former owner was to replay; leave out "
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
