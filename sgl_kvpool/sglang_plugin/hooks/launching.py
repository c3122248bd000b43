"""Hooks of the process that launches a server with a layout: its schedulers' hook groups, its server info."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

from sgl_kvpool import env
from sgl_kvpool.refusal import Refusal
from sgl_kvpool.sglang_plugin import hook_groups, hook_points, startup
from sgl_kvpool.sglang_plugin.options import (
    ARRANGEMENT,
    HOST_LAYOUT,
    HOST_SHARING,
    LAYOUT,
    arrangement_of,
    host_tier_of,
    layout_of,
)
from sgl_kvpool.sglang_plugin.rules.host_tier import has_host_tier

__all__ = ["build_server_info", "install"]


def install() -> None:
    """Hook the functions that launch schedulers and describe the server; only if a layout is requested.

    This imports the Engine, right before `sglang.launch_server` would import it.
    """
    hook_points.wrap_all(HOOKS)
    if "sglang.srt.ray.engine" in sys.modules:
        ray = "sglang.srt.ray.engine.RayEngine._launch_scheduler_processes"
        hook_points.wrap(ray, _launch_scheduler_actors)


def _launch_scheduler_processes(original, cls, server_args, *args, **kwargs):
    """Export to the schedulers which hook groups to apply, and the file for a refusal."""
    if layout_of(server_args) is None:
        with env.exported_to_children(env.CHILD_HOOK_GROUPS, None):
            return original(cls, server_args, *args, **kwargs)
    from sglang.srt.arg_groups.overrides import model_config_of, resolving_view

    path = startup.refusal_path(server_args)
    groups = hook_groups.used_by(resolving_view(server_args), model_config_of(server_args))
    with (
        env.exported_to_children(env.CHILD_HOOK_GROUPS, hook_groups.names(groups)),
        env.exported_to_children(env.CHILD_REFUSAL, path),
    ):
        launched, processes = original(cls, server_args, *args, **kwargs)
    if path is not None:
        startup.relay(launched, processes, path, server_args)
    return launched, processes


def _launch_scheduler_actors(original, self_or_cls, server_args, *args, **kwargs):
    """Refuse a layout if Ray launches the schedulers; `RayEngine(...)` has no argument that shows this."""
    layout = layout_of(server_args)
    if layout is not None:
        raise Refusal(
            f"RayEngine does not work with KV cache layout {layout}: Ray actors do not load SGLang plugins; "
            "use sglang.Engine, or leave out the layout"
        )
    return original(self_or_cls, server_args, *args, **kwargs)


def build_server_info(original, server_args, scheduler_info):
    """Add the layout in use to `/server_info`; without a layout nothing is added."""
    return {**original(server_args, scheduler_info), **_in_use(server_args)}


def _get_server_info(original, self):
    """Add the layout in use to the Engine's description, which does not call `build_server_info`."""
    return {**original(self), **_in_use(self.tokenizer_manager.server_args)}


def _in_use(server_args) -> dict[str, str]:
    layout = layout_of(server_args)
    if layout is None:
        return {}
    found = {LAYOUT.name: layout.value, ARRANGEMENT.name: arrangement_of(server_args).value}
    if has_host_tier(server_args):
        tier = host_tier_of(server_args)
        found |= {HOST_LAYOUT.name: tier.host_layout(layout).value, HOST_SHARING.name: tier.sharing}
    return found


_ENGINE = "sglang.srt.entrypoints.engine.Engine"

#: Function of SGLang -> hook around it.
HOOKS: Mapping[str, Callable] = {
    f"{_ENGINE}._launch_scheduler_processes": _launch_scheduler_processes,
    f"{_ENGINE}.get_server_info": _get_server_info,
    "sglang.srt.utils.common.build_server_info": build_server_info,
}
