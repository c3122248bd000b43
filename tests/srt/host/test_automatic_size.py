"""SGLang's automatic ratio (`hicache_auto_size`): rows, index keys, states and drafts fit into its budget."""

import pytest
from cases import crossed
from model_kinds import KINDS

FRACTION = 0.8  # the default of --hicache-host-memory-fraction
SLACK = 0.05  # SGLang's


@pytest.fixture
def free_memory(monkeypatch):
    """`free_memory(size)`: bytes that SGLang finds free on this host."""
    from sglang.srt.mem_cache.pool_host import base

    def set_to(size):
        monkeypatch.setattr(base, "available_host_memory_bytes", lambda **_: int(size))

    return set_to


def ratio_in_use():
    from sglang.srt.runtime_context import get_memory

    return get_memory().hicache_ratio


@pytest.mark.parametrize(
    ("kind", "host", "ranks"),
    [
        *((*case, 1) for case in crossed([*KINDS], ["bf16", "fp4"])),
        ("dense, own draft", "bf16", 2),
        ("dense, own draft with heads", "fp4", 2),
    ],
)
def test_the_ratio_is_lowered_until_all_pools_fit(model_of, free_memory, kind, host, ranks):
    """Measured by the tensors: whatever the ratio, all pools take the budget, and not much less of it."""
    free_memory(1 << 40)
    of_rank = {"tp_size": ranks, "dcp_size": ranks}
    plenty = model_of(kind, "bf16", host, 64, pages=64, slots=64, ratio=None, **of_rank)
    assert ratio_in_use() == 2.0
    wanted = plenty.host_bytes
    budget = 0.6 * wanted
    free_memory(ranks * budget / FRACTION)  # SGLang divides it among ranks
    fitting = model_of(kind, "bf16", host, 64, pages=64, slots=64, ratio=None, **of_rank)
    assert ratio_in_use() < 2.0
    # A page more in each pool, which SGLang adds, is part of its slack.
    assert (1 - 2 * SLACK) * budget < fitting.host_bytes <= budget
    ratio, narrow = ratio_in_use(), {"bf16": 1.0, "fp4": 1152 / 416}[host]
    assert fitting.host_pools[0].size == (int(64 * 64 * ratio * narrow) // 64 + 1) * 64


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "heads" in kind])
def test_a_given_ratio_that_does_not_fit_names_the_arguments(model_of, free_memory, kind):
    """Where only the target's pages fit: SGLang's error about a draft's pool names no argument."""
    from sgl_kvpool.srt.host.memory import HostTierTooLarge

    free_memory(1 << 40)
    plenty = model_of(kind, "bf16", "fp4", 64)
    rows = plenty.host_pools[0]
    taken = rows.size * rows.size_per_token
    free_memory(taken)
    with pytest.raises(HostTierTooLarge, match=r"needs \d+\.\d+ GB for \d+ tokens .*smaller --hicache-"):
        model_of(kind, "bf16", "fp4", 64)
