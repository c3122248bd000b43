"""How the installed SGLang differs from the one that this release was tested with.

`fingerprint.json` has digests of what our hook points name and our classes inherit, the server's arguments
with their defaults, and the versions of SGLang's libraries; `python -m scripts.fingerprint` writes it. Taking
one imports all modules that we hook (25 s on two cores), so a server does it only on another version.
"""

import hashlib
import importlib.metadata
import inspect
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

from sgl_kvpool import env
from sgl_kvpool.refusal import Refusal
from sgl_kvpool.sglang_plugin import hook_points
from sgl_kvpool.sglang_plugin.hook_points import HookGroup

FILE = Path(__file__).with_name("fingerprint.json")
LIBRARIES = ("sglang", "sglang-kernel", "flashinfer-python", "torch", "triton")


def take(groups: Iterable[HookGroup]) -> dict[str, dict[str, str]]:
    """Fingerprint of the installed SGLang: versions, defaults of arguments, digests of sources by target."""
    from sglang.srt.server_args import ServerArgs

    named = {point.target for group in groups for point in group.points()} | _inherited(groups)
    named |= {f"{target}.__init__" for target in named if isinstance(_found(target), type)}
    # The arguments have a list of their own; versions are without local parts such as +cu129.
    sources = _digests(name for name in named if not name.endswith(("ServerArgs", "._NS_BY_FIELD")))
    public = {name: found.partition("+")[0] for name, found in versions(LIBRARIES).items() if found}
    return {"versions": public, "arguments": _defaults(ServerArgs), "sources": sources}


def versions(names: Iterable[str]) -> dict[str, str | None]:
    found = {name: importlib.metadata.distributions(name=name) for name in names}
    return {name: next((one.version for one in copies), None) for name, copies in found.items()}


def _tested() -> dict[str, dict[str, str]]:
    """Fingerprint of the SGLang that this release was tested with; Refusal if the file is damaged."""
    try:
        found = json.loads(FILE.read_text(encoding="utf-8"))
        if "sglang" not in found["versions"]:
            raise LookupError("no version of SGLang")
        return {kind: dict(found[kind]) for kind in ("versions", "arguments", "sources")}
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise Refusal(f"{FILE} is damaged ({error!r}): reinstall sgl-kvpool") from None


def _inherited(groups: Iterable[HookGroup]) -> set[str]:
    """What SGLang's classes have that ours extend."""
    return {
        f"{base.__module__}.{base.__qualname__}.{name}"
        for group in groups
        for ours in hook_points.classes_of(group.source_modules)
        for base in ours.__mro__
        if base.__module__.startswith("sglang.")
        for name in vars(base)
        if name == "__init__" or not name.startswith(("__", "_abc_"))
    }


def _found(target: str) -> Any:
    """What a target names, of a property or a Triton kernel the function; the error if it is not there."""
    try:
        found = hook_points.resolve(target)
    except (AttributeError, ImportError) as error:  # `hook_points.check` reports it
        return error
    for inner in ("fget", "func", "fn"):
        found = found if inspect.ismodule(found) else getattr(found, inner, found)
    return found


def _defaults(found: type) -> dict[str, str]:
    """Default of each parameter of a constructor; a value that it makes is only known to be made."""
    parameters = inspect.signature(found).parameters.values()
    return {one.name: "required" if one.default is one.empty else repr(one.default) for one in parameters}


def _digests(targets: Iterable[str]) -> dict[str, str]:
    """Digests of targets; what is absent or not SGLang's, modules and instances have none."""
    texts = {target: _described(_found(target)) for target in sorted(targets)}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:12] for name, text in texts.items() if text}


def _described(found: Any) -> str | None:
    """Source of a function without comments; members of an enum or a collection; fields or bases."""
    if isinstance(found, type):
        # Python makes the constructor of dataclasses, Structs and named tuples, which has no source.
        made = _defaults(found) if hasattr(found, "__match_args__") else {}
        bases = [base.__name__ for base in found.__bases__]
        return repr([*getattr(found, "__members__", made).items()] or bases)
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

    No difference: a library that is not installed, since a CPU needs none of the GPU's, and a module that
    cannot be imported, which `failing` names.
    """
    old, new = _tested(), take(groups)
    old["sources"] = {n: d for n, d in old["sources"].items() if not isinstance(_found(n), ImportError)}
    new["sources"] = _digests(old["sources"]) | new["sources"]
    new["versions"] = old["versions"] | new["versions"] | {"sglang": old["versions"]["sglang"]}
    lines = []
    for kind, before in old.items():
        after = new[kind]
        found = {
            "changed": [f"{n}={after[n]} (tested: {v})" for n, v in before.items() if after.get(n, v) != v],
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


def _by_module(targets: Iterable[str]) -> list[str]:
    """Where the sources of targets stand, which others may import or inherit: names by module or class."""
    found = defaultdict(set)
    for target in targets:
        source = _found(target)
        name = getattr(source, "__qualname__", "<")
        where, _, last = _short(target if "<" in name else f"{source.__module__}.{name}").rpartition(".")
        found[where].add(last)
    return [f"{where}: {', '.join(sorted(names))}" for where, names in sorted(found.items())]


def problem() -> str | None:
    """Why a server with a layout is refused on the installed SGLang, with all differences; None if it is not.

    A build of the tested release with another number (0.5.23.post1) is accepted if nothing differs.
    """
    version = (versions(("sglang",))["sglang"] or "").partition("+")[0]
    known, text = _tested()["versions"]["sglang"], hook_points.version_problem()
    if not version or (text is None and version in (known, env.text(env.CHILD_SAME_AS_TESTED))):
        return text
    found = _compared()
    if text is None and not found:
        env.export(env.CHILD_SAME_AS_TESTED, version)
        return None
    way_out = f"install sglang=={known}, or set {env.ALLOW_UNTESTED}=1 to try"
    return "\n".join([text or f"SGLang {version} differs from the tested {known}; {way_out}", *found])


def _compared() -> list[str]:
    """`failing` and `differences` of all hook groups, from a child: a launcher must not import the pools."""
    code = f"import json; from {__package__} import fingerprint as ours, hook_groups as all"
    code += "\nprint('\\n' + json.dumps(ours.failing(all.GROUPS) + ours.differences(all.GROUPS)))"
    done = env.run_alone(code, timeout_seconds=300)
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return [f"the comparison ended with status {done.returncode}:", *done.stderr.splitlines()[-3:]]
