"""Tokens and slots of a host tier, against real host pools of real device pools."""

import pytest
from codec_oracle import ROW_BYTES
from host_tier import stride_bytes
from pools import INDEX_BYTES, device_pool, dsa_pool, hybrid_pool
from test_dcp_pool import as_rank

from sgl_kvpool.commands.plan.planned import HostBytes, host_tokens, largest_whole_gb

pytestmark = pytest.mark.usefixtures("no_reserve")


def tier_of(pool, size_gb, page_size):
    from sgl_kvpool.srt.host.rows import HierarchicalMLAHostPool

    return HierarchicalMLAHostPool(pool, 2.0, size_gb, page_size, "page_first")


@pytest.mark.parametrize("size_gb", [0.0007, 0.003, 0.0051])
@pytest.mark.parametrize("page_size", [1, 61, 64])
@pytest.mark.parametrize(("layout", "host"), [("bf16", "bf16"), ("fp4", "fp4"), ("bf16", "fp4")])
def test_rows(layout, host, page_size, size_gb):
    from sgl_kvpool.transfer.host_options import HostTierOptions

    options = HostTierOptions(layout="same" if host == layout else host)
    pool = device_pool(layout, page_size=page_size, host_tier=options)
    token_bytes = stride_bytes(3, page_size, ROW_BYTES[host]) // page_size
    held = HostBytes(token_bytes=token_bytes, index_bytes=0, device_tokens=pool.size)
    found = host_tokens(held, size_gb, page_size)
    tier = tier_of(pool, size_gb, page_size)
    assert (found.tokens, found.slots) == (tier.size, 0)
    assert found.total_bytes == tier.kv_buffer.nbytes


@pytest.mark.parametrize("ranks", [1, 4])
def test_index_keys_are_part_of_a_page(ranks):
    """A rank has its own rows of a page, and the keys of all."""
    with as_rank(0, ranks):
        pool = dsa_pool("fp4")
        token_bytes = stride_bytes(pool.layer_num, 64, 416 + ranks * INDEX_BYTES) // 64
        held = HostBytes(token_bytes=token_bytes, index_bytes=0, device_tokens=pool.size, spread_ranks=ranks)
        found, tier = host_tokens(held, 0.002, 64), tier_of(pool, 0.002, ranks * 64)
        assert (found.tokens, found.total_bytes) == (tier.logical_size, tier.kv_buffer.nbytes)


@pytest.mark.parametrize("size_gb", [0.0011, 0.004])
@pytest.mark.parametrize("layout", ["bf16", "fp4"])
def test_rows_and_states_share(layout, size_gb):
    from sgl_kvpool.srt.host.states import HierarchicalStatePoolHost
    from sgl_kvpool.srt.host.tier_bytes import TierBytes

    pool = hybrid_pool(layout, page_size=64, size=128)
    states = pool.mamba_pool
    row_gb, state_gb = TierBytes.of(pool, states).split(size_gb)
    rows = tier_of(pool.row_pool, row_gb, 64)
    slots = HierarchicalStatePoolHost(states, 2.0, state_gb, "page_first")
    of_rows = {"token_bytes": rows.size_per_token, "index_bytes": 0, "device_tokens": pool.row_pool.size}
    held = HostBytes(**of_rows, slot_bytes=slots.size_per_token, device_slots=states.size)
    found = host_tokens(held, size_gb, 64)
    assert (found.tokens, found.slots) == (rows.size, slots.size)


def test_the_largest_size_fits():
    held = HostBytes(token_bytes=25376, index_bytes=8052, device_tokens=10**6)
    size = largest_whole_gb(held, 125.0, 64)
    page = 64 * (25376 + 8052)
    assert host_tokens(held, size, 64).total_bytes - page <= 125e9
    assert host_tokens(held, size + 1, 64).total_bytes - page > 125e9
    assert size == 94  # of rows, and 30 of index keys
    plain = HostBytes(token_bytes=25376, index_bytes=0, device_tokens=10**6)
    assert largest_whole_gb(plain, 125.0, 64) == 125
    assert largest_whole_gb(plain, 0.99, 64) == 0
