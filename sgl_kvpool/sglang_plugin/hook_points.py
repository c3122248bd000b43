"""Hook points: checks that the installed SGLang has what sgl-kvpool hooks or uses, and the hooking.

SGLang logs and swallows the errors of a plugin, and without one of the hooks it would build a pool of another
layout. So a process with a requested layout checks its hook points before and after hooking, and stops if one
fails. :mod:`.hook_groups` lists them; `docs/hooks.md` says what each hook does and why.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
import multiprocessing
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from sgl_kvpool import env

__all__ = [
    "TESTED",
    "HookPoint",
    "check",
    "installed_version",
    "version_problem",
    "warn",
    "wrap",
    "wrap_all",
]

logger = logging.getLogger(__name__)

#: Attribute that marks a function we wrapped; functools.wraps copies it to wrappers around ours.
_MARK = "_sgl_kvpool_hook"

#: Versions of SGLang this release was tested with; pyproject.toml requires the same.
TESTED = ">=0.5.23,<0.5.24"


@dataclass(frozen=True)
class HookPoint:
    """A function, class or collection of SGLang that sgl-kvpool hooks or uses.

    Attributes
    ----------
    target : str
        Dotted path.
    parameters : tuple of str
        Names the callable must take in this order; other parameters may come between. If empty, parameters
        are not checked.
    hooked : bool
        Whether the package wraps the target, which must then be found wrapped after hooking.
    members : tuple of str
        Names a collection must contain.
    added : tuple of str
        Names that the package adds to a collection: it must contain them afterwards.
    """

    target: str
    parameters: tuple[str, ...] = ()
    hooked: bool = True
    members: tuple[str, ...] = ()
    added: tuple[str, ...] = ()


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
        f"those, or set {env.ALLOW_UNTESTED}=1 to try (the hook points are checked all the same)"
    )


def check(points: Iterable[HookPoint], *, applied: bool = False) -> list[str]:
    """Problems of some hook points, one line each; an empty list if the installed SGLang has them all.

    Parameters
    ----------
    points : iterable of HookPoint
        Hook points to check; the module of each is imported.
    applied : bool
        Also require that hooked functions are wrapped by now, and that collections hold the added names.
    """
    problems = []
    for point in points:
        try:
            found = pkgutil.resolve_name(point.target)
        except (ImportError, AttributeError) as error:
            problems.append(f"{point.target}: not there ({type(error).__name__}: {error})")
            continue
        expected = point.members + (point.added if applied else ())
        absent = [name for name in expected if name not in found]
        if absent:
            problems.append(f"{point.target}: has no {', '.join(absent)}")
        missing = _missing_parameters(found, point.parameters)
        if missing:
            problems.append(f"{point.target}: takes no {', '.join(missing)} in the expected order")
        if applied and point.hooked and not hasattr(found, _MARK):
            problems.append(f"{point.target}: the hook was not applied")
    return problems


def _missing_parameters(found: object, expected: tuple[str, ...]) -> list[str]:
    """The first expected parameter that is absent or out of order, and all expected ones after it."""
    if not expected or not callable(found):
        return []
    names = iter(inspect.signature(found).parameters)
    return [name for name in expected if name not in names]


def wrap(target: str, hook: Callable) -> None:
    """Put `hook(original, *args, **kwargs)` around a function of SGLang; once per process.

    The hook is applied by SGLang's own code, which keeps static and class methods and reaches modules that
    have imported the function by name. `HookRegistry.register` is not used, because it needs `apply_hooks`,
    which applies hooks once per target and only logs errors. If ours were applied at once, a plugin that is
    loaded later would lose its hook on the same target.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    if hasattr(pkgutil.resolve_name(target), _MARK):
        return

    source = HookSource(plugin_name="sgl_kvpool", dist_name="sgl-kvpool")
    HookRegistry._apply_target(target, [(HookType.AROUND, hook, source)])
    wrapped = pkgutil.resolve_name(target)
    setattr(getattr(wrapped, "__func__", wrapped), _MARK, True)


def wrap_all(hooks: Mapping[str, Callable]) -> None:
    """Wrap every target of a mapping from dotted path to hook."""
    for target, hook in hooks.items():
        wrap(target, hook)


def warn(text: str) -> None:
    """Log a warning in the launching process only, since its children load plugins too."""
    if multiprocessing.parent_process() is None:
        logger.warning(text)
