"""The Grafana dashboard, and what its expressions ask of Prometheus: metrics, labels, values of labels.

promql-parser parses an expression; its labels are then looked up where they are used: those of a matcher in
its metric, those of `by (...)` in the aggregated operand, those of a legend in the result.

SGLang's metrics have two names. Servers expose `sglang:token_usage`; but a Prometheus that asks for
OpenMetrics without UTF-8, as versions 2 do, gets samples named `sglang_token_usage` (prometheus_client writes
them so). The dashboard asks for both, `{__name__=~"sglang[:_]token_usage"}`; this module reads that as
`sglang:token_usage`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import promql_parser

PATH = Path(__file__).resolve().parents[2] / "docs" / "grafana" / "sgl-kvpool.json"

#: Labels that Prometheus adds to whatever it scrapes.
OF_TARGETS = frozenset({"instance", "job"})
#: Labels of SGLang's metrics that not every server has; `label=""` also matches metrics without the label.
OPTIONAL = frozenset({"priority"})
#: Variables of Grafana's own; all are durations.
BUILT_IN = ("__rate_interval", "__interval", "__range")

_OF_COUNTERS = frozenset({"rate", "increase"})
_SETS = frozenset({"and", "or", "unless"})
_THAT_GROW = frozenset({"counter", "histogram", "summary"})
_OPERATORS = {
    int(promql_parser.MatchOp.Equal): "=",
    int(promql_parser.MatchOp.NotEqual): "!=",
    int(promql_parser.MatchOp.Re): "=~",
    int(promql_parser.MatchOp.NotRe): "!~",
}
#: Both names of a metric of SGLang's.
_EITHER = re.compile(r"sglang\[:_\](\w+)")
#: A function of Grafana, not of Prometheus.
_LABEL_VALUES = re.compile(r"label_values\((.+), (\w+)\)")


# ------------------------------------------------------------------ the file


def load() -> dict[str, Any]:
    """The dashboard."""
    return json.loads(PATH.read_text(encoding="utf-8"))


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """Panels of the dashboard, also those of collapsed rows; the rows themselves are left out."""
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
    """Expressions of all template variables and panels."""
    return [*variables(board).values(), *(expr for panel in panels(board) for expr, _ in targets(panel))]


# ------------------------------------------------------------------ expositions


class Exposed:
    """What servers answer to GET /metrics: samples by the name that Prometheus stores them under.

    Parameters
    ----------
    *texts : str
        One exposition for each server.
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
        """Labels of all samples of a metric."""
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
        The text is not an expression, or a metric in it has no name.
    """
    reader = _Reader()
    reader.whole(expression)
    return reader.selectors


def problems(expression: str, exposed: Exposed, shown: Iterable[str] = ()) -> list[str]:
    """Metrics, labels and values that the servers do not expose; `shown` are labels of the legend."""
    reader = _Reader(exposed)
    result = reader.whole(expression)
    for label in shown:
        reader.need(label, result or set(), "what the legend or the table shows")
    return reader.problems


@dataclass
class _Reader:
    """Walks a parsed expression. The value of each part is its set of labels, None for a number."""

    exposed: Exposed | None = None
    selectors: list[Selector] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def need(self, label: str, available: set[str], where: str) -> None:
        """Note a label that is not available."""
        if self.exposed is not None and label not in available | OF_TARGETS:
            self.problems.append(f"no label {label!r} in {where}; there are {sorted(available)}")

    def whole(self, expression: str) -> set[str] | None:
        """Labels of an expression in Grafana's form, with variables."""
        values = _LABEL_VALUES.fullmatch(expression)
        text = values[1] if values else expression
        for variable in BUILT_IN:  # all of them are durations
            text = text.replace(f"${variable}", "5m")
        result = self.labels(promql_parser.parse(text))
        if values:
            self.need(values[2], result or set(), "the metric of label_values")
        return result

    def labels(self, part: Any) -> set[str] | None:
        """Labels of any part of an expression."""
        match part:
            case promql_parser.VectorSelector():
                return self.selector(part)
            case promql_parser.MatrixSelector():
                return self.selector(part.vector_selector)
            case promql_parser.ParenExpr() | promql_parser.UnaryExpr():
                return self.labels(part.expr)
            case promql_parser.NumberLiteral():
                return None
            case promql_parser.AggregateExpr():
                return self.aggregation(part)
            case promql_parser.Call():
                return self.function(part)
            case promql_parser.BinaryExpr():
                return self.operation(part)
        raise ValueError(f"cannot read {part}")

    def operation(self, part: promql_parser.BinaryExpr) -> set[str] | None:
        left, right = self.labels(part.lhs), self.labels(part.rhs)
        if left is None or right is None:
            return left if right is None else right
        operator, where = str(part.op), f"both sides of {str(part.op)!r}"
        matching = part.modifier.matching if part.modifier else None
        on = list(matching.labels) if matching else []
        is_on = matching is not None and matching.type == promql_parser.LabelModifierType.Include
        for label in on:
            self.need(label, left & right if is_on else left | right, where)
        many = promql_parser.VectorMatchCardinality.ManyToOne
        brought = list(part.modifier.group_labels) if part.modifier and part.modifier.card == many else None
        for label in brought or []:
            self.need(label, right, f"what is on the right of {operator!r}")
        if self.exposed is not None and not is_on and left - {*on} != right - {*on}:
            self.problems.append(f"{where} have other labels: {sorted(left)} and {sorted(right)}")
        if operator == "or":
            return left | right
        if operator in _SETS or matching is None:
            return left
        if brought is not None:
            return left | {*brought}
        return left & {*on} if is_on else left - {*on}

    def aggregation(self, part: promql_parser.AggregateExpr) -> set[str]:
        inside = self.labels(part.expr) or set()
        if part.modifier is None:
            return set()
        is_by, labels = part.modifier.type == promql_parser.AggModifierType.By, set(part.modifier.labels)
        for label in sorted(labels):
            self.need(label, inside, f"what {'by' if is_by else 'without'!r} aggregates")
        return labels if is_by else inside - labels

    def function(self, part: promql_parser.Call) -> set[str] | None:
        name, before = part.func.name, len(self.selectors)
        result = self.labels(part.args[-1])
        if name == "histogram_quantile":
            self.need("le", result or set(), "what histogram_quantile reads")
            return (result or set()) - {"le"}
        if name not in _OF_COUNTERS:
            raise ValueError(f"{name} is not one of {', '.join(sorted(_OF_COUNTERS))}, histogram_quantile")
        for selector in self.selectors[before:]:
            if self.exposed is not None and not self.exposed.grows.get(selector.metric, True):
                self.problems.append(f"{name} of {selector.metric}, which is a gauge")
        return result

    def selector(self, part: promql_parser.VectorSelector) -> set[str]:
        found = [Matcher(m.name, _OPERATORS[int(m.op)], m.value) for m in part.matchers.matchers]
        metric = part.name
        if metric is None:
            named = [m for m in found if m.label == "__name__"]
            either = _EITHER.fullmatch(named[0].value) if len(named) == 1 else None
            if either is None or named[0].operator != "=~":
                raise ValueError(f'a selector without a metric or __name__=~"sglang[:_]...": {part}')
            found.remove(named[0])
            metric = f"sglang:{either[1]}"
        self.selectors.append(Selector(metric, tuple(found)))
        if self.exposed is None:
            return set()
        if metric not in self.exposed.samples:
            self.problems.append(f"no server exposes {metric}")
            return set()
        labels = self.exposed.labels(metric)
        for matcher in found:
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
