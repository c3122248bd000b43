"""The Grafana dashboard, and what its expressions ask of Prometheus: metrics, labels, values of labels.

An expression is read as Prometheus reads it, as far as labels go, so that each label is looked up where it is
used: a matcher's in the very metric, `by (...)`'s in what is aggregated, a legend's in the result.

SGLang's metrics have two names. Servers expose `sglang:token_usage`; but a Prometheus that asks for
OpenMetrics without UTF-8, as versions 2 do, gets samples named `sglang_token_usage` (prometheus_client writes
them so). The dashboard asks for both, `{__name__=~"sglang[:_]token_usage"}`, which is `sglang:token_usage`
in this module.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

__all__ = [
    "BUILT_IN",
    "PATH",
    "Exposed",
    "Matcher",
    "Selector",
    "expressions",
    "load",
    "panels",
    "problems",
    "selectors",
    "targets",
    "variables",
]

PATH = Path(__file__).resolve().parents[2] / "docs" / "grafana" / "sgl-kvpool.json"

#: Labels that Prometheus adds to whatever it scrapes.
OF_TARGETS = frozenset({"instance", "job"})
#: Labels of SGLang's that not every server has; `label=""` also matches metrics without it.
OPTIONAL = frozenset({"priority"})
#: Variables of Grafana's own.
BUILT_IN = frozenset({"__rate_interval", "__interval", "__range"})

_AGGREGATIONS = frozenset({"sum", "max", "min", "avg", "count", "group"})
_OF_COUNTERS = frozenset({"rate", "increase"})
_FUNCTIONS = _OF_COUNTERS | {"histogram_quantile", "label_values"}
_THAT_GROW = frozenset({"counter", "histogram", "summary"})
_SETS = frozenset({"and", "or", "unless"})
_OPERATORS = _SETS | {"+", "-", "*", "/", "%", "^", "==", "!=", "<=", ">=", "<", ">"}
#: A metric of SGLang's by either name.
_EITHER = re.compile(r"sglang\[:_\](\w+)")
_TOKEN = re.compile(
    r"""\s*(?:
    (?P<string> "(?:[^"\\]|\\.)*" )
    | (?P<range> \[[^\]]*\] )
    | (?P<number> \d+(?:\.\d+)?(?:e[+-]?\d+)?[a-z]* )
    | (?P<name> [a-zA-Z_:][a-zA-Z0-9_:]* )
    | (?P<variable> \$\w+ )
    | (?P<sign> =~ | !~ | [=!<>]= | [-+*/%^<>=(){},] )
    )""",
    re.VERBOSE,
)


# ------------------------------------------------------------------ the file


def load() -> dict[str, Any]:
    """The dashboard."""
    return json.loads(PATH.read_text(encoding="utf-8"))


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """Its panels, without the rows, also those inside of rows that are folded up."""
    found: list[dict[str, Any]] = []
    for panel in board["panels"]:
        found += panel.get("panels", []) if panel["type"] == "row" else [panel]
    return found


def targets(panel: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Expressions of a panel, each with the labels that its legend or its table shows."""
    columns: list[str] = []
    for step in panel.get("transformations", []):
        options = step.get("options", {})
        for key in ("excludeByName", "indexByName", "renameByName"):
            columns += options.get(key, {})
    shown = [name for name in dict.fromkeys(columns) if name not in ("Time", "Value")]
    return [
        (target["expr"], shown + re.findall(r"{{\s*(\w+)\s*}}", target.get("legendFormat", "")))
        for target in panel["targets"]
    ]


def variables(board: dict[str, Any]) -> dict[str, str]:
    """Expression of each template variable that asks Prometheus."""
    listed = board["templating"]["list"]
    return {each["name"]: each["query"]["query"] for each in listed if each["type"] == "query"}


def expressions(board: dict[str, Any]) -> list[str]:
    """All of them."""
    return [*variables(board).values(), *(expr for panel in panels(board) for expr, _ in targets(panel))]


# ------------------------------------------------------------------ expositions


