"""Environment variables of sgl-kvpool: their names, and how they are read. Nothing else reads them."""

from __future__ import annotations

import os

__all__ = [
    "ALLOW_UNTESTED",
    "CHECK_FINITE",
    "CHILD_LAYOUT",
    "KV_CACHE_ARRANGEMENT",
    "KV_CACHE_LAYOUT",
    "KV_HOST_ENGINE",
    "KV_HOST_LAYOUT",
    "NOT_INHERITED",
    "OPTIONS",
    "PLUGIN",
    "PREFILL_READS_ROWS",
    "SGLANG_PLUGINS",
    "flag",
    "plugin_list_problem",
    "text",
]

#: Layout of the KV cache, as `--kv-cache-layout`. The prefix is KVPOOL_: SGLang takes every SGL_X for an old
#: name of its own and copies it to SGLANG_X.
KV_CACHE_LAYOUT = "KVPOOL_KV_CACHE_LAYOUT"
#: How the pages of all layers lie in memory, as `--kv-cache-arrangement`.
KV_CACHE_ARRANGEMENT = "KVPOOL_KV_CACHE_ARRANGEMENT"
#: Layout of the host tier's rows, as `--kv-host-layout`.
KV_HOST_LAYOUT = "KVPOOL_KV_HOST_LAYOUT"
#: What moves pages between pool and host tier, as `--kv-host-engine`.
KV_HOST_ENGINE = "KVPOOL_KV_HOST_ENGINE"
#: Those that stand for an argument of the server.
OPTIONS = (KV_CACHE_LAYOUT, KV_CACHE_ARRANGEMENT, KV_HOST_LAYOUT, KV_HOST_ENGINE)
#: Set by a server for its own children around their spawn, so that a child knows whether to hook the
#: pools. Not for users.
CHILD_LAYOUT = "_KVPOOL_CHILD_LAYOUT"
#: 1: prefill attends the stored rows of its own chunk too, so that a prompt's log-probabilities show
#: what the layout costs. Without it the rows of the current chunk are attended as they were computed.
PREFILL_READS_ROWS = "KVPOOL_PREFILL_READS_ROWS"
#: 1: choose the top-k transform of sparse attention (DSA) from our table, with SGLang's own pool too. With a
#: layout it is chosen so anyway.
FIX_TOPK = "KVPOOL_FIX_TOPK"
#: 1: try an SGLang version outside the tested range; the seams are still checked.
ALLOW_UNTESTED = "KVPOOL_ALLOW_UNTESTED"
#: 1: encoders raise on NaN and infinity instead of storing 0 and the largest value. Costs a sync.
CHECK_FINITE = "KVPOOL_CHECK_FINITE"

#: SGLang's: the only plugins it loads, separated by commas; all of them if unset. Ours is called PLUGIN.
SGLANG_PLUGINS = "SGLANG_PLUGINS"
PLUGIN = "sgl_kvpool"

#: What would change a server that is compared with others, or whose arguments are all given.
NOT_INHERITED = (*OPTIONS, PREFILL_READS_ROWS, FIX_TOPK, SGLANG_PLUGINS)

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")


def text(name: str) -> str | None:
    """Value of a variable, stripped; None if it is unset or empty."""
    return (os.environ.get(name) or "").strip() or None


def flag(name: str) -> bool:
    """Value of a yes/no variable; ValueError if it is neither."""
    value = os.environ.get(name, "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise ValueError(f"{name}={value!r} is neither of {_TRUE[:2]} nor of {_FALSE[1:3]}")


def is_asked(name: str) -> bool:
    """Whether a yes/no variable says anything but no, even what `flag` refuses."""
    return os.environ.get(name, "").strip().lower() not in _FALSE


def plugin_list_problem() -> str | None:
    """Why SGLANG_PLUGINS keeps SGLang from loading the plugin; None if it does not."""
    allowed = os.environ.get(SGLANG_PLUGINS, "")
    if not allowed or PLUGIN in [name.strip() for name in allowed.split(",")]:
        return None
    return (
        f"{SGLANG_PLUGINS}={allowed!r} keeps SGLang from loading {PLUGIN}: --kv-cache-layout and its other "
        f"arguments are then unknown, and {KV_CACHE_LAYOUT} and its like are ignored without a word; add "
        f"{PLUGIN} to the list, or unset it"
    )
