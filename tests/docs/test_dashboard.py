"""docs/grafana/sgl-kvpool.json asks for metrics that exist, in expressions that Prometheus can read."""

import json
import re
from pathlib import Path

import promql_parser
import pytest

from sgl_kvpool.metrics import METRICS

BOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana" / "sgl-kvpool.json"
#: What prometheus_client appends to names of histograms and counters; SGLang declares some counters with it.
SUFFIX = r"(?:_bucket|_sum|_total)?"


def test_every_metric_exists_and_every_expression_parses():
    sglang = pytest.importorskip("sglang")
    board = json.loads(BOARD.read_text())
    assert (board["uid"], board["id"]) == ("sgl-kvpool", None)  # an import replaces it, and is no copy
    expressions = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    assert len(expressions) > 40
    for expression in expressions:
        promql_parser.parse(expression.replace("$__rate_interval", "5m"))
    text = "\n".join(expressions)
    assert set(re.findall(r"sgl_kvpool_\w+", text)) == {metric.exported_name for metric in METRICS.values()}
    sources = (Path(sglang.__file__).parent / "srt" / "observability").rglob("*.py")
    declared = "\n".join(path.read_text() for path in sources)
    named = {re.sub(f"{SUFFIX}$", "", name) for name in re.findall(r"sglang\[:_\](\w+)", text)}
    assert named - set(re.findall(rf'"sglang:(\w+?){SUFFIX}"', declared)) == set()