class Exposed:
    """What servers answer to GET /metrics: samples by the name that Prometheus stores them under.

    Parameters
    ----------
    *texts : str
        Each of one server.
    """

    def __init__(self, *texts: str) -> None:
        from prometheus_client.parser import text_string_to_metric_families

        self.samples: dict[str, list[dict[str, str]]] = {}
        self.grows: dict[str, bool] = {}
        for text in texts:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    self.samples.setdefault(sample.name, []).append(sample.labels)
                    self.grows[sample.name] = family.type in _THAT_GROW

    def labels(self, metric: str) -> set[str]:
        """Those of any of its samples."""
        return {label for labels in self.samples[metric] for label in labels}


# ------------------------------------------------------------------ expressions


class Matcher(NamedTuple):
    """One of `{label="value"}`."""

    label: str
    operator: str
    value: str


class Selector(NamedTuple):
    """A metric with its matchers."""

    metric: str
    matchers: tuple[Matcher, ...]


def selectors(expression: str) -> list[Selector]:
    """Every metric that an expression names.

    Raises
    ------
    ValueError
        It is no expression, or uses what this module does not know.
    """
    reader = _Reader(expression)
    reader.whole()
    return reader.selectors


def problems(expression: str, exposed: Exposed, shown: Iterable[str] = ()) -> list[str]:
    """Metrics, labels and values that are not what the servers expose; `shown` are labels of the legend."""
    reader = _Reader(expression, exposed)
    result = reader.whole()
    for label in shown:
        reader.need(label, result or set(), "what the legend or the table shows")
    return reader.problems


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    text, at = text.strip(), 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"cannot read {text[at:]!r}")
        at = match.end()
        assert match.lastgroup is not None
        yield match.lastgroup, match[match.lastgroup]


