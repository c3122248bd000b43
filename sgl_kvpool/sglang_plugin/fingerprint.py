"""How the installed SGLang differs from the one that this release was tested with.

`fingerprint.json` has digests of what our hook points name and our classes inherit, the server's arguments
with their defaults, and the versions of SGLang's libraries; `python -m scripts.fingerprint` writes it. Taking
one imports all modules that we hook (25 s on two cores), so a server does it only on another version.
"""

import dataclasses
import hashlib
import importlib.metadata
import inspect
import json
import pkgutil
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

from sgl_kvpool import env
from sgl_kvpool.sglang_plugin import hook_points
from sgl_kvpool.sglang_plugin.hook_points import HookGroup

FILE = Path(__file__).with_name("fingerprint.json")
_LIBRARIES = ("sglang", "sglang-kernel", "flashinfer-python", "torch", "triton")
_ARGUMENTS = "sglang.srt.server_args.ServerArgs"
_TIMEOUT_SECONDS = 300


def take(groups: Iterable[HookGroup]) -> dict[str, dict[str, str]]:
    """Fingerprint of the installed SGLang: versions, defaults of arguments, digests of sources by target."""
    from sglang.srt.server_args import ServerArgs

    named = {point.target for group in groups for point in group.points()} | _inherited(groups)
    named |= {f"{target}.__init__" for target in named if isinstance(_found(target), type)}
    sources = _digests(named - {_ARGUMENTS, f"{_ARGUMENTS}._NS_BY_FIELD"})
    # Without local parts such as +cu129.
    public = {name: found.partition("+")[0] for name, found in versions(_LIBRARIES).items() if found}
    return {"versions": public, "arguments": _fields(ServerArgs), "sources": sources}


def versions(names: Iterable[str]) -> dict[str, str | None]:
    """Versions of distributions; None for a missing one."""
    found = {name: importlib.metadata.distributions(name=name) for name in names}
    return {name: next((one.version for one in copies), None) for name, copies in found.items()}


def tested() -> dict[str, dict[str, str]]:
    """Fingerprint of the SGLang that this release was tested with."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def _inherited(groups: Iterable[HookGroup]) -> set[str]:
    """What SGLang's classes have that ours extend."""
    return {
        f"{base.__module__}.{base.__qualname__}.{name}"
        for path in {path for group in groups for path in group.source_modules if ".srt." in path}
        for ours in getattr(_found(path), "__dict__", {}).values()
        if isinstance(ours, type) and ours.__module__ == path
        for base in ours.__mro__
        if base.__module__.startswith("sglang.")
        for name in vars(base)
        if name == "__init__" or not name.startswith(("__", "_abc_"))
    }


def _found(target: str) -> Any:
    """What a target names, of a property or a Triton kernel the function; None if it is not there."""
    try:
        found = pkgutil.resolve_name(target)
    except Exception:  # whatever a module raises when it is imported; `hook_points.check` reports it
        return None
    for inner in ("fget", "func", "fn"):
        found = found if inspect.ismodule(found) else getattr(found, inner, found)
    return found


def _fields(found: type) -> dict[str, str]:
    """Default of each field of a dataclass or msgspec Struct; none for other classes."""
    import msgspec

    fields: Iterable[Any] = dataclasses.fields(found) if dataclasses.is_dataclass(found) else ()
    absent: Any = dataclasses.MISSING
    if issubclass(found, msgspec.Struct):
        fields, absent = msgspec.structs.fields(found), msgspec.NODEFAULT
    made = {one.name: repr(one.default_factory()) for one in fields if one.default_factory is not absent}
    given = {one.name: "required" if one.default is absent else repr(one.default) for one in fields}
    return given | made


def _digests(targets: Iterable[str]) -> dict[str, str]:
    """Digests of targets; what is absent or not SGLang's, modules and instances have none."""
    texts = {target: _described(_found(target)) for target in sorted(targets)}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:12] for name, text in texts.items() if text}


