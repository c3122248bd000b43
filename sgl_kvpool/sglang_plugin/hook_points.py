"""Hook points: checks that the installed SGLang has what sgl-kvpool hooks or uses, and the hooking.

SGLang logs and swallows the errors of a plugin, and without one of the hooks it would build a pool of another
layout. So a process with a requested layout checks its hook points before and after hooking, and stops if one
fails. :mod:`.hook_groups` lists them; `docs/reference.md` says what each hook does and why.
"""

import importlib.metadata
import inspect
import logging
import multiprocessing
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from sgl_kvpool import env
from sgl_kvpool.sglang_plugin import registry
from sgl_kvpool.sglang_plugin.imports import sglang_names
from sgl_kvpool.sglang_plugin.registry import Declared, HookPoint, parameters_of, uses
from sgl_kvpool.sglang_plugin.server import Server
from sgl_kvpool.srt import is_override

logger = logging.getLogger(__name__)

_PACKAGE = __package__.partition(".")[0]

#: Attribute that marks a function we wrapped; functools.wraps copies it to wrappers around ours.
_MARK = "_sgl_kvpool_hook"

#: Versions of SGLang this release was tested with; pyproject.toml requires the same.
TESTED = ">=0.5.23,<0.5.24"

uses("sglang.srt.plugins.hook_registry.HookRegistry._apply_target", "arguments", takes=("target", "hooks"))


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


def resolve(target: str) -> Any:
    """What a dotted path names; AttributeError if it is not there, ImportError if a module's import fails."""
    try:
        return pkgutil.resolve_name(target)
    except Exception as absent:  # or whatever a module raises when it is imported
        try:
            return import_module(target)
        except Exception as error:  # as above
            if isinstance(error, ModuleNotFoundError) and target.startswith(str(error.name)):
                raise AttributeError(f"not there ({type(absent).__name__}: {absent})") from None
            raise ImportError(f"cannot be imported ({type(error).__name__}: {error})") from None


def check(points: Iterable[HookPoint], *, applied: bool = False) -> list[str]:
    """Problems of some hook points, one line each; an empty list if the installed SGLang has them all.

    The module of each is imported. `applied` also requires that hooked functions are wrapped by now, and that
    collections hold the added names.
    """
    problems = []
    for point in points:
        try:
            found = resolve(point.target)
        except (AttributeError, ImportError) as error:
            problems.append(f"{point.target}: {error}")
            continue
        expected = point.members + (point.added if applied else ())
        if absent := [name for name in expected if name not in found]:
            problems.append(f"{point.target}: has no {', '.join(absent)}")
        if missing := _missing_parameters(found, point.parameters):
            problems.append(f"{point.target}: takes no {', '.join(missing)} in the expected order")
        if applied and point.hooked and not hasattr(found, _MARK):
            problems.append(f"{point.target}: the hook was not applied")
    return problems


def _missing_parameters(found: object, expected: tuple[str, ...]) -> list[str]:
    """The expected parameters that are absent; if none is, the first out of order and all after it."""
    if not expected or not callable(found):
        return []
    names = inspect.signature(found).parameters
    order = iter(names)
    return [name for name in expected if name not in names] or [n for n in expected if n not in order]


@dataclass(frozen=True)
class HookGroup:
    """Hook points that are needed together, and the modules of this package that need them.

    Modules below `hooks/` declare their hooks and with them their groups (:mod:`.registry`).
    """

    name: str
    #: Arguments to leave out so that a server does not use the group.
    leave_out: str
    #: Modules without hooks that import SGLang, below the package.
    modules: tuple[str, ...] = ()
    #: Whether the schedulers of a server with a layout use the group; False for groups of other processes.
    is_used: Callable[[Server], bool] = lambda server: False

    @property
    def declared(self) -> Declared:
        """Hook points and hooks that our modules declare for the group."""
        _import_hooks()
        return registry.declared(self.name)

    @property
    def source_modules(self) -> tuple[str, ...]:
        return (*self.declared.modules, *(f"{_PACKAGE}.{name}" for name in self.modules))

    def points(self) -> tuple[HookPoint, ...]:
        """All hook points: the declared ones, those of methods that override SGLang's, and imports."""
        points = dict(self.declared.points)
        ours = tuple(name for name in self.source_modules if name.startswith(f"{_PACKAGE}.srt."))
        for point in _overridden(ours):
            points.setdefault(point.target, point)
        for name in (*sglang_names(self.source_modules), *ours):
            points.setdefault(name, HookPoint(name, hooked=False))
        return tuple(points.values())

    def problem(self, *, applied: bool = False) -> str | None:
        """Why the group does not work on the installed SGLang, in one line; None if it does."""
        problems = check(self.points(), applied=applied)
        if not problems:
            return None
        others = len(problems) - 1
        more = f" (and {others} more, which `sgl-kvpool doctor` lists)" if others else ""
        return (
            f"hook group {self.name!r} does not work on SGLang {installed_version()}: "
            f"{problems[0]}{more}; leave out {self.leave_out}"
        )


@cache
def _import_hooks() -> None:
    """Import all modules below `hooks/`, which declare hook points; none of them imports SGLang."""
    folder = f"{__package__}.hooks"
    for module in pkgutil.iter_modules(import_module(folder).__path__):
        import_module(f"{folder}.{module.name}")


def classes_of(modules: Iterable[str]) -> Iterator[type]:
    """Classes of our modules below `srt/`, without those of modules that `check` says cannot be imported."""
    for name in (name for name in modules if name.startswith(f"{_PACKAGE}.srt.")):
        with suppress(ImportError):
            found = vars(resolve(name)).values()
            yield from (one for one in found if isinstance(one, type) and one.__module__ == name)


@cache
def _overridden(modules: tuple[str, ...]) -> list[HookPoint]:
    """Methods of SGLang that classes of our modules override, with what ours take by name.

    Of a class that another one of these modules extends, the other's base has the methods.
    """
    classes = list(classes_of(modules))
    points = []
    for ours in classes:
        if any(ours in other.__mro__[1:] for other in classes):
            continue
        for name, member in inspect.getmembers_static(ours, is_override):
            base = next(one for one in ours.__mro__ if one.__module__.startswith("sglang."))
            method = None if isinstance(member, property) else member
            takes = () if method is None else parameters_of(method)
            points.append(HookPoint(f"{base.__module__}.{base.__qualname__}.{name}", takes, hooked=False))
    return points


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


def warn(text: str) -> None:
    """Log a warning in the launching process only, since its children load plugins too."""
    if multiprocessing.parent_process() is None:
        logger.warning(text)
