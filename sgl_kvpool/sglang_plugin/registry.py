"""Declarations of what sgl-kvpool hooks and uses in SGLang, each beside the code that needs it.

`@around` above a function declares a hook, `uses` a function or collection that our code calls or reads,
`fields` arguments of the server. Each belongs to a hook group (:mod:`.hook_groups`), by name. Two kinds of
hook points are not declared here: imports (:mod:`.imports`), and methods with the mark `srt.overrides`.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable)

_FIELDS = "sglang.srt.server_args.ServerArgs._NS_BY_FIELD"


@dataclass(frozen=True)
class HookPoint:
    """A function, class or collection of SGLang that sgl-kvpool hooks or uses."""

    target: str
    #: Names the callable must take in this order; other parameters may come between. Empty: not checked.
    parameters: tuple[str, ...] = ()
    #: Whether the package wraps the target, which must then be found wrapped after hooking.
    hooked: bool = True
    #: Names a collection must contain, and those that the package adds, which it must contain afterwards.
    members: tuple[str, ...] = ()
    added: tuple[str, ...] = ()


@dataclass
class Declared:
    """What the modules imported so far declare for one hook group.

    `points` and `hooks` are by target, in the order of declaration. `installs` change SGLang in other ways
    and are called before the hooks are applied.
    """

    points: dict[str, HookPoint] = field(default_factory=dict)
    hooks: dict[str, Callable] = field(default_factory=dict)
    installs: list[Callable[[], None]] = field(default_factory=list)
    #: Hooked functions that are wrong in SGLang with its own pools too -> where that was reported.
    repairs: dict[str, str] = field(default_factory=dict)

    @property
    def modules(self) -> tuple[str, ...]:
        """Full names of the modules that hook SGLang for the group."""
        functions: tuple[Any, ...] = (*self.installs, *self.hooks.values())
        return tuple(dict.fromkeys(function.__module__ for function in functions))

    def add(self, point: HookPoint) -> None:
        """Add a hook point; members of a collection that is declared in several places are joined."""
        known = self.points.get(point.target)
        if known is not None:
            point = replace(known, members=tuple(dict.fromkeys((*known.members, *point.members))))
        self.points[point.target] = point


#: Name of a hook group -> its declarations.
_declared: defaultdict[str, Declared] = defaultdict(Declared)


def declared(group: str) -> Declared:
    """Declarations of a hook group by the modules that are imported."""
    return _declared[group]


def around(
    target: str, group: str, *, reads: Iterable[str] = (), repairs: str | None = None
) -> Callable[[_Function], _Function]:
    """Decorate `hook(original, *args, **kwargs)`, which processes that apply the group put around `target`.

    `target`, the dotted path of a function of SGLang, must take what the hook takes by name, and what it
    `reads`: parameters from its `*args` or `**kwargs`, or that our code relies on. In a signature with
    `*args` they stand there, otherwise last. `repairs`: the hook mends SGLang, with the upstream issue or
    pull request; a port to a new release looks whether it can go.
    """

    def declare(hook: _Function) -> _Function:
        ours = _declared[group]
        assert target not in ours.hooks, target
        ours.add(HookPoint(target, parameters_of(hook, reads)[1:], hooked=True))
        ours.hooks[target] = hook
        if repairs is not None:
            ours.repairs[target] = repairs
        return hook

    return declare


def installs(*groups: str) -> Callable[[_Function], _Function]:
    """Decorate a function that changes SGLang in another way than by a hook; safe to call again."""

    def declare(function: _Function) -> _Function:
        for group in groups:
            _declared[group].installs.append(function)
        return function

    return declare


def uses(
    target: str,
    *groups: str,
    takes: Iterable[str] = (),
    members: Iterable[str] = (),
    added: Iterable[str] = (),
) -> None:
    """Declare a function or collection of SGLang that our code calls or reads; see `HookPoint`.

    An import needs this only for parameters or members.
    """
    for group in groups:
        _declared[group].add(
            HookPoint(target, tuple(takes), hooked=False, members=tuple(members), added=tuple(added))
        )


def fields(*names: str) -> None:
    """Declare fields of `ServerArgs` that our code reads, also from views of it."""
    uses(_FIELDS, "arguments", members=names)


def parameters_of(function: Any, reads: Iterable[str] = ()) -> tuple[str, ...]:
    """Names that a function takes, without `cls`, in order; `reads` stand at `*args`, or else last.

    Positional-only parameters have no name to a caller.
    """
    names: list[str] = []
    remaining = tuple(reads)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += remaining
            remaining = ()
        elif (
            parameter.kind not in (parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY)
            and parameter.name != "cls"
        ):
            names.append(parameter.name)
    return (*names, *remaining)
