"""Hooks of the process that launches a server with a layout: its schedulers' hook groups, its server info."""

import sys

from sgl_kvpool import env
from sgl_kvpool.refusal import Refusal
from sgl_kvpool.sglang_plugin import hook_groups, hook_points, options, startup
from sgl_kvpool.sglang_plugin.hooks import weights
from sgl_kvpool.sglang_plugin.registry import around, installs, uses
from sgl_kvpool.sglang_plugin.rules.host_tier import has_host_tier

uses(
    "sglang.srt.entrypoints.engine.SchedulerInitResult.__dataclass_fields__",
    "launcher",
    members=("scheduler_infos", "wait_for_ready"),
)


@installs("launcher")
def _hook_ray() -> None:
    if "sglang.srt.ray.engine" in sys.modules:
        ray = "sglang.srt.ray.engine.RayEngine._launch_scheduler_processes"
        hook_points.wrap(ray, _launch_scheduler_actors)


@around(
    "sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes",
    "launcher",
    reads=("port_args", "run_scheduler_process_func"),
)
def _launch_scheduler_processes(original, cls, server_args, *args, **kwargs):
    """Export to the schedulers which hook groups to apply, and the file for a refusal."""
    if options.layout_of(server_args) is None:
        with env.exported_to_children(env.CHILD_HOOK_GROUPS, None):
            return original(cls, server_args, *args, **kwargs)
    from sglang.srt.arg_groups.overrides import model_config_of, resolving_view

    weights.draw(server_args)
    path = startup.refusal_path(server_args)
    groups = hook_groups.used_by(resolving_view(server_args), model_config_of(server_args))
    with (
        env.exported_to_children(env.CHILD_HOOK_GROUPS, hook_groups.names(groups)),
        env.exported_to_children(env.CHILD_REFUSAL, path),
    ):
        launched, processes = original(cls, server_args, *args, **kwargs)
    if path is not None:
        startup.raise_refusal_from_child(launched, processes, path, server_args)
    _describe_when_ready(launched, server_args)
    return launched, processes


def _describe_when_ready(launched, server_args) -> None:
    """Add the layout in use to what the schedulers report when they are ready.

    SGLang puts this report into the answers of `/server_info`, gRPC and the Engine, and hands it to processes
    that answer without loading plugins (`--tokenizer-worker-num`, `Engine.attach_tokenizer_worker`).
    """
    wait = launched.wait_for_ready

    def wait_for_ready() -> None:
        wait()
        for info in launched.scheduler_infos:
            info.update(layout_info(server_args))

    launched.wait_for_ready = wait_for_ready


def _launch_scheduler_actors(original, self_or_cls, server_args, *args, **kwargs):
    """Refuse a layout if Ray launches the schedulers; `RayEngine(...)` has no argument that shows this."""
    layout = options.layout_of(server_args)
    if layout is not None:
        raise Refusal(
            f"RayEngine does not work with KV cache layout {layout}: Ray actors do not load SGLang plugins; "
            "use sglang.Engine, or leave out the layout"
        )
    return original(self_or_cls, server_args, *args, **kwargs)


def layout_info(server_args) -> dict[str, str]:
    """What `/server_info` says of a server's layout; empty without one."""
    layout = options.layout_of(server_args)
    if layout is None:
        return {}
    arrangement = options.arrangement_of(server_args)
    found = {options.LAYOUT.name: layout.value, options.ARRANGEMENT.name: arrangement.value}
    if has_host_tier(server_args):
        tier = options.host_tier_of(server_args)
        found[options.HOST_LAYOUT.name] = tier.host_layout(layout).value
        found[options.HOST_SHARING.name] = tier.sharing
    return found
