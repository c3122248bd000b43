"""Arguments and models that do not work with a host tier.

Each refusal is an error at server start that names the value, the reason and what to use instead.
"""

import math

from sgl_kvpool.refusal import Refusal, Way, leave_out, leave_out_one, use_values, use_words
from sgl_kvpool.sglang_plugin.options import HOST_ENGINE, HOST_LAYOUT, HOST_SHARING, LAYOUT
from sgl_kvpool.sglang_plugin.registry import uses
from sgl_kvpool.sglang_plugin.rules.features import flag_of
from sgl_kvpool.sglang_plugin.server import Server
from sgl_kvpool.transfer.host_options import CPU_ENGINE, GPU_ENGINE_NAMES, HOST_IO_BACKENDS, HOST_LABELS

_TIER = "--enable-hierarchical-cache"
#: Tokens per page with a host tier.
_PAGE_SIZE = 64

uses(
    "sglang.srt.distributed.utils.get_pp_indices",
    "model rules",
    takes=("num_hidden_layers", "pp_rank", "pp_size"),
)
uses(
    "sglang.srt.arg_groups.overrides.supports_mamba_cache_extra_buffer",
    "arguments",
    takes=("view", "hf_config"),
)


def declare_page_size(server: Server) -> dict[str, int] | None:
    """The page size with a host tier, unless the user sets one or the prefix cache needs pages of one token.

    SGLang's default is 1 with most backends: every row would be a host page with a key and a checksum.
    """
    sized = server.view.page_size is not None
    if not server.has_host_tier or sized or _keeps_states_by_token(server):
        return None
    # SGLang requires that the size divides the interval at which states are kept.
    interval = server.view.mamba_track_interval if server.is_hybrid else 0
    return {"page_size": math.gcd(_PAGE_SIZE, interval)}


def _keeps_states_by_token(server: Server) -> bool:
    """Whether a server's prefix cache keeps states of linear layers by token, which needs pages of one token.

    For longer pages SGLang chooses its other strategy, `extra_buffer`, if model, linear backend and device
    support it (`overrides._mamba_radix_cache_resolution`, `mamba_hook.validate_mamba_extra_buffer`).
    """
    from sglang.srt.arg_groups.overrides import supports_mamba_cache_extra_buffer

    if not server.is_hybrid:
        return False
    strategy = server.view.mamba_radix_cache_strategy
    if strategy != "auto":
        return strategy == "no_buffer"
    hf_config = server.model_config.hf_config
    return server.view.device == "cpu" or not supports_mamba_cache_extra_buffer(server.view, hf_config)


def check_without_tier(server: Server) -> None:
    """Refuse a store, or options of a host tier, on a server without a host tier."""
    if server.has_host_tier:
        return
    for option in (HOST_LAYOUT, HOST_ENGINE, HOST_SHARING):
        requested = server.config.requests(option)
        if requested != option.default:
            raise Refusal(
                f"{option.flag} {requested} (or {option.env}) does nothing without {_TIER}",
                *(Way("add that", add=(_TIER,)), leave_out(option.flag)),
            )
    # Prefill and decode servers are exempt.
    store = server.view.hicache_storage_backend
    if store is not None and not server.disaggregates:
        raise Refusal(
            f"--hicache-storage-backend {store} does nothing without {_TIER}",
            *(Way("add that", add=(_TIER,)), leave_out("--hicache-storage-backend")),
        )


def check_host_tier(server: Server) -> None:
    view, layout, options = server.view, server.layout, server.config.host_tier
    flag = _TIER if view.enable_hierarchical_cache else "--disaggregation-decode-enable-offload-kvcache"
    able = {"cpu": (CPU_ENGINE,), "cuda": GPU_ENGINE_NAMES}.get(view.device, ())
    if not able:
        raise Refusal(
            f"{flag} does not work with {LAYOUT.flag} {layout} on {view.device}: sgl-kvpool has engines for "
            "cpu and cuda",
            leave_out(flag),
        )
    if options.engine != HOST_ENGINE.default and options.engine not in able:
        raise Refusal(
            f"{HOST_ENGINE.flag} {options.engine} does not work on {view.device}",
            *(leave_out(HOST_ENGINE.flag), *use_values(HOST_ENGINE.flag, able)),
        )
    if options.engine == "copy_engine" and server.host_layout is not layout:
        raise Refusal(
            f"{HOST_ENGINE.flag} copy_engine copies rows as they are, and {HOST_LAYOUT.flag} "
            f"{options.layout} changes them",
            use_words(
                f"{HOST_ENGINE.flag}=staged",
                then=", which encodes into a buffer from which the copy engine takes them",
            ),
            use_words(f"{HOST_ENGINE.flag}=kernel"),
        )
    if view.enable_deterministic_inference and server.host_layout is not layout:
        raise Refusal(
            f"{HOST_LAYOUT.flag} {options.layout} rounds rows that come back from the host tier, so with "
            "--enable-deterministic-inference an answer would depend on where its prefix was",
            *leave_out_one(HOST_LAYOUT.flag, "--enable-deterministic-inference", text="leave out one"),
        )


def check_host_arguments(server: Server) -> None:
    """Refuse values of SGLang's arguments that our host tier does not support."""
    view = server.view
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
                f"{option} {value} does not work with {LAYOUT.flag} {server.layout}: {reason}",
                *(leave_out(option), *use_values(option, taken)),
            )


def check_host_layout(server: Server) -> None:
    """Refuse a host layout whose rows are not narrower."""
    from sgl_kvpool.transfer import conversion

    conversion.check_host_layout(server.row_format, server.host_layout)


def check_states(server: Server) -> None:
    """Refuse states of a hybrid model that our host tier cannot store."""
    from sglang.srt.distributed.utils import get_pp_indices

    if not server.is_hybrid:
        return
    view, model_config = server.view, server.model_config
    no_layout = leave_out(LAYOUT.flag, text=f"serve without {LAYOUT.flag}")
    for field in ("enable_linear_replayssm", "enable_linear_replayssm_spec"):
        if getattr(view, field):
            replay = flag_of(field)
            raise Refusal(
                f"{replay} does not work with {_TIER} and {LAYOUT.flag} {server.layout}: a state loaded from "
                "the host would be combined with tokens that the slot's former owner was to replay",
                *(*leave_out_one(replay, _TIER), no_layout),
            )
    layers, with_rows = model_config.num_hidden_layers, set(server.layers_with_rows or ())
    for rank in range(view.pp_size):
        stage = range(*get_pp_indices(layers, rank, view.pp_size))
        if not 0 < len(with_rows.intersection(stage)) < len(stage):
            raise Refusal(
                f"--pp-size {view.pp_size} gives layers {stage.start} to {stage.stop - 1} of "
                f"{server.model_name} a stage of their own, which has no rows or no states for "
                f"{_TIER}",
                *(Way("use fewer stages", add=("--pp-size=1",)), no_layout),
            )
