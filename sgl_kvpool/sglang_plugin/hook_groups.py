"""Hook groups: which hook points belong together, and which of them a server uses.

A server checks and applies the groups that it uses and no others. If a hook point of a group has changed in
SGLang, servers without the group start, and a server that uses the group is refused before its schedulers
start; the error names the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from sgl_kvpool.attention.readers import KVPOOL_BACKEND
from sgl_kvpool.refusal import Refusal
from sgl_kvpool.sglang_plugin import hook_points, point_lists, tier_point_lists
from sgl_kvpool.sglang_plugin.hook_points import HookPoint
from sgl_kvpool.sglang_plugin.imports import sglang_names
from sgl_kvpool.sglang_plugin.models import is_dsa, is_hybrid
from sgl_kvpool.sglang_plugin.rules.attention import backends_in_use
from sgl_kvpool.sglang_plugin.rules.features import disaggregates
from sgl_kvpool.sglang_plugin.rules.host_tier import has_host_tier

__all__ = [
    "ARGUMENTS",
    "GROUPS",
    "LAUNCHER",
    "MODEL_RULES",
    "POOLS",
    "SPARSE_ATTENTION",
    "HookGroup",
    "apply",
    "named",
    "names",
    "require",
    "used_by",
]

_PACKAGE = __package__.partition(".")[0]


def _by_none(view: Any, model_config: Any) -> bool:
    return False


@dataclass(frozen=True)
class HookGroup:
    """Hook points that are needed together, and the modules of this package that need them.

    Attributes
    ----------
    name : str
        Name in messages and tables.
    leave_out : str
        Arguments to leave out so that a server does not use the group.
    listed : tuple of HookPoint
        Hook points besides the imports of the modules.
    hooks : tuple of str
        Modules below `hooks/`, or `startup`, whose `install` hooks SGLang; in this order.
    modules : tuple of str
        Other modules that import SGLang, below the package.
    is_used : callable
        Takes a resolving view and the target's ModelConfig; returns whether the schedulers of a server with a
        layout use the group. It returns False for groups of other processes.
    """

    name: str
    leave_out: str
    listed: tuple[HookPoint, ...] = ()
    hooks: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    is_used: Callable[[Any, Any], bool] = _by_none

    @property
    def source_modules(self) -> tuple[str, ...]:
        """Full names of all modules."""
        hooks = (name if "." in name else f"sglang_plugin.hooks.{name}" for name in self.hooks)
        return tuple(f"{_PACKAGE}.{name}" for name in (*hooks, *self.modules))

    def points(self) -> tuple[HookPoint, ...]:
        """All hook points: the listed ones, then the imports that are not among them."""
        listed = {point.target for point in self.listed}
        imported = (name for name in sglang_names(self.source_modules) if name not in listed)
        return (*self.listed, *(HookPoint(name, hooked=False) for name in imported))

    def problem(self, *, applied: bool = False) -> str | None:
        """Why the group does not work on the installed SGLang, as one line; None if it does.

        Parameters
        ----------
        applied : bool
            See `hook_points.check`.
        """
        problems = hook_points.check(self.points(), applied=applied)
        if not problems:
            return None
        more = ""
        if len(problems) > 1:
            points = f"{len(problems) - 1} more hook point{'s' if len(problems) > 2 else ''}"
            more = f" (and {points}, which `sgl-kvpool doctor` lists)"
        return (
            f"hook group {self.name!r} does not work on SGLang {hook_points.installed_version()}: "
            f"{problems[0]}{more}; leave out {self.leave_out}"
        )


# -------------------------------------------------------------------- which servers use a group


def _kvpool_attends(view: Any, model_config: Any) -> bool:
    return not is_dsa(model_config) and KVPOOL_BACKEND in backends_in_use(view)


def _kvpool_attends_on_cpu(view: Any, model_config: Any) -> bool:
    return view.device == "cpu" and _kvpool_attends(view, model_config)


def _kvpool_attends_on_cuda(view: Any, model_config: Any) -> bool:
    return view.device != "cpu" and _kvpool_attends(view, model_config)


def _transfers_on_cpu(backend: str) -> Callable[[Any, Any], bool]:
    def is_used(view: Any, model_config: Any) -> bool:
        chosen = view.disaggregation_transfer_backend == backend
        return view.device == "cpu" and disaggregates(view.disaggregation_mode) and chosen

    return is_used


_LAYOUT = "--kv-cache-layout"
_TIER = "--enable-hierarchical-cache and --disaggregation-decode-enable-offload-kvcache"

#: Group of every process that loads plugins.
ARGUMENTS = HookGroup(
    "arguments",
    "the arguments and environment variables of sgl-kvpool",
    point_lists.ARGUMENTS,
    ("server_args",),
    ("sglang_plugin.hook_points",),
)
MODEL_RULES = HookGroup(
    "model rules",
    _LAYOUT,
    point_lists.MODEL_RULES,
    modules=(
        "sglang_plugin.models",
        "sglang_plugin.rules.attention",
        "sglang_plugin.rules.dsa",
        "sglang_plugin.rules.host_tier",
    ),
)
#: Group of the process that launches a server with a layout.
LAUNCHER = HookGroup("launcher", _LAYOUT, point_lists.LAUNCHER, ("launching",))
#: Group of the schedulers of every server with a layout.
POOLS = HookGroup(
    "pools",
    _LAYOUT,
    point_lists.POOLS,
    ("pools", "budget", "sglang_plugin.startup"),
    (
        "sglang_plugin.hooks.self_check",
        "sglang_plugin.hooks.workspaces",
        "srt.attention.layers",
        "srt.pool.arranged",
        "srt.pool.mla",
        "srt.self_check.rows",
    ),
    is_used=lambda view, model_config: True,
)
SPARSE_ATTENTION = HookGroup(
    "sparse attention",
    "--kv-cache-layout and KVPOOL_FIX_TOPK",
    point_lists.SPARSE_ATTENTION,
    ("dsa",),
    ("srt.pool.dsa",),
    is_used=lambda view, model_config: is_dsa(model_config),
)

#: All hook groups; a scheduler applies its groups in this order.
GROUPS = (
    ARGUMENTS,
    MODEL_RULES,
    LAUNCHER,
    POOLS,
    HookGroup(
        "dense MLA on a CPU",
        _LAYOUT,
        point_lists.ATTENTION,
        ("attention",),
        ("srt.attention.cpu", "srt.self_check.attention"),
        is_used=_kvpool_attends_on_cpu,
    ),
    HookGroup(
        "dense MLA on CUDA",
        _LAYOUT,
        point_lists.ATTENTION,
        ("attention",),
        (
            "srt.attention.cuda",
            "srt.attention.extend",
            "srt.attention.mha_form",
            "srt.self_check.attention",
        ),
        is_used=_kvpool_attends_on_cuda,
    ),
    SPARSE_ATTENTION,
    HookGroup(
        "hybrid models",
        _LAYOUT,
        point_lists.HYBRID,
        ("hybrid",),
        ("srt.pool.hybrid",),
        is_used=lambda view, model_config: is_hybrid(model_config),
    ),
    HookGroup(
        "speculative decoding",
        "--speculative-algorithm",
        point_lists.SPECULATIVE,
        ("drafts",),
        ("srt.attention.draft",),
        is_used=lambda view, model_config: view.speculative_algorithm is not None,
    ),
    HookGroup(
        "host tier",
        _TIER,
        tier_point_lists.HOST_TIER,
        ("host_tier", "sharing", "stores"),
        (
            "sglang_plugin.rules.host_sharing",
            "srt.host.gpu_calls",
            "srt.host.memory",
            "srt.host.rows",
            "srt.host.stored_pages",
            "srt.pool.regions",
        ),
        is_used=lambda view, model_config: has_host_tier(view),
    ),
    # For programs that describe pools, not for servers; the host tier's group has the same module.
    HookGroup("canonical views", "`sgl_kvpool.srt.pool.describe`", modules=("srt.pool.regions",)),
    HookGroup(
        "host tier of hybrid models",
        _TIER,
        tier_point_lists.STATE_TIER,
        ("state_tier",),
        ("srt.host.states",),
        is_used=lambda view, model_config: has_host_tier(view) and is_hybrid(model_config),
    ),
    HookGroup(
        "disaggregation",
        "--disaggregation-mode",
        tier_point_lists.DISAGGREGATION,
        ("disaggregation", "peer_mismatch"),
        is_used=lambda view, model_config: disaggregates(view.disaggregation_mode),
    ),
    *(
        HookGroup(
            f"disaggregation over {backend} on a CPU",
            f"--disaggregation-transfer-backend {backend}",
            points,
            is_used=_transfers_on_cpu(backend),
        )
        for backend, points in tier_point_lists.DISAGGREGATION_ON_CPU.items()
    ),
    HookGroup(
        "metrics",
        "--enable-metrics",
        point_lists.METRICS,
        is_used=lambda view, model_config: view.enable_metrics,
    ),
    HookGroup(
        "commands",
        "`sgl-kvpool plan`, `warmup`, `bench`, `demo` and `doctor --self-check`",
        modules=(
            "commands.bench.attention.peers",
            "commands.bench.transfer_gpu",
            "commands.doctor.self_check",
            "commands.plan.child",
            "commands.plan.gpu",
            "commands.plan.plannable",
            "commands.plan.sizing",
            "commands.warmup",
            "commands.warmup.attention",
            "commands.warmup.contents",
            "commands.warmup.served",
            "demo.models.byte_mla",
            "demo.models.llama_mla",
        ),
    ),
)

_BY_NAME = {group.name: group for group in GROUPS}
_SEPARATOR = ", "


def used_by(view: Any, model_config: Any) -> tuple[HookGroup, ...]:
    """Hook groups of the schedulers of a server with a layout.

    Parameters
    ----------
    view
        A resolving view of the server's resolved arguments.
    model_config : ModelConfig
        SGLang's configuration of the target model.
    """
    return tuple(group for group in GROUPS if group.is_used(view, model_config))


def names(groups: Iterable[HookGroup]) -> str:
    """Names of hook groups as one text, for an environment variable; `named` parses it."""
    return _SEPARATOR.join(group.name for group in groups)


def named(text: str) -> tuple[HookGroup, ...]:
    """Hook groups of a text from `names`; KeyError for an unknown name."""
    return tuple(_BY_NAME[name] for name in text.split(_SEPARATOR))


def require(groups: Iterable[HookGroup], *, applied: bool = False) -> None:
    """Raise a Refusal that names the first of the groups that does not work on the installed SGLang."""
    for group in groups:
        problem = group.problem(applied=applied)
        if problem is not None:
            raise Refusal(problem)


def apply(groups: Iterable[HookGroup]) -> None:
    """Hook SGLang for some groups; Refusal if a hook point fails before, or a hook is missing afterwards."""
    groups = tuple(groups)
    require(groups)
    for group in groups:
        for module in group.source_modules[: len(group.hooks)]:
            import_module(module).install()
    require(groups, applied=True)
