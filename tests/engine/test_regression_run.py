"""The reduced form of scripts/h100_regression.py with real servers, and what it says of a broken product."""

import pytest
from regression_run import SERVER

from scripts.servers.regressions import compare

pytestmark = pytest.mark.engine("regression")

RAN = ["tests-canonical", "codec-quick", "attention-quick", "transfer-quick"]
RAN += ["serve-demo-stock", "serve-demo-bf16", SERVER]


@pytest.fixture
def found(record):
    return record("regression")


def values(found, step):
    return {one.metric: one.value for one in found["run"].steps[step].measurements}


def test_what_ran(found):
    steps = found["run"].steps
    assert [name for name, record in steps.items() if record.status == "ok"] == RAN == list(steps)
    assert "7 steps: 7 ok" in found["printed"]
    assert "without a GPU: no kernel was checked" in found["printed"]
    assert f"[7/7] {SERVER}, about 80 s: " in found["printed"]
    assert all(steps[name].measurements for name in RAN)


def test_the_server_was_compared_with_its_peers(found):
    fp4 = values(found, SERVER)
    # FP4 rows of this model: 0.0205 from either peer (docs/benchmarks.md has its perplexity).
    for peer in ("stock", "bf16"):
        assert 0.01 < fp4[f"distance of log-probabilities to {peer}"] < 0.04
        assert 0.97 < fp4[f"same top token as {peer}"] < 1
    bf16 = values(found, "serve-demo-bf16")
    assert bf16["distance of log-probabilities to stock"] < 0.002
    assert (fp4["bytes per token and layer"], bf16["bytes per token and layer"]) == (416, 1152)
    assert fp4["throughput"] > 0
    assert fp4["throughput, ratio to stock"] > 0


def test_hits_on_device_and_host(found):
    for step in ("serve-demo-bf16", SERVER):
        measured = values(found, step)
        assert measured["found on the device"] == measured["found on the host"] == 1.0
        assert measured["same tokens after a host hit as after a device hit"] == 1.0
        times = [measured[f"time to first token, {name}"] for name in ("cold", "device hit", "host hit")]
        assert min(times) > 0
    # Stock SGLang has no host tier on a CPU; the measurement is there without a value.
    assert values(found, "serve-demo-stock")["time to first token, host hit"] is None


def test_a_damaged_decoder_is_noticed(found):
    damaged = found["damaged"].steps[SERVER]
    assert damaged.status == "failed"
    assert "distance of log-probabilities to stock" in damaged.reason
    against = compare(found["run"], found["damaged"])
    assert against.status == 1
    worse = [line for line in against.regressions if line.startswith(f"{SERVER}: distance")]
    assert len(worse) == 2
    assert not any(line.startswith("serve-demo-bf16") for line in against.regressions)
