"""What sgl-kvpool touches of SGLang, and whether the installed SGLang still has it.

SGLang logs and swallows the errors of a plugin, and a hook that does not apply is a pool of another
layout. So a process that was asked for a layout checks every seam before and after hooking, and stops.
`docs/hooks.md` says what each hook does and why.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
import multiprocessing
import pkgutil
from collections.abc import Callable, Iterable

from sgl_kvpool import env
from sgl_kvpool.refusal import Refusal, line
from sgl_kvpool.sglang_plugin.seam_list import (
    ATTENTION,
    DISAGGREGATION,
    HOST_TIER,
    LAUNCHER,
    MODEL,
    SCHEDULER,
    SERVER_ARGS,
    SPARSE_ATTENTION,
    STATE_TIER,
    STEPS,
    Seam,
)

__all__ = [
    "ATTENTION",
    "DISAGGREGATION",
    "HOST_TIER",
    "LAUNCHER",
    "MODEL",
    "SCHEDULER",
    "SERVER_ARGS",
    "SPARSE_ATTENTION",
    "STATE_TIER",
    "STEPS",
    "Seam",
    "check",
    "stop_if",
    "version_problem",
    "warn",
    "wrap",
]

logger = logging.getLogger(__name__)

#: Of what a line on stderr lists; more of them are read in a report.
_SHOWN_PROBLEMS = 3

#: Attribute of a function that we wrapped. functools.wraps carries it on to wrappers around ours.
_MARK = "_sgl_kvpool_hook"

#: Versions of SGLang this release was tested with; pyproject.toml asks for the same.
TESTED = ">=0.5.23,<0.5.24"


def installed_version() -> str:
    """Version of the installed SGLang distribution; PackageNotFoundError if there is none."""
    return importlib.metadata.version("sglang")


def version_problem() -> str | None:
    """Why the installed SGLang is not one this release was tested with; None if it is."""
    try:
        version = installed_version()
    except importlib.metadata.PackageNotFoundError:
        return f"SGLang is not installed; this release works with sglang{TESTED}"
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    try:
        if SpecifierSet(TESTED).contains(version):
            return None
    except (InvalidVersion, TypeError):
        pass  # not a version, or metadata without one
    return (
        f"SGLang {version} is not a version this release was tested with (sglang{TESTED}); install one of "
        f"those, or set {env.ALLOW_UNTESTED}=1 to try (the seams are checked all the same)"
    )


def check(seams: Iterable[Seam], *, applied: bool = False) -> list[str]:
    """Problems of some seams, one line each; an empty list if all hold.

    Parameters
    ----------
    seams
        Of `SERVER_ARGS`, `MODEL`, `LAUNCHER`, `SCHEDULER`. Looking at one imports its module.
    applied : bool
        Also demand that hooked seams are wrapped by now, and that collections hold what we add to them.
    """
    problems = []
    for seam in seams:
        try:
            found = pkgutil.resolve_name(seam.target)
        except (ImportError, AttributeError) as error:
            problems.append(f"{seam.target}: not there ({type(error).__name__}: {error})")
            continue
        expected = seam.members + (seam.added if applied else ())
        absent = [name for name in expected if name not in found]
        if absent:
            problems.append(f"{seam.target}: has no {', '.join(absent)}")
        missing = _missing_parameters(found, seam.parameters)
        if missing:
            problems.append(f"{seam.target}: takes no {', '.join(missing)} in the expected order")
        if applied and seam.hooked and not hasattr(found, _MARK):
            problems.append(f"{seam.target}: the hook was not applied")
    return problems


def _missing_parameters(found: object, expected: tuple[str, ...]) -> list[str]:
    """Expected parameter names that are absent, or stand before an earlier expected one."""
    if not expected or not callable(found):
        return []
    names = iter(inspect.signature(found).parameters)
    return [name for name in expected if name not in names]


def wrap(target: str, hook: Callable) -> None:
    """Put `hook(original, *args, **kwargs)` around a function of SGLang; once per process.

    Done with SGLang's own machinery, which keeps static and class methods and reaches modules that have
    imported the function by name. Not through `HookRegistry.register`: that applies all hooks of a target
    at once and swallows errors, so a plugin that is loaded after ours would lose its hook on the same
    target, and a hook of ours that fails would be a line in the log.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    if hasattr(pkgutil.resolve_name(target), _MARK):
        return

    source = HookSource(plugin_name="sgl_kvpool", dist_name="sgl-kvpool")
    HookRegistry._apply_target(target, [(HookType.AROUND, hook, source)])
    wrapped = pkgutil.resolve_name(target)
    setattr(getattr(wrapped, "__func__", wrapped), _MARK, True)


def stop_if(problems: list[str], *, fatal: bool = True) -> bool:
    """Refuse to go on if seams do not hold; where nothing was asked for, say so and return True."""
    if not problems:
        return False
    shown, more = problems[:_SHOWN_PROBLEMS], len(problems) - _SHOWN_PROBLEMS
    text = "this SGLang differs where the plugin takes hold: " + "; ".join(shown)
    if more > 0:
        text += f"; and {more} more, which `sgl-kvpool doctor` lists"
    if fatal:
        raise Refusal(text)
    warn(line(text))
    return True


def warn(text: str) -> None:
    """Warn once per server: its children load plugins too."""
    if multiprocessing.parent_process() is None:
        logger.warning(text)
