"""docs/grafana/sgl-kvpool.json against GET /metrics of servers that have been through its traffic.

Three expositions: a server with a host tier and Mooncake's store, after hits in every place and failures; a
prefill server; a decode server, after a peer of another layout and a killed one.
"""

from pathlib import Path

import dashboard
import pytest
from dashboard import Exposed, problems, selectors

pytestmark = pytest.mark.engine("mooncake", "peers")

BOARD = dashboard.load()
PANELS = dashboard.panels(BOARD)

#: Exposed only after a transfer broke off, and a prefill server may be killed between two transfers. Another
#: metric of the same collector, with the same labels, then stands in.
RARE = {"sglang:num_transfer_failed_reqs_total": "sglang:num_bootstrap_failed_reqs_total"}


@pytest.fixture(scope="module")
def exposed(record):
    peers = record("peers")
    found = Exposed(record("mooncake")["metrics"], peers["prefill_metrics"], peers["decode_metrics"])
    for metric, alike in RARE.items():
        found.samples.setdefault(metric, found.samples[alike])
        found.grows.setdefault(metric, found.grows[alike])
    return found


@pytest.mark.parametrize("panel", PANELS, ids=[panel["title"] for panel in PANELS])
def test_a_panel_asks_for_what_servers_expose(panel, exposed):
    """Metrics, labels of each metric, values of labels, and labels in legends."""
    for expression, shown in dashboard.targets(panel):
        assert problems(expression, exposed, shown) == [], expression


@pytest.mark.parametrize("name", dashboard.variables(BOARD))
def test_a_variable_asks_for_what_servers_expose(name, exposed):
    assert problems(dashboard.variables(BOARD)[name], exposed) == []


def test_rare_metrics_are_declared_by_sglang():
    from sglang.srt.observability import metrics_collector

    source = Path(metrics_collector.__file__).read_text()
    for metric in RARE:
        assert source.count(f'name="{metric}"') == 1


def test_an_unknown_name_in_any_expression_is_noticed(exposed):
    """Each metric of the dashboard is, in turn, replaced by a name that the servers do not have."""
    for expression in dashboard.expressions(BOARD):
        for selector in selectors(expression):
            name = selector.metric.removeprefix("sglang:")
            assert problems(expression.replace(name, name + "_x"), exposed)
