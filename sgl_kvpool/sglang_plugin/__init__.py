"""Entry point of the SGLang plugin.

SGLang calls `register` in every process that loads plugins. Installed but not asked for, it adds its
arguments and changes nothing. A scheduler process learns from the environment that its server was asked
for a layout, and only then hooks the pools; or for KVPOOL_FIX_TOPK=1, and hooks the DSA backend alone.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys

from sgl_kvpool import env
from sgl_kvpool.sglang_plugin.record import LAYOUT, OPTIONS, Option

logger = logging.getLogger(__name__)

__all__ = ["register"]


def register() -> None:
    """Install the hooks this process needs; called by SGLang's plugin loader.

    Raises
    ------
    SystemExit
        A layout or an arrangement was asked for and this SGLang cannot serve it. SGLang logs and swallows
        every other exception of a plugin, and would go on with a pool of another layout.
    """
    try:
        _install()
    except Exception as error:  # whatever it is, SGLang would log it and serve without the layout
        asked = _asked_for()
        if asked:
            text = f"sgl-kvpool: {asked} was asked for, but the plugin failed: {error!r}"
            raise SystemExit(text) from error
        raise


def _install() -> None:
    from sgl_kvpool.sglang_plugin import seams

    asked = _asked_for()
    fixes_topk = env.flag(env.FIX_TOPK)
    problem = seams.version_problem()
    if problem is not None and not env.flag(env.ALLOW_UNTESTED):
        if asked:
            raise SystemExit(f"sgl-kvpool: {asked} was asked for, but {problem}")
        ours = ", ".join(f"{option.flag}, {option.name}=" for option in OPTIONS)
        _warn(f"sgl-kvpool does nothing, its arguments ({ours}) are unknown: {problem}")
        return

    if stop_if(seams.check(seams.SERVER_ARGS), fatal=bool(asked)):
        return
    from sgl_kvpool.sglang_plugin import server_args

    server_args.install()
    stop_if(seams.check(seams.SERVER_ARGS, applied=True), fatal=bool(asked))

    # Only scheduler processes have imported the pools before plugins are loaded, and a process that builds
    # an Engine: hooking the pools there does nothing, since it builds none.
    if "sglang.srt.mem_cache.memory_pool" not in sys.modules:
        return
    if _exported(LAYOUT):
        from sgl_kvpool.sglang_plugin import pools

        stop_if(seams.check(seams.SCHEDULER))
        pools.install()
        stop_if(seams.check(seams.SCHEDULER, applied=True))
    elif fixes_topk:
        from sgl_kvpool.sglang_plugin import dsa

        stop_if(seams.check(seams.SPARSE_ATTENTION))
        dsa.install()
        stop_if(seams.check(seams.SPARSE_ATTENTION, applied=True))


def stop_if(problems: list[str], *, fatal: bool = True) -> bool:
    """Stop the process if seams do not hold; where nothing was asked for, say so and return True."""
    if not problems:
        return False
    text = "sgl-kvpool: this SGLang differs where the plugin takes hold:\n  " + "\n  ".join(problems)
    if fatal:
        raise SystemExit(text)
    _warn(text)
    return True


def _warn(text: str) -> None:
    """Warn once per server: its children load plugins too."""
    if multiprocessing.parent_process() is None:
        logger.warning(text)


def _asked_for() -> str | None:
    """What was asked for, as far as it shows before arguments are parsed; None for nothing."""
    words = [word.partition("=") for word in sys.argv]
    for option in OPTIONS:
        flags = [
            value or following
            for (flag, _, value), following in zip(words, [*sys.argv[1:], ""], strict=True)
            if flag == option.flag
        ]
        if _exported(option) or any(value != option.default for value in flags):
            return f"a {option.words}"
    return f"the top-k fix ({env.FIX_TOPK})" if env.is_asked(env.FIX_TOPK) else None


def _exported(option: Option) -> bool:
    """Whether the environment asks for it: the user's, or the server that spawned this process."""
    told = option is LAYOUT and env.text(env.CHILD_LAYOUT) is not None
    return told or (env.text(option.env) or option.default) != option.default
