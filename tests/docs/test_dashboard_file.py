"""docs/grafana/sgl-kvpool.json without servers: its form, and that errors in an expression are noticed.

`tests/engine/test_dashboard.py` compares it with what servers expose.
"""

import re

import dashboard
import pytest
from dashboard import Exposed, Matcher, problems, selectors

BOARD = dashboard.load()
PANELS = dashboard.panels(BOARD)
TITLES = [panel["title"] for panel in PANELS]
#: Panels whose values have no unit: the table of labels.
WITHOUT_UNIT = {"table"}
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

each_panel = pytest.mark.parametrize("panel", PANELS, ids=TITLES)


# ------------------------------------------------------------------ the file


def test_it_can_be_imported_again_without_a_copy():
    """Grafana replaces a dashboard of the same uid, and gives it an id of its own."""
    assert (BOARD["uid"], BOARD["id"]) == ("sgl-kvpool", None)
    assert BOARD["schemaVersion"] >= 39


def test_ids_and_titles_are_unique():
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(ids) == len(set(ids))
    assert len(TITLES) == len(set(TITLES))


def test_panels_do_not_overlap_and_stay_inside_of_the_grid():
    taken = {}
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]


@each_panel
def test_a_panel_says_what_it_shows(panel):
    """One sentence of description, which ends as sentences do."""
    assert panel["title"]
    assert re.fullmatch(r"[A-Z].*[^.]\.", panel["description"])
    assert ". " not in panel["description"]
    if panel["type"] not in WITHOUT_UNIT:
        assert panel["fieldConfig"]["defaults"]["unit"]


@each_panel
def test_a_panel_asks_the_chosen_data_source(panel):
    letters = [target["refId"] for target in panel["targets"]]
    assert len(letters) == len(set(letters))
    assert [panel["datasource"], *(t["datasource"] for t in panel["targets"])] == [DATASOURCE] * (
        len(letters) + 1
    )


def test_variables_are_declared():
    """Variables are the dashboard's or Grafana's own, and a variable's definition is its query."""
    listed = BOARD["templating"]["list"]
    declared = {each["name"] for each in listed}
    assert declared == {"datasource", "instance", "model_name"}
    for expression in dashboard.expressions(BOARD):
        used = set(re.findall(r"\$\{?(\w+)", expression))
        assert used <= declared | {*dashboard.BUILT_IN}, expression
    assert [each["definition"] for each in listed if "definition" in each] == [
        *dashboard.variables(BOARD).values()
    ]


@pytest.mark.parametrize("expression", dict.fromkeys(dashboard.expressions(BOARD)))
def test_an_expression_can_be_read(expression):
    """It parses, and each metric in it is ours or SGLang's and limited to the chosen servers."""
    found = selectors(expression)
    assert found
    for selector in found:
        assert selector.metric.startswith(("sgl_kvpool_", "sglang:"))
        if not expression.startswith("label_values"):
            assert Matcher("instance", "=~", "$instance") in selector.matchers


def test_metrics_of_sglang_are_asked_for_by_both_names():
    """The version of Prometheus decides which of the two names it stores; see `dashboard`."""
    for expression in dashboard.expressions(BOARD):
        assert "sglang:" not in expression
        assert "sglang_" not in expression


def test_every_metric_of_ours_is_in_a_panel(counting):
    from prometheus_client import REGISTRY

    ours = {
        family.name + {"counter": "_total"}.get(family.type, "")
        for family in REGISTRY.collect()
        if family.name.startswith("sgl_kvpool_")
    }
    assert len(ours) == 6
    used = {s.metric for panel in PANELS for expr, _ in dashboard.targets(panel) for s in selectors(expr)}
    assert ours == {metric for metric in used if metric.startswith("sgl_kvpool_")}


# ------------------------------------------------------------------ reading expressions


