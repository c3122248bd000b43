"""What `--kv-error-sample` shows of servers whose rows are damaged on purpose, also on the host."""

import pytest
from error_oracle import expected, metrics_of, sampled
from prometheus_client.parser import text_string_to_metric_families

#: Server: its layouts, and the layers whose scales are doubled.
CASES = {"sampled": (("fp8_block_scale", "fp4_fp8_rope"), (0,)), "sampled-fp8": (("fp8",), ())}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.engine(name)) for name in CASES])
def test_metrics_are_those_of_the_oracle(record, name):
    answers, (layouts, doubled) = record(name), CASES[name]
    found = metrics_of(text_string_to_metric_families(answers["metrics"]))
    assert found.pop("sampled") == {"eager": 1}
    values = sampled(answers["values"])
    assert found == pytest.approx(expected(values, *layouts, doubled=doubled), rel=1e-4, abs=1e-9)