def _described(found: Any) -> str | None:
    """Source of a function without comments; members of an enum or a collection; fields or bases."""
    if isinstance(found, type):
        bases = [*(base.__name__ for base in found.__bases__), *vars(found).get("_fields", ())]
        return repr(list(getattr(found, "__members__", {}).items()) or _fields(found) or bases)
    if isinstance(found, Set | Mapping):
        return repr(sorted(map(str, found)))
    if isinstance(found, int | float | str | list | tuple):
        return repr(found)
    if not str(getattr(found, "__module__", None)).startswith("sglang."):
        return None  # a module; a constructor of Python's or torch's
    try:
        lines = inspect.getsource(found).splitlines()
    except (OSError, TypeError):
        return None
    return "\n".join(line.rstrip() for line in lines if line.strip() and not line.lstrip().startswith("#"))


def differences(groups: Iterable[HookGroup]) -> list[str]:
    """What differs from the tested SGLang, a line for each kind; empty if nothing does.

    A library that is not installed is no difference: a CPU needs none of the GPU's.
    """
    old, new = tested(), take(groups)
    new["sources"] = _digests(old["sources"]) | new["sources"]
    new["versions"] = old["versions"] | new["versions"] | {"sglang": old["versions"]["sglang"]}
    lines = []
    for kind, before in old.items():
        after = new[kind]
        changed = [name for name in before if after.get(name, before[name]) != before[name]]
        found = {
            "changed": [f"{name}={after[name]} (tested: {before[name]})" for name in changed],
            "new": [f"{name}={value}" for name, value in after.items() if name not in before],
            "removed": [name for name in before if name not in after],
        }
        for title, names in found.items():
            shown = _by_module(name.partition("=")[0] for name in names) if kind == "sources" else names
            lines += [f"{title} {kind}: {'; '.join(shown)}"] if names else []
    return lines


def failing(groups: Iterable[HookGroup]) -> list[str]:
    """A line for each hook group that does not work: what to leave out, and the hook points that fail."""
    found = []
    for group in groups:
        points = group.points()
        if problems := hook_points.check(points):
            names = "; ".join(_short(problem.partition(" (")[0]) for problem in problems)
            count = f"{len(problems)} of {len(points)} hook points fail"
            found.append(f"{group.name}: {count}; leave out {group.leave_out}: {names}")
    return found


def _short(target: str) -> str:
    return target.removeprefix("sglang.").removeprefix("srt.")


def _defined(target: str) -> str:
    """Where the source of a target stands, which another module may import, or a base class have."""
    found = _found(target)
    name = getattr(found, "__qualname__", "<")
    return target if "<" in name else f"{found.__module__}.{name}"


def _by_module(targets: Iterable[str]) -> list[str]:
    """Where the sources of targets stand, those of one module or class together."""
    found = defaultdict(list)
    for where, _, name in (_short(one).rpartition(".") for one in sorted(set(map(_defined, targets)))):
        found[where].append(name)
    return [f"{where}: {', '.join(names)}" for where, names in found.items()]


def problem() -> str | None:
    """Why a server with a layout is refused on the installed SGLang, with all differences; None if it is not.

    A build of the tested release with another number (0.5.23.post1) is accepted if nothing differs.
    """
    version = (versions(("sglang",))["sglang"] or "").partition("+")[0]
    known = tested()["versions"]["sglang"]
    text = hook_points.version_problem()
    if not version or version in (known, env.text(env.CHILD_SAME_AS_TESTED)):
        return None if version else text
    found = _compared()
    if text is None and not found:
        env.export(env.CHILD_SAME_AS_TESTED, version)
        return None
    text = text or (
        f"SGLang {version} differs from the tested {known}; install sglang=={known}, or set "
        f"{env.ALLOW_UNTESTED}=1 to try (the hook points are checked all the same)"
    )
    return "\n".join([text, *found])


def _compared() -> list[str]:
    """`failing` and `differences` of all hook groups, from a child: a launcher must not import the pools."""
    code = f"import json; from {__package__} import fingerprint as ours, hook_groups as all"
    code += "\nprint('\\n' + json.dumps(ours.failing(all.GROUPS) + ours.differences(all.GROUPS)))"
    done = env.run_alone(code, _TIMEOUT_SECONDS)
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return ["the comparison failed:", *done.stderr.splitlines()[-3:]]
