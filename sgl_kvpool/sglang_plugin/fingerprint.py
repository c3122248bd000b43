"""How the installed SGLang differs from the one that this release was tested with.

`fingerprint.json` has digests of what our hook points name, the server's arguments with their defaults, and
the versions of SGLang's libraries; `python -m scripts.fingerprint` writes it. Taking one imports all modules
that we hook (25 s on two cores), so a server does it only on another version.
"""

import dataclasses
import enum
import hashlib
import importlib.metadata
import inspect
import json
import pkgutil
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sgl_kvpool import env
from sgl_kvpool.sglang_plugin import hook_points
from sgl_kvpool.sglang_plugin.hook_points import HookGroup

FILE = Path(__file__).with_name("fingerprint.json")
_LIBRARIES = ("sglang-kernel", "flashinfer-python", "torch", "triton")
_ARGUMENTS = "sglang.srt.server_args.ServerArgs"
_TIMEOUT_SECONDS = 300

Fingerprint = dict[str, dict[str, Any]]


def take(groups: Iterable[HookGroup]) -> Fingerprint:
    """Fingerprint of the installed SGLang: ``versions``, ``arguments`` with defaults, ``sources`` by target.

    A target without a digest (None) is absent or a module.
    """
    from sglang.srt.server_args import ServerArgs

    points = {point.target for group in groups for point in group.points()}
    ours = hook_points.__package__.partition(".")[0]
    targets = sorted(one for one in points if not one.startswith(f"{ours}.") and one != _ARGUMENTS)
    return {
        "versions": versions(),
        "arguments": _fields(ServerArgs) or {},
        "sources": {target: _digest(target) for target in targets},
    }


def versions() -> dict[str, str | None]:
    """Versions of SGLang and its libraries without local parts such as +cu129; None for a missing one."""
    found: dict[str, str | None] = {}
    for name in ("sglang", *_LIBRARIES):
        try:
            found[name] = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def tested() -> Fingerprint:
    """Fingerprint of the SGLang that this release was tested with."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def _fields(found: type) -> dict[str, str] | None:
    """Default of each field of a dataclass or msgspec Struct; None for other classes."""
    import msgspec

    fields: tuple[Any, ...]
    absent: Any
    if issubclass(found, msgspec.Struct):
        fields, absent = msgspec.structs.fields(found), msgspec.NODEFAULT
    elif dataclasses.is_dataclass(found):
        fields, absent = dataclasses.fields(found), dataclasses.MISSING
    else:
        return None
    given = {one.name: "required" if one.default is absent else repr(one.default) for one in fields}
    made: dict[str, Any] = {
        one.name: one.default_factory for one in fields if one.default_factory is not absent
    }
    return given | {name: repr(make()) for name, make in made.items()}


def _digest(target: str) -> str | None:
    try:
        text = _described(pkgutil.resolve_name(target))
    except Exception:  # whatever a module raises when it is imported; `hook_points.check` reports it
        return None
    return text and hashlib.sha256(text.encode()).hexdigest()[:12]


def _described(found: Any) -> str | None:
    """Source of a function without comments; members of an enum, fields of a dataclass, a constructor."""
    if inspect.ismodule(found):
        return None
    if isinstance(found, type):
        if issubclass(found, enum.Enum):
            return repr(list(found.__members__))
        if (fields := _fields(found)) is not None:
            return repr(fields)
        bases = ", ".join(base.__name__ for base in found.__bases__)
        return f"{found.__name__}({bases}) {_described(found.__init__)}"
    if isinstance(found, Mapping):
        return repr([str(key) for key in found])
    if isinstance(found, int | float | str | list | tuple):
        return repr(found)
    try:
        # The function of a property, of a Triton kernel, compiled or interpreted.
        source = inspect.getsource(getattr(found, "fget", getattr(found, "fn", found)))
    except (OSError, TypeError):
        return type(found).__name__
    lines = textwrap.dedent(source).splitlines()
    return "\n".join(line.rstrip() for line in lines if line.strip() and not line.lstrip().startswith("#"))


def differences(groups: Iterable[HookGroup]) -> dict[str, list[str]]:
    """What differs from the tested SGLang, by kind; empty if nothing does.

    A library that is not installed is no difference: a CPU needs none of the GPU's.
    """
    old, new = tested(), take(groups)
    found: dict[str, list[str]] = {}
    changed = [name for name, digest in new["sources"].items() if digest != old["sources"].get(name)]
    there = [name for name in changed if new["sources"][name] is not None]
    found[f"{len(there)} source{'s differ' if len(there) > 1 else ' differs'}"] = _by_module(there)
    before, after = old["arguments"], new["arguments"]
    found["new arguments"] = [f"{name}={after[name]}" for name in after if name not in before]
    found["arguments that are gone"] = [name for name in before if name not in after]
    found["other defaults"] = [
        f"{name}={after[name]} (was {before[name]})"
        for name in after
        if before.get(name, after[name]) != after[name]
    ]
    found["other versions"] = [
        f"{name} {version} (tested: {old['versions'][name]})"
        for name, version in new["versions"].items()
        if version not in (None, old["versions"][name]) and name != "sglang"
    ]
    return {title: lines for title, lines in found.items() if lines}


def failing(groups: Iterable[HookGroup]) -> dict[str, list[str]]:
    """Hook groups that do not work, with the hook points that fail."""
    found = {}
    for group in groups:
        points = group.points()
        if problems := hook_points.check(points):
            title = f"{group.name}: {len(problems)} of {len(points)} hook points fail"
            found[f"{title}; leave out {group.leave_out}"] = [
                _short(problem.partition(" (")[0]) for problem in problems
            ]
    return found


def _short(target: str) -> str:
    return target.removeprefix("sglang.").removeprefix("srt.")


def _by_module(targets: Iterable[str]) -> list[str]:
    """Targets, those of one module or class together."""
    names = defaultdict(list)
    for target in targets:
        where, _, name = target.rpartition(".")
        names[_short(where)].append(name)
    return [
        f"{where}: {', '.join(found)}" if len(found) > 1 else f"{where}.{found[0]}"
        for where, found in names.items()
    ]


def lines(found: Mapping[str, list[str]]) -> list[str]:
    """A line for each kind of difference, with what differs."""
    return [f"{title}: {'; '.join(names)}" for title, names in found.items()]


def problem() -> str | None:
    """Why a server with a layout is refused on the installed SGLang, with all differences; None if it is not.

    A build of the tested release with another number (0.5.23.post1) is accepted if nothing differs.
    """
    version, known = versions()["sglang"], tested()["versions"]["sglang"]
    if version == known or (version and version == env.text(env.CHILD_SAME_AS_TESTED)):
        return None
    text = hook_points.version_problem()
    if version is None:
        return text
    found = _compared()
    if text is None and not found:
        env.export(env.CHILD_SAME_AS_TESTED, version)
        return None
    text = text or (
        f"SGLang {version} differs from the tested {known}; install sglang=={known}, or set "
        f"{env.ALLOW_UNTESTED}=1 to try (the hook points are checked all the same)"
    )
    return "\n".join([text, *lines(found)])


def _compared() -> dict[str, list[str]]:
    """`failing` and `differences` of all hook groups, from a child: a launcher must not import the pools."""
    done = env.run_alone(f"import {__name__} as ours; ours.answer()", _TIMEOUT_SECONDS)
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"the comparison failed": done.stderr.splitlines()[-3:]}


def answer() -> None:
    """In the child: print the differences as the last line of stdout."""
    from sgl_kvpool.sglang_plugin.hook_groups import GROUPS

    print("\n" + json.dumps(failing(GROUPS) | differences(GROUPS)))