EXPOSITION = """\
# TYPE sglang:used_tokens gauge
sglang:used_tokens{model_name="m",tp_rank="0"} 3.0
# TYPE sglang:wait_seconds histogram
sglang:wait_seconds_bucket{le="1.0",model_name="m"} 1.0
sglang:wait_seconds_bucket{le="+Inf",model_name="m"} 1.0
# TYPE sglang:hits_total counter
sglang:hits_total{mode="host_hit",model_name="m"} 1.0
sglang:hits_total{mode="input",model_name="m"} 1.0
# TYPE sgl_kvpool_info gauge
sgl_kvpool_info{layout="fp4",version="1"} 1.0
"""
EXPOSED = Exposed(EXPOSITION)

#: Expressions with one error each, and the message about it.
WRONG = {
    # A metric.
    "sglang:used_token": "no server exposes sglang:used_token",
    '{__name__=~"sglang[:_]used_token"}': "no server exposes sglang:used_token",
    "rate(sglang:wait_seconds[5m])": "no server exposes sglang:wait_seconds",
    "label_values(sglang:used_token, instance)": "no server exposes sglang:used_token",
    # A label.
    'sglang:used_tokens{rank="0"}': "no label 'rank' in sglang:used_tokens",
    'sglang:used_tokens{layer=""}': "no label 'layer' in sglang:used_tokens",
    "sum by (model) (sglang:used_tokens)": "no label 'model' in what 'by' aggregates",
    "max without (rank) (sglang:used_tokens)": "no label 'rank' in what 'without' aggregates",
    "sum by (tp_rank) (max by (model_name) (sglang:used_tokens))": (
        "no label 'tp_rank' in what 'by' aggregates"
    ),
    "label_values(sglang:used_tokens, model)": "no label 'model' in the metric of label_values",
    "sglang:used_tokens * on (model_name) group_left (layout) sgl_kvpool_info": (
        "no label 'model_name' in both sides of '*'"
    ),
    "sglang:used_tokens * on (instance) group_left (layer) sgl_kvpool_info": (
        "no label 'layer' in what is on the right of '*'"
    ),
    "sum by (model_name) (sglang:used_tokens) * sglang:hits_total": "both sides of '*' have other labels",
    "histogram_quantile(0.9, sum by (model_name) (rate(sglang:wait_seconds_bucket[5m])))": (
        "no label 'le' in what histogram_quantile reads"
    ),
    # A value, and a kind of metric.
    'sglang:hits_total{mode="inputs"}': "no mode of sglang:hits_total matches 'inputs'",
    'sglang:hits_total{mode=~"hit"}': "no mode of sglang:hits_total matches 'hit'",
    'sglang:hits_total{mode!="inputs"}': "no mode of sglang:hits_total matches 'inputs'",
    "rate(sglang:used_tokens[5m])": "rate of sglang:used_tokens, which is a gauge",
}

#: Texts that are not expressions, or that this module cannot read.
UNREADABLE = [
    "sum (sglang:used_tokens",
    "sum (sglang:used_tokens))",
    "rates(sglang:hits_total[5m])",
    '{instance=~"$instance"}',
    '{__name__=~"sglang:used_tokens"}',
    "",
]


@pytest.mark.parametrize("expression", WRONG)
def test_an_error_is_noticed(expression):
    (problem,) = problems(expression, EXPOSED)
    assert problem.startswith(WRONG[expression])


@pytest.mark.parametrize("expression", UNREADABLE)
def test_what_cannot_be_read_is_no_expression(expression):
    with pytest.raises(ValueError):
        selectors(expression)


def test_a_legend_may_show_labels_of_the_result_only():
    (problem,) = problems("sum by (model_name) (sglang:used_tokens)", EXPOSED, ["model_name", "tp_rank"])
    assert problem.startswith("no label 'tp_rank' in what the legend or the table shows")


def test_labels_of_a_table_are_those_that_it_arranges():
    """Grafana silently leaves out a column with a misspelt name."""
    arranged = {
        "id": "organize",
        "options": {"excludeByName": {"Time": True}, "renameByName": {"layuot": "x"}},
    }
    panel = {"targets": [{"expr": "sgl_kvpool_info"}], "transformations": [arranged]}
    ((expression, shown),) = dashboard.targets(panel)
    assert problems(expression, EXPOSED, shown)[0].startswith("no label 'layuot'")
