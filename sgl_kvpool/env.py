"""Environment variables of sgl-kvpool: their names, and how they are read. Nothing else reads them."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from contextlib import contextmanager

from sgl_kvpool.refusal import Refusal

__all__ = [
    "ALLOW_UNTESTED",
    "CHECK_FINITE",
    "CHILD_HOOK_GROUPS",
    "CHILD_REFUSAL",
    "CHOICES",
    "DECODE_KERNEL",
    "FIX_TOPK",
    "FLAGS",
    "KV_CACHE_ARRANGEMENT",
    "KV_CACHE_LAYOUT",
    "KV_HOST_ENGINE",
    "KV_HOST_LAYOUT",
    "KV_HOST_SHARING",
    "NOT_INHERITED",
    "OPTIONS",
    "PLUGIN",
    "PREFILL_READS_ROWS",
    "SGLANG_PLUGINS",
    "VARIABLES",
    "choice",
    "flag",
    "is_asked",
    "plugin_list_problem",
    "problems",
    "text",
    "told_to_children",
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
#: Whether the ranks of a machine share one host tier, as `--kv-host-sharing`.
KV_HOST_SHARING = "KVPOOL_KV_HOST_SHARING"
#: Those that stand for an argument of the server.
OPTIONS = (KV_CACHE_LAYOUT, KV_CACHE_ARRANGEMENT, KV_HOST_LAYOUT, KV_HOST_ENGINE, KV_HOST_SHARING)
#: Set by a server with a layout for its own children around their spawn: the hook groups that they apply, by
#: name. They load plugins before they know their arguments. Not for users.
CHILD_HOOK_GROUPS = "_KVPOOL_CHILD_HOOK_GROUPS"
#: The same: the file in which a child leaves what it was refused for when it starts. Not for users.
CHILD_REFUSAL = "_KVPOOL_CHILD_REFUSAL"
#: 1: prefill attends the stored rows of its own chunk too, so that a prompt's log-probabilities show
#: what the layout costs. Without it the rows of the current chunk are attended as they were computed.
PREFILL_READS_ROWS = "KVPOOL_PREFILL_READS_ROWS"
#: 1: choose the top-k transform of sparse attention (DSA) from our table, with SGLang's own pool too. With a
#: layout it is chosen so anyway.
FIX_TOPK = "KVPOOL_FIX_TOPK"
#: 1: try an SGLang version outside the tested range; the hook points are still checked.
ALLOW_UNTESTED = "KVPOOL_ALLOW_UNTESTED"
#: 1: encoders raise on NaN and infinity instead of storing 0 and the largest value. Costs a sync.
CHECK_FINITE = "KVPOOL_CHECK_FINITE"
#: Those whose value is yes or no.
FLAGS = (PREFILL_READS_ROWS, FIX_TOPK, ALLOW_UNTESTED, CHECK_FINITE)
#: Which kernel attends stored rows on CUDA. auto is Gluon's where it can be used, Triton's elsewhere.
DECODE_KERNEL = "KVPOOL_DECODE_KERNEL"
#: Those that have one of a few values, and the values, of which the first is that of an unset variable.
CHOICES = {DECODE_KERNEL: ("auto", "gluon", "triton")}
#: All that a user may set.
VARIABLES = (*OPTIONS, *FLAGS, *CHOICES)
#: Whoever sets a name that begins so means one of them. SGL_KVPOOL_ is what they began with before the first
#: release, and SGLANG_KVPOOL_ what SGLang copies that to and advises to write.
_PREFIX = "KVPOOL_"
_PREFIXES = (_PREFIX, "SGL_KVPOOL_", "SGLANG_KVPOOL_")

#: SGLang's: the only plugins it loads, separated by commas; all of them if unset. Ours is called PLUGIN.
SGLANG_PLUGINS = "SGLANG_PLUGINS"
PLUGIN = "sgl_kvpool"

#: What would change a server that is compared with others, or whose arguments are all given.
NOT_INHERITED = (*OPTIONS, PREFILL_READS_ROWS, FIX_TOPK, DECODE_KERNEL, SGLANG_PLUGINS)

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")


def text(name: str) -> str | None:
    """Value of a variable, stripped; None if it is unset or empty."""
    return (os.environ.get(name) or "").strip() or None


def flag(name: str) -> bool:
    """Value of a yes/no variable; Refusal if it is neither."""
    value = os.environ.get(name, "").strip()
    if value.lower() in _TRUE:
        return True
    if value.lower() in _FALSE:
        return False
    raise Refusal(
        f"{name}={value!r} is neither yes ({', '.join(_TRUE)}) nor no ({', '.join(filter(None, _FALSE))})"
    )


def choice(name: str) -> str:
    """Value of a variable of `CHOICES`; Refusal for any other value."""
    value = (text(name) or CHOICES[name][0]).lower()
    if value not in CHOICES[name]:
        raise Refusal(f"{name}={os.environ[name]!r} is unknown; set it to {' or '.join(CHOICES[name])}")
    return value


def is_asked(name: str) -> bool:
    """Whether a yes/no variable says anything but no, even what `flag` refuses."""
    return os.environ.get(name, "").strip().lower() not in _FALSE


@contextmanager
def told_to_children(name: str, value: str | os.PathLike[str] | None) -> Iterator[None]:
    """Export a variable for the time of a spawn; a second Engine in this process must not see it."""
    before = os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = os.fspath(value)
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def problems() -> list[str]:
    """A line for each value that is unknown, and for each name that is set and not in `VARIABLES`.

    Empty values are as good as unset. A name that SGLang copied (every SGL_X to SGLANG_X) is reported once,
    as the user wrote it.
    """
    found = []
    for name in (*FLAGS, *CHOICES):
        try:
            flag(name) if name in FLAGS else choice(name)
        except Refusal as refusal:
            found.append(str(refusal))
    for name in sorted(os.environ):
        value = text(name)
        if value is None or name in VARIABLES or not name.startswith(_PREFIXES):
            continue
        if name.startswith("SGLANG_") and text("SGL_" + name.removeprefix("SGLANG_")) == value:
            continue
        ours = _PREFIX + name.partition(_PREFIX)[2]
        (nearest,) = difflib.get_close_matches(ours, VARIABLES, n=1, cutoff=0)
        found.append(
            f"{name}={value!r} is not a variable of sgl-kvpool; the nearest is {nearest}: set that instead, "
            f"or unset {name}"
        )
    return found


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
