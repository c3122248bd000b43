"""When the ranks of a machine may share one host tier, and what `--kv-host-sharing auto` chooses."""

import logging
from dataclasses import replace

from sgl_kvpool.refusal import Refusal, Way, leave_out
from sgl_kvpool.sglang_plugin.options import AUTO, HOST_SHARING, record
from sgl_kvpool.sglang_plugin.rules.features import above_one, first_in_use, one_value
from sgl_kvpool.sglang_plugin.server import Server
from sgl_kvpool.transfer.host_options import NODE, RANK

logger = logging.getLogger(__name__)

_WAITS_ALONE = "before a rank frees pages, it waits for its own copies only"

_SHARED_DRAFTS = (
    "ranks share the rows only of drafts that are chains of the one MTP layer in the target's checkpoint "
    "(NEXTN or EAGLE, --speculative-eagle-topk 1)"
)


def _store_owns_the_tier(server: Server) -> bool:
    """Whether the store has an allocator of its own for the tier (`get_allocator_type` of SGLang)."""
    from sglang.srt.environ import envs
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    view = server.view
    try:
        text = view.hicache_storage_backend_extra_config
        config, *_ = HybridCacheController.parse_storage_backend_extra_config(text)
    except Exception as error:  # of the parsers of JSON, TOML and YAML; the value may contain keys
        raise Refusal(
            f"--hicache-storage-backend-extra-config cannot be read ({type(error).__name__}: {error})",
            "give a JSON object, or @ and the path of a JSON, TOML or YAML file",
        ) from None
    if view.hicache_storage_backend not in ("dynamic", "mooncake"):
        return view.hicache_storage_backend in ("shm", "mori")
    if view.hicache_storage_backend == "dynamic":
        return config.get("allocator") == "shm"
    return bool(config.get("standalone_storage", envs.MOONCAKE_STANDALONE_STORAGE.get()))


#: Arguments with which the ranks cannot share a tier.
_PREVENTS = (
    above_one("pp_size", "SGLang's agreement on finished transfers covers the first stage only"),
    one_value("hicache_write_policy", "write_back", _WAITS_ALONE),
    one_value("hicache_host_memory_mode", "buffer_only", "its pages are moved without the tree's agreements"),
    one_value(
        "disaggregation_decode_retraction_backup",
        "host_pool",
        "it reads the host pool without the agreement on loads",
    ),
    above_one("attn_cp_size", "ranks of context parallelism hold different rows"),
    above_one("dcp_size", "ranks of decode context parallelism hold different rows"),
    one_value(
        "disaggregation_mode",
        "decode",
        "its offload has a controller of its own, without the tree's agreements",
    ),
)


def _has_packed_draft(server: Server) -> bool:
    """Whether the rows of the draft surely lie in the target's host pages, under the target's page indices.

    SGLang packs drafts of EAGLE (NEXTN is resolved to it) whose config has MTP layers
    (`base_spec_worker._can_pack_hicache_mtp`), each in a pool of one layer with the target's rows
    (`host_pool_config.check_packed_kv_rows`). All ranks compute the same rows: `eh_proj` and the projection
    to the latent are replicated (`deepseek_nextn.py`, `deepseek_v2.py`), and such drafts run on the target's
    attention ranks (`draft_parallel.legacy_draft_parallel_spec`).
    """
    view = server.view
    return (
        view.speculative_algorithm == "EAGLE"
        and view.speculative_eagle_topk == 1
        and not view.enable_multi_layer_eagle
        and not server.has_own_draft
        and server.model_config.num_nextn_predict_layers == 1
    )


def write_policy_problem(policy: str | None) -> str | None:
    """Why ranks that share a tier cannot change to a write policy while they serve; None if they can."""
    if policy != "write_back":
        return None
    return (
        f"--hicache-write-policy {policy} does not work with {HOST_SHARING.flag} {NODE}: {_WAITS_ALONE}; "
        f"leave it out, or start the server with {HOST_SHARING.flag} {RANK}"
    )


def choose(server: Server) -> None:
    """Record `NODE` or `RANK` for --kv-host-sharing, and log it; Refusal if something prevents "node"."""
    requested = server.config.requests(HOST_SHARING)
    sharing, why = _chosen(server, requested)
    tier = replace(
        server.config.host_tier, sharing=sharing, may_unshare=requested == AUTO and sharing == NODE
    )
    record(server.server_args, host_tier=tier)
    if sharing != requested and (requested != AUTO or server.view.tp_size > 1):
        logger.info("sgl-kvpool: %s %s (%s)", HOST_SHARING.flag, sharing, why)


def _chosen(server: Server, requested: str) -> tuple[str, str]:
    """`NODE` or `RANK`, and the reason."""
    view = server.view
    store_owns_the_tier = view.hicache_storage_backend is not None and _store_owns_the_tier(server)
    if requested == RANK:
        return RANK, "as requested"
    prevented = first_in_use(_PREVENTS, server)
    found = [] if prevented is None else [(prevented[1], prevented[0].reason)]
    for is_so, what, reason in (
        (
            store_owns_the_tier,
            "a store that allocates the tier's memory",
            "the ranks would have to map that memory together",
        ),
        (
            view.speculative_algorithm is not None and not _has_packed_draft(server),
            f"--speculative-algorithm {view.speculative_algorithm}",
            _SHARED_DRAFTS,
        ),
        (
            server.is_hybrid,
            "a model with linear attention",
            "each rank has a host tier of its own for states",
        ),
    ):
        found += [(what, reason)] if is_so else []
    if found and requested != AUTO:
        name, why = found[0]
        raise Refusal(
            f"{HOST_SHARING.flag} {requested} does not work with {name}: {why}",
            leave_out(HOST_SHARING.flag, text=f"leave out {HOST_SHARING.flag}"),
            Way(f"give {RANK}", add=(f"{HOST_SHARING.flag}={RANK}",)),
        )
    if server.same_rows_ranks == 1:
        return RANK, "no two ranks hold the same rows"
    if found:
        return RANK, ": ".join(found[0])
    return NODE, f"{server.same_rows_ranks} ranks hold the same rows"
