"""Environment variables of sgl-kvpool: names and parsing. No other module reads them."""

import difflib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from sgl_kvpool.refusal import Refusal

#: Prefix of our variables. SGLang treats every SGL_X as an old name of its own and copies it to SGLANG_X.
_PREFIX = "KVPOOL_"
#: Variables that replace a server argument, those of `options.OPTIONS`.
KV_CACHE_LAYOUT = "KVPOOL_KV_CACHE_LAYOUT"
OPTIONS = (
    *(KV_CACHE_LAYOUT, "KVPOOL_KV_CACHE_ARRANGEMENT"),
    *("KVPOOL_KV_HOST_LAYOUT", "KVPOOL_KV_HOST_ENGINE", "KVPOOL_KV_HOST_SHARING"),
    "KVPOOL_KV_ERROR_SAMPLE",
)
#: Internal: names of the hook groups that a scheduler applies, because it loads plugins before it knows its
#: arguments. Set where a server's arguments are resolved, until SGLang's Engine has spawned its schedulers.
CHILD_HOOK_GROUPS = "_KVPOOL_CHILD_HOOK_GROUPS"
#: Internal: the file into which a child writes why it was refused at its start.
CHILD_REFUSAL = "_KVPOOL_CHILD_REFUSAL"
#: Internal: version of SGLang that a launcher has compared with the tested one, and found the same.
CHILD_SAME_AS_TESTED = "_KVPOOL_CHILD_SAME_AS_TESTED"
PREFILL_READS_ROWS = "KVPOOL_PREFILL_READS_ROWS"
FIX_TOPK = "KVPOOL_FIX_TOPK"
ALLOW_UNTESTED = "KVPOOL_ALLOW_UNTESTED"
CHECK_FINITE = "KVPOOL_CHECK_FINITE"
#: Yes/no variables.
FLAGS = (PREFILL_READS_ROWS, FIX_TOPK, ALLOW_UNTESTED, CHECK_FINITE)
DECODE_KERNEL = "KVPOOL_DECODE_KERNEL"
#: Variables with a fixed set of values; the first value is the default.
CHOICES = {DECODE_KERNEL: ("auto", "gluon", "triton")}
#: What the variables that replace no argument do.
EFFECTS = {
    PREFILL_READS_ROWS: "1: prefill by `kvpool_mla` attends the stored rows of its own chunk too, so that a "
    "prompt's log-probabilities show the cost of the layout. By default it attends the chunk's K and V as "
    "computed",
    FIX_TOPK: "1: choose the top-k transform of sparse attention (DSA) from the plugin's table with SGLang's "
    "own pool too. With a layout this table is always used",
    ALLOW_UNTESTED: "1: accept an SGLang version outside the tested range. Hook points are still verified, "
    "and a server with a layout checks itself at start",
    CHECK_FINITE: "1: encoders raise on NaN and infinity instead of storing 0 and the largest value, except "
    "for values stored as bf16 and in batches that replay a CUDA graph; each write waits for the GPU",
    DECODE_KERNEL: "the kernel of `kvpool_mla` that attends stored rows on CUDA; `auto`: Gluon's where the "
    "GPU and the layout allow it, Triton's elsewhere",
}
#: All variables that a user may set.
VARIABLES = (*OPTIONS, *EFFECTS)
#: Prefixes that mark a name as ours, so that misspelled variables are reported. SGL_KVPOOL_ was the prefix
#: before the first release; SGLANG_KVPOOL_ is what SGLang copies it to and recommends.
_PREFIXES = (_PREFIX, "SGL_KVPOOL_", "SGLANG_KVPOOL_")

#: SGLang's list of the plugins it loads, separated by commas; unset, it loads all. Ours is called PLUGIN.
SGLANG_PLUGINS = "SGLANG_PLUGINS"
PLUGIN = "sgl_kvpool"

#: Variables that servers started by this package, and `plan`, do not inherit. Their command lines have all
#: options, and the other variables would change the results that this package compares.
NOT_INHERITED = (*OPTIONS, PREFILL_READS_ROWS, FIX_TOPK, DECODE_KERNEL, SGLANG_PLUGINS)

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")


def of_children() -> dict[str, str]:
    """Environment of a Python program that this package starts: imports ignore the current folder."""
    return {k: v for k, v in os.environ.items() if k not in NOT_INHERITED} | {"PYTHONSAFEPATH": "1"}


def run_alone(code: str, timeout_seconds: float) -> subprocess.CompletedProcess[str]:
    """Run code in another Python, with this environment; -P: imports ignore the working folder."""
    return subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_seconds,
        stdin=subprocess.DEVNULL,
    )


def text(name: str) -> str | None:
    """Value of a variable, stripped; None if it is unset or empty."""
    return (os.environ.get(name) or "").strip() or None


def flag(name: str) -> bool:
    """Value of a yes/no variable; raises Refusal for any other value."""
    value = os.environ.get(name, "").strip()
    if value.lower() in _TRUE:
        return True
    if value.lower() in _FALSE:
        return False
    raise Refusal(
        f"{name}={value!r} is neither yes ({', '.join(_TRUE)}) nor no ({', '.join(filter(None, _FALSE))})"
    )


def choice(name: str) -> str:
    """Value of a variable of `CHOICES`; raises Refusal for any other value."""
    value = (text(name) or CHOICES[name][0]).lower()
    if value not in CHOICES[name]:
        raise Refusal(f"{name}={os.environ[name]!r} is unknown; set it to {' or '.join(CHOICES[name])}")
    return value


def is_requested(name: str) -> bool:
    """True if a yes/no variable is set and is not a no; does not validate the value."""
    return os.environ.get(name, "").strip().lower() not in _FALSE


def export(name: str, value: str | os.PathLike[str] | None) -> None:
    """Set a variable for this process and its children, or remove it."""
    os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = os.fspath(value)


@contextmanager
def exported_to_children(name: str, value: str | os.PathLike[str] | None) -> Iterator[None]:
    """Export a variable for the time of a spawn; a second Engine in this process must not see it."""
    export(name, value)
    try:
        yield
    finally:
        export(name, None)


def problems() -> list[str]:
    """Problems of the environment: a line per unknown value, and per name with our prefix not in `VARIABLES`.

    Empty values count as unset. A name that SGLang copied (every SGL_X to SGLANG_X) is reported once,
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
        nearest = "".join(
            f"the nearest is {near}: set that instead, or "
            for near in difflib.get_close_matches(ours, VARIABLES, n=1)
        )
        found.append(f"{name}={value!r} is not a variable of sgl-kvpool; {nearest}unset {name}")
    return found


def plugin_list_problem() -> str | None:
    """Why SGLANG_PLUGINS keeps SGLang from loading the plugin; None if it does not."""
    allowed = os.environ.get(SGLANG_PLUGINS, "")
    if not allowed or PLUGIN in [name.strip() for name in allowed.split(",")]:
        return None
    return (
        f"{SGLANG_PLUGINS}={allowed!r} keeps SGLang from loading {PLUGIN}: --kv-cache-layout and its other "
        f"arguments are then unknown, and {KV_CACHE_LAYOUT} and its like are silently ignored; add "
        f"{PLUGIN} to the list, or unset it"
    )
