"""Entry point of the SGLang plugin.

SGLang calls `register` in every process that loads plugins. If the user requests nothing, the plugin adds its
arguments and the attention backend name `kvpool_mla`, and changes nothing else. A scheduler process reads
from the environment which hook groups its server uses, and applies them; with KVPOOL_FIX_TOPK=1 and no
layout, it applies the group of sparse attention.
"""

import multiprocessing
import sys
from typing import NoReturn

from sgl_kvpool import env
from sgl_kvpool.refusal import Refusal, line
from sgl_kvpool.sglang_plugin.options import LAYOUT, OPTIONS, Option, environment_problems


def register() -> None:
    """Install the hooks this process needs; called by SGLang's plugin loader.

    SystemExit if the environment has an unknown or invalid variable with our prefix, or this SGLang cannot
    serve what the user requested: SGLang logs and swallows every other exception of a plugin, and would serve
    with a pool of another layout.
    """
    try:
        _install()
    except Refusal as refusal:
        _end(str(refusal))
    except Exception as error:  # SGLang would log any exception and serve without the layout
        requested = _request()
        if requested:
            _end(f"{requested} was requested, but the plugin failed: {error!r}")
        raise


def _end(text: str) -> NoReturn:
    from sgl_kvpool.sglang_plugin import startup

    startup.write_refusal(text)
    raise SystemExit(1)


def _install() -> None:
    from sgl_kvpool.sglang_plugin import fingerprint, hook_groups, hook_points

    problem, wrong = hook_points.version_problem(), environment_problems()
    # A process that called `Engine(...)` itself raises the refusal in that call.
    is_program = "sglang.srt.entrypoints.engine" in sys.modules and multiprocessing.parent_process() is None
    if wrong and (problem is not None or not is_program):
        raise Refusal("; ".join(wrong))
    requested = _request()
    is_allowed = env.flag(env.ALLOW_UNTESTED)
    if requested and not is_allowed and (unlike := fingerprint.problem()):
        raise Refusal(f"{requested} was requested, but {unlike}")
    if problem is not None and not is_allowed:
        ours = ", ".join(f"{option.flag}, {option.name}=" for option in OPTIONS)
        hook_points.warn(f"sgl-kvpool does nothing, its arguments ({ours}) are unknown: {problem}")
        return

    try:
        hook_groups.apply((hook_groups.ARGUMENTS,))
    except Refusal as refusal:
        if requested:
            raise
        hook_points.warn(line(refusal))
        return

    # A process that has not imported the pools when it loads plugins, such as that of `sglang serve`, builds
    # none. Detokenizers, data-parallel controllers and programs that build an Engine have imported them as
    # schedulers do, but build none either, so hooks of pools have no effect there.
    if "sglang.srt.mem_cache.memory_pool" not in sys.modules:
        return
    exported_groups = env.text(env.CHILD_HOOK_GROUPS)
    if exported_groups is not None:
        hook_groups.apply(hook_groups.named(exported_groups))
    elif _exported(LAYOUT):
        # No launcher has exported the hook groups. If this is a scheduler, its arguments were resolved before
        # the plugin was loaded, and the hooks of the pools refuse that.
        hook_groups.apply((hook_groups.POOLS,))
    elif env.is_requested(env.FIX_TOPK):
        hook_groups.apply((hook_groups.SPARSE_ATTENTION,))


def _request() -> str | None:
    """The first of our options that the user set, found without parsing the command line; None if none."""
    words = [word.partition("=") for word in sys.argv]
    for option in OPTIONS:
        flags = [
            value or following
            for (flag, _, value), following in zip(words, [*sys.argv[1:], ""], strict=True)
            if flag == option.flag
        ]
        if _exported(option) or any(value != option.default for value in flags):
            return f"a {option.words}"
    # ALLOW_UNTESTED alone requests nothing: it permits other requests on an untested SGLang.
    wishes = (name for name in env.FLAGS if name != env.ALLOW_UNTESTED and env.is_requested(name))
    return next((f"{name}={env.text(name)}" for name in wishes), None)


def _exported(option: Option) -> bool:
    """Whether the user, or the server that spawned this process, requests an option in the environment."""
    from_launcher = option is LAYOUT and env.text(env.CHILD_HOOK_GROUPS) is not None
    return from_launcher or (env.text(option.env) or option.default) != option.default
