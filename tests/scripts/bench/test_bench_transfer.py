"""`bench transfer` on a CPU: every pool has a rate, and a slow one misses its target."""

from argparse import Namespace

import pytest
import torch

from scripts.bench import transfer, transfer_gpu
from scripts.bench.sweep import result_of


@pytest.fixture
def bench(monkeypatch):
    """Seconds of work instead of minutes; on one thread, since two wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(transfer, "LAYERS", 3)
    monkeypatch.setattr(transfer, "QUICK", (4 << 20, 1))
    monkeypatch.setattr(
        transfer, "caches", lambda *a, layer_count=3: transfer_gpu.caches(*a, layer_count=layer_count)
    )
    yield transfer.Transfers(Namespace(quick=True, device="cpu"))
    torch.set_num_threads(threads)


def test_every_pool(bench):
    cases = bench.cases({})
    assert len(cases) == 15
    rows = [{"job": case, **result_of(bench, case)} for case in cases]
    assert {row["status"] for row in rows} == {"measured"}
    for row in rows:
        assert min(row[f"{name}_{of}"] for name in transfer.DIRECTIONS for of in ("of_torch", "of_copy")) > 0
    # Rows that move one by one have no target.
    assert len(bench.targets(rows, {})) == 2 * 10


@pytest.mark.parametrize(("rate", "state"), [(0.7, "passed"), (0.69, "missed")])
def test_targets(bench, rate, state):
    case = {"layout": "fp4", "arrangement": "page_major"}
    row = {"job": case, "status": "measured", "to_host_of_copy": rate, "to_device_of_copy": 1.0}
    assert [one["state"] for one in bench.targets([row], {})] == [state, "passed"]
