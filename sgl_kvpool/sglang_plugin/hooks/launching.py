"""How schedulers get their server's hook groups, and hooks of the process that launches them.

A scheduler loads plugins before it knows its arguments, so the process that resolves these exports the hook
groups (:func:`export_hook_groups`), for SGLang's Engine as for any other launcher, and the scheduler compares
them with its arguments.
"""

import secrets
import sys
from collections.abc import Iterable
from typing import Any

from sgl_kvpool import env
from sgl_kvpool.refusal import Refusal, leave_out
from sgl_kvpool.sglang_plugin import hook_groups, hook_points, options, startup
from sgl_kvpool.sglang_plugin.hook_points import HookGroup
from sgl_kvpool.sglang_plugin.registry import around, installs, uses
from sgl_kvpool.sglang_plugin.server import Server

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


_SCHEDULER = "sglang.srt.managers.scheduler"
uses(f"{_SCHEDULER}.configure_scheduler_process", "pools", takes=("server_args",))


def export_hook_groups(server_args: Any, groups: Iterable[HookGroup]) -> None:
    """Export the hook groups of resolved arguments to the schedulers that this process will spawn."""
    names = hook_groups.names(groups) or None
    options.record(server_args, hook_groups=names)
    env.export(env.CHILD_HOOK_GROUPS, names)


@installs("arguments")
def _hook_schedulers() -> None:
    # Every scheduler calls it, after its plugins are loaded and before it builds a pool.
    if hasattr(sys.modules.get(_SCHEDULER), "configure_scheduler_process"):
        hook_points.wrap(f"{_SCHEDULER}.configure_scheduler_process", _configure_scheduler_process)


def _configure_scheduler_process(original, server_args, *args, **kwargs):
    """Refuse a scheduler that was given the hook groups of another server's arguments, or none."""
    needed, given = options.config_of(server_args).hook_groups, env.text(env.CHILD_HOOK_GROUPS)
    with startup.ending_when_refused():
        if needed != given:
            raise Refusal(
                f"this scheduler was given the hook groups {given!r}, but its arguments need {needed!r}: the "
                "arguments of another server were resolved after them",
                *("resolve and launch one server before the other", "use sglang.Engine"),
            )
    return original(server_args, *args, **kwargs)


@around(
    "sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes",
    "launcher",
    reads=("port_args", "run_scheduler_process_func"),
)
def _launch_scheduler_processes(original, cls, server_args, *args, **kwargs):
    """Export to the schedulers which hook groups to apply, and the file for a refusal.

    The Engine's other processes, and other Engines, do not get them.
    """
    groups = options.config_of(server_args).hook_groups
    if groups is None:
        with env.exported_to_children(env.CHILD_HOOK_GROUPS, None):
            return original(cls, server_args, *args, **kwargs)
    # Part of the names of weights, the same for the ranks of all replicas (`srt.host.served_weights`).
    options.record(server_args, weights_random=secrets.token_hex(16))
    path = startup.refusal_path(server_args)
    with (
        env.exported_to_children(env.CHILD_HOOK_GROUPS, groups),
        env.exported_to_children(env.CHILD_REFUSAL, path),
    ):
        launched, processes = original(cls, server_args, *args, **kwargs)
    wait = launched.wait_for_ready

    def wait_for_ready() -> None:
        with startup.raising_written_refusal(path, processes, server_args):
            wait()
        # SGLang puts these reports into the answers of `/server_info`, gRPC and the Engine, also in processes
        # that load no plugins (`--tokenizer-worker-num`).
        for info in launched.scheduler_infos:
            info.update({**layout_info(server_args), **info})  # schedulers know what is in use

    launched.wait_for_ready = wait_for_ready
    return launched, processes


def _launch_scheduler_actors(original, self_or_cls, server_args, *args, **kwargs):
    """Refuse a layout if Ray launches the schedulers; `RayEngine(...)` has no argument that shows this."""
    if (layout := options.config_of(server_args).layout) is not None:
        raise Refusal(
            f"RayEngine does not work with KV cache layout {layout}: Ray actors do not load SGLang plugins",
            *("use sglang.Engine", leave_out(options.LAYOUT.flag, text="leave out the layout")),
        )
    return original(self_or_cls, server_args, *args, **kwargs)


def layout_info(server_args) -> dict[str, str]:
    """What `/server_info` says of a server's layout; empty without one."""
    server = Server(server_args)
    if server.config.layout is None:
        return {}
    found = {options.LAYOUT.name: server.layout.value, options.ARRANGEMENT.name: server.arrangement.value}
    if server.has_host_tier:
        found[options.HOST_LAYOUT.name] = server.host_layout.value
        found[options.HOST_SHARING.name] = server.config.host_tier.sharing
    return found
