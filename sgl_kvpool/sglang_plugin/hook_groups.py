"""Hook groups: which hook points belong together, and which of them a server uses.

A server checks and applies the groups that it uses and no others. If a hook point of a group has changed in
SGLang, servers without the group start, and a server that uses the group is refused before its schedulers
start; the error names the group.
"""

from collections.abc import Iterable
from functools import partial

from sgl_kvpool.refusal import Refusal
from sgl_kvpool.sglang_plugin import hook_points
from sgl_kvpool.sglang_plugin.hook_points import HookGroup
from sgl_kvpool.sglang_plugin.options import ERROR_SAMPLE
from sgl_kvpool.sglang_plugin.server import Server
from sgl_kvpool.srt.facts.readers import KVPOOL_BACKEND


def _kvpool_attends(server: Server, *, on_cpu: bool) -> bool:
    attends = not server.is_dsa and KVPOOL_BACKEND in server.backends
    return attends and (server.view.device == "cpu") is on_cpu


def _transfers_on_cpu(server: Server, backend: str) -> bool:
    chosen = server.view.disaggregation_transfer_backend == backend
    return server.view.device == "cpu" and server.disaggregates and chosen


_LAYOUT = "--kv-cache-layout"
_TIER = "--enable-hierarchical-cache and --disaggregation-decode-enable-offload-kvcache"

#: Group of every process that loads plugins.
ARGUMENTS = HookGroup(
    "arguments",
    "the arguments and environment variables of sgl-kvpool",
    modules=("sglang_plugin.fingerprint", "sglang_plugin.hook_points"),
)
MODEL_RULES = HookGroup(
    "model rules",
    _LAYOUT,
    modules=(
        "sglang_plugin.rules.arguments",
        "sglang_plugin.rules.attention",
        "sglang_plugin.rules.dsa",
        "sglang_plugin.rules.host_tier",
        "sglang_plugin.rules.model",
        "sglang_plugin.server",
        "srt.model",
    ),
)
#: Group of the process that launches a server with a layout.
LAUNCHER = HookGroup("launcher", _LAYOUT)
#: Group of the same process, for several ranks that share a prefix pool.
RANKS = HookGroup("arguments of several ranks", "--dcp-size")
#: Group of the schedulers of every server with a layout.
POOLS = HookGroup(
    "pools",
    _LAYOUT,
    modules=(
        "sglang_plugin.pool_request",
        "sglang_plugin.startup",
        "srt.attention.decode_verify",
        "srt.attention.layers",
        "srt.pool.k_scales",
        "srt.pool.row_pool",
        "srt.pool.mla",
        "srt.self_check.rows",
    ),
    is_used=lambda server: True,
)
SPARSE_ATTENTION = HookGroup(
    "sparse attention",
    "--kv-cache-layout and KVPOOL_FIX_TOPK",
    modules=("srt.attention.dsa_backend", "srt.pool.dsa"),
    is_used=lambda server: server.is_dsa,
)

#: All hook groups; a scheduler applies its groups in this order.
GROUPS = (
    ARGUMENTS,
    MODEL_RULES,
    LAUNCHER,
    POOLS,
    RANKS,
    HookGroup(
        *("dense MLA on a CPU", _LAYOUT, ("srt.attention.cpu", "srt.self_check.attention")),
        is_used=partial(_kvpool_attends, on_cpu=True),
    ),
    HookGroup(
        "dense MLA on CUDA",
        _LAYOUT,
        modules=(
            "srt.attention.cuda",
            "srt.attention.extend",
            "srt.attention.prefill",
            "srt.self_check.attention",
        ),
        is_used=partial(_kvpool_attends, on_cpu=False),
    ),
    SPARSE_ATTENTION,
    HookGroup("hybrid models", _LAYOUT, ("srt.pool.hybrid",), lambda server: server.is_hybrid),
    HookGroup(
        "speculative decoding",
        "--speculative-algorithm",
        modules=("srt.attention.draft", "srt.pool.drafts"),
        is_used=lambda server: server.view.speculative_algorithm is not None,
    ),
    HookGroup(
        *("dense MLA of several ranks", "--dcp-size"),
        is_used=lambda server: server.is_dense and server.view.dcp_size > 1,
    ),
    HookGroup(
        "host tier",
        _TIER,
        modules=(
            "sglang_plugin.rules.host_sharing",
            "srt.host.agreement",
            "srt.host.memory",
            "srt.host.rows",
            "srt.host.storage_mixin",
            "srt.host.store_calls",
            "srt.pool.regions",
        ),
        is_used=lambda server: server.has_host_tier,
    ),
    # Only for programs that call `describe`.
    HookGroup("canonical views", "`sgl_kvpool.connectors.pools.describe`", modules=("connectors.pools",)),
    HookGroup(
        "host tier of hybrid models",
        _TIER,
        modules=("srt.host.states", "srt.host.state_transfers"),
        is_used=lambda server: server.has_host_tier and server.is_hybrid,
    ),
    HookGroup("disaggregation", "--disaggregation-mode", ("srt.peers",), lambda server: server.disaggregates),
    *(
        HookGroup(
            f"disaggregation over {backend} on a CPU",
            f"--disaggregation-transfer-backend {backend}",
            is_used=partial(_transfers_on_cpu, backend=backend),
        )
        for backend in ("mooncake", "nixl")
    ),
    HookGroup(
        *("error samples", ERROR_SAMPLE.flag, ("srt.pool.error_sample",)),
        is_used=lambda server: server.config.requests(ERROR_SAMPLE) != ERROR_SAMPLE.default,
    ),
    HookGroup("canary", "--kv-canary", ("srt.pool.canary",), lambda server: server.view.kv_canary != "none"),
    HookGroup("metrics", "--enable-metrics", is_used=lambda server: server.view.enable_metrics),
)

_BY_NAME = {group.name: group for group in GROUPS}
_SEPARATOR = ", "


def used_by(server: Server) -> tuple[HookGroup, ...]:
    """Hook groups of the schedulers of a server with a layout."""
    return tuple(group for group in GROUPS if group.is_used(server))


def names(groups: Iterable[HookGroup]) -> str:
    """Names of hook groups as one text, for an environment variable; `named` parses it."""
    return _SEPARATOR.join(group.name for group in groups)


def named(text: str) -> tuple[HookGroup, ...]:
    """Hook groups of a text from `names`; KeyError for an unknown name."""
    return tuple(_BY_NAME[name] for name in text.split(_SEPARATOR))


def require(groups: Iterable[HookGroup], *, applied: bool = False) -> None:
    """Raise a Refusal that names the first of the groups that does not work on the installed SGLang."""
    for group in groups:
        if (problem := group.problem(applied=applied)) is not None:
            raise Refusal(problem)


def apply(groups: Iterable[HookGroup]) -> None:
    """Hook SGLang for some groups; Refusal if a hook point fails before, or a hook is missing afterwards."""
    groups = tuple(groups)
    require(groups)
    for group in groups:
        for install in group.declared.installs:
            install()
        for target, hook in group.declared.hooks.items():
            hook_points.wrap(target, hook)
    require(groups, applied=True)