@dataclass
class _Reader:
    """Reads an expression from left to right. Values are sets of labels, None for a number.

    The precedence of operators does not matter: it changes values, and no labels.
    """

    text: str
    exposed: Exposed | None = None
    selectors: list[Selector] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = [*_tokens(self.text), ("end", "")]
        self.at = 0

    # ---------------------------------------------------------- tokens

    @property
    def next(self) -> str:
        return self.tokens[self.at][1]

    def take(self, *expected: str) -> str:
        """The next token, which has to be one of these kinds or texts."""
        kind, text = self.tokens[self.at]
        if expected and kind not in expected and text not in expected:
            raise ValueError(f"{text!r} where {' or '.join(expected)} belongs in {self.text!r}")
        self.at += 1
        return text

    def skip(self, text: str) -> bool:
        """Take a token if it is the next one."""
        found = self.next == text
        self.at += found
        return found

    def names(self) -> list[str]:
        """Labels in parentheses."""
        self.take("(")
        found = []
        while not self.skip(")"):
            found.append(self.take("name"))
            if self.next != ")":
                self.take(",")
        return found

    # ---------------------------------------------------------- what is wrong

    def need(self, label: str, available: set[str], where: str) -> None:
        """Note a label that is not there."""
        if self.exposed is not None and label not in available | OF_TARGETS:
            self.problems.append(f"no label {label!r} in {where}; there are {sorted(available)}")

    # ---------------------------------------------------------- grammar

    def whole(self) -> set[str] | None:
        result = self.expression()
        self.take("end")
        return result

    def expression(self) -> set[str] | None:
        left = self.operand()
        while self.next in _OPERATORS:
            operator = self.take()
            left = self.matched(operator, left)
        return left

    def matched(self, operator: str, left: set[str] | None) -> set[str] | None:
        """The rest of a binary operation."""
        matching, on, brought = None, [], None
        if self.next in ("on", "ignoring"):
            matching, on = self.take(), self.names()
            if self.skip("group_left"):
                brought = self.names()
        right = self.operand()
        if left is None or right is None:
            return left if right is None else right
        where = f"both sides of {operator!r}"
        for label in on:
            self.need(label, left & right if matching == "on" else left | right, where)
        for label in brought or []:
            self.need(label, right, f"what is on the right of {operator!r}")
        if self.exposed is not None and matching != "on" and left - {*on} != right - {*on}:
            self.problems.append(f"{where} have other labels: {sorted(left)} and {sorted(right)}")
        if operator == "or":
            return left | right
        if operator in _SETS:
            return left
        if brought is not None:
            return left | {*brought}
        return {"on": left & {*on}, "ignoring": left - {*on}, None: left}[matching]

    def operand(self) -> set[str] | None:
        kind = self.tokens[self.at][0]
        if kind == "number":
            self.take()
            return None
        if self.skip("("):
            result = self.expression()
            self.take(")")
        elif self.next in _AGGREGATIONS:
            result = self.aggregation()
        elif kind == "name" and self.tokens[self.at + 1][1] == "(":
            result = self.function()
        else:
            result = self.selector()
        if self.tokens[self.at][0] == "range":
            self.take()
        if self.skip("offset"):
            self.take("number", "variable")
        return result

    def aggregation(self) -> set[str]:
        """`sum (...)`, `sum by (...) (...)` and the like; grouping behind the operand is not read."""
        self.take()
        grouping, labels = "by", []
        if self.next in ("by", "without"):
            grouping, labels = self.take(), self.names()
        self.take("(")
        inside = self.expression() or set()
        self.take(")")
        for label in labels:
            self.need(label, inside, f"what {grouping!r} aggregates")
        return {*labels} if grouping == "by" else inside - {*labels}

    def function(self) -> set[str] | None:
        name = self.take()
        if name not in _FUNCTIONS:
            raise ValueError(f"unknown function {name!r} in {self.text!r}")
        self.take("(")
        if name == "histogram_quantile":
            self.take("number")
            self.take(",")
        before = len(self.selectors)
        result = self.expression()
        if name == "label_values":
            self.take(",")
            self.need(self.take("name"), result or set(), "the metric of label_values")
        if name == "histogram_quantile":
            self.need("le", result or set(), "what histogram_quantile reads")
            result = (result or set()) - {"le"}
        self.take(")")
        if self.exposed is not None and name in _OF_COUNTERS:
            for selector in self.selectors[before:]:
                if not self.exposed.grows.get(selector.metric, True):
                    self.problems.append(f"{name} of {selector.metric}, which is a gauge")
        return result

    def selector(self) -> set[str]:
        metric, matchers = "" if self.next == "{" else self.take("name"), []
        if self.skip("{"):
            while not self.skip("}"):
                label, operator = self.take("name"), self.take("=", "!=", "=~", "!~")
                matchers.append(Matcher(label, operator, json.loads(self.take("string"))))
                if self.next != "}":
                    self.take(",")
        if not metric:
            name, operator, value = matchers.pop(0) if matchers else Matcher("", "", "")
            either = _EITHER.fullmatch(value)
            if (name, operator) != ("__name__", "=~") or either is None:
                raise ValueError(f'a selector without a metric or __name__=~"sglang[:_]..." in {self.text!r}')
            metric = f"sglang:{either[1]}"
        self.selectors.append(Selector(metric, tuple(matchers)))
        if self.exposed is None:
            return set()
        if metric not in self.exposed.samples:
            self.problems.append(f"no server exposes {metric}")
            return set()
        labels = self.exposed.labels(metric)
        for matcher in matchers:
            self.check(matcher, metric, labels)
        return labels | OF_TARGETS

    def check(self, matcher: Matcher, metric: str, labels: set[str]) -> None:
        """A matcher names a label of this metric, and a value that some sample has."""
        label, operator, value = matcher
        if label in OPTIONAL and (operator, value) == ("=", ""):
            return
        self.need(label, labels, metric)
        if "$" in value or label not in labels:
            return
        assert self.exposed is not None
        found = {sample[label] for sample in self.exposed.samples[metric] if label in sample}
        pattern = value if "~" in operator else re.escape(value)
        if not any(re.fullmatch(pattern, each) for each in found):
            self.problems.append(f"no {label} of {metric} matches {value!r}; there are {sorted(found)}")
