"""`doctor --self-check` on the device: stores, attention and host tiers of every layout and arrangement."""

import pytest

from emulated_cuda.conftest import said

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

CODE = """
import json
from emulated_cuda.memory import ALLOCATOR
from sgl_kvpool.commands.doctor import self_check as checks

pools, names = checks._pools, {names!r}
checks._pools = lambda device: [one for one in pools(device) if not names or one[0] in names]
facts, problems = checks.self_check()
print()
print(json.dumps([facts, problems + ALLOCATOR.problems]))
"""


QUICK = ["fp4 page_major", "fp8_block_scale, host fp4", "fp4, sparse"]


@pytest.mark.parametrize(
    ("names", "count"),
    [pytest.param(QUICK, 3, marks=pytest.mark.quick, id="quick"), pytest.param([], 37, id="all")],
)
def test_the_self_check_passes(on_device, names, count):
    (facts, problems), _ = said(on_device, CODE.format(names=names), 1200)
    assert problems == []
    assert facts.pop("device") == "cuda"
    assert len(facts) == count
    for name, found in facts.items():
        assert found.startswith("passed"), name
        assert "attention of 3 requests" in found
        # SGLang's own tier serves the others.
        own_tier = name not in ("bf16 layer_major", "fp8 layer_major", "bf16, sparse", "fp8, sparse")
        assert ("2 pages to the host tier and back" in found) == own_tier
