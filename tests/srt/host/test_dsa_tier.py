"""Host tier rows of models with sparse attention; test_dsa_index_tier.py has the index keys."""

import codec_oracle as oracle
import numpy as np
import pytest
import torch
from host_tier import backup, host_bytes, host_pool, load
from pools import (
    DSA_CASES,
    GUARD,
    LAYERS,
    device_pool,
    dsa_pool,
    dsa_row_bytes,
    layer,
    rows,
    values,
)
from pools import DSA_PAGE as PAGE

pytestmark = pytest.mark.usefixtures("no_reserve")

PAGES = 5
BIG = {"size": (PAGES - 1) * PAGE}
#: The second layer reuses the first layer's top-k, and has no index keys.
SHARED = {**BIG, "skip_topk_layers": [False, True, False]}


# -------------------------------------------------------------------- rows


NARROWER = [
    (layout, host, rank, rope)
    for layout, rank, rope in DSA_CASES
    for host in oracle.HOST_LAYOUTS
    if dsa_row_bytes(host, rank, rope) < dsa_row_bytes(layout, rank, rope)
    # Rows of 264 bytes, for example, are not converted.
    and not any(dsa_row_bytes(one, rank, rope) % 16 for one in (layout, host))
]


@pytest.mark.parametrize(("layout", "host", "rank", "rope"), NARROWER)
def test_rows_of_a_narrower_host_tier(layout, host, rank, rope):
    """Backup and load each convert the rows through bf16; the oracle computes both conversions."""
    from sgl_kvpool.transfer.host_options import HostTierOptions

    pool = dsa_pool(layout, rank, rope, host_tier=HostTierOptions(layout=host), **BIG)
    nope, keys = values(2 * PAGE, rank, rope)
    pool.set_mla_kv_buffer(layer(3), torch.arange(PAGE, 3 * PAGE), nope, keys)
    tier = host_pool(pool)
    assert tier.page_bytes == LAYERS * PAGE * dsa_row_bytes(host, rank, rope)
    backup(tier, [4, 0], [1, 2])

    def converted(raw, source, target):
        decoded = oracle.cast(oracle.decode(raw, source, rank, rope), torch.bfloat16)
        parts = decoded[:, :rank], decoded[:, rank:] if rope else None
        return oracle.encode(*parts, target, rank, rope, dsa_row_bytes(target, rank, rope))

    there = converted(rows(pool)[1][1:3].reshape(2 * PAGE, -1), layout, host)
    oracle.assert_same_bytes(host_bytes(tier)[[4, 0], 1], there.reshape(2, PAGE, -1))
    for part in rows(pool):
        part[...] = GUARD
    load(tier, [0, 4], [3, 1])
    back = converted(there, host, layout).reshape(2, PAGE, -1)
    oracle.assert_same_bytes(rows(pool)[1][[3, 1]], back[[1, 0]])
    assert (rows(pool)[1][[0, 2, 4]] == GUARD).all()


@pytest.mark.parametrize(
    ("layout", "host", "message"),
    [
        # Without rope, scaled rows are longer than raw rows.
        (
            "fp8",
            "fp8_block_scale",
            "have 264 bytes, .* fp8 on the device 256: .*hold fewer .*: same, .*fp4, .*$",
        ),
        (
            "bf16",
            "fp8_block_scale",
            "have 264 bytes, .* device 512: .*multiple of 16 bytes.*: same, .*fp4, .*$",
        ),
        ("fp8_block_scale", "fp4", "have 144 bytes, .* device 264: .*multiple of 16 bytes; use same$"),
    ],
)
def test_host_tiers_that_are_refused(layout, host, message):
    """The argument check refuses them too, with the same function."""
    from sgl_kvpool.transfer.host_options import HostTierOptions

    pool = dsa_pool(layout, 256, 0, host_tier=HostTierOptions(layout=host))
    with pytest.raises(ValueError, match=f"--kv-host-layout {host} does not work: its rows {message}"):
        host_pool(pool)


def test_stored_pages_are_named_after_their_bytes():
    """Dense pools pad only rows of 264 bytes, to 272; equal rows have equal names."""

    def tag(pool):
        return host_pool(pool).storage_format_tag

    tags = {case: tag(dsa_pool(*case)) for case in DSA_CASES}
    for (layout, rank, rope), found in tags.items():
        name = f"{layout}-r{rank}-p{rope}-b{dsa_row_bytes(layout, rank, rope)}-v1-host_{layout}-l2.3.0-t64-s2"
        assert found == name
        dense = device_pool(layout, page_size=PAGE, start_layer=2, kv_lora_rank=rank, qk_rope_head_dim=rope)
        assert (tag(dense) == found) == ((layout, rank) != ("fp8_block_scale", 256))


def test_checksums_tell_pages_apart():
    """For stores with copies: a page of a dense pool's padded rows is refused."""
    from sgl_kvpool.srt.host.page_format import DamagedPage

    ours = host_pool(dsa_pool("fp8_block_scale", 256, 0))
    host_bytes(ours)[1] = np.random.default_rng(0).integers(0, 256, ours.page_bytes).reshape(LAYERS, PAGE, -1)
    page = ours.get_data_page(PAGE)
    ours.set_from_flat_data_page(2 * PAGE, page)
    assert np.array_equal(host_bytes(ours)[2], host_bytes(ours)[1])
    dense = host_pool(
        device_pool("fp8_block_scale", page_size=PAGE, start_layer=2, kv_lora_rank=256, qk_rope_head_dim=0)
    )
    padded = torch.zeros_like(dense.get_dummy_flat_data_page())
    padded[: len(page)] = page
    with pytest.raises(DamagedPage):
        dense.set_from_flat_data_page(PAGE, padded)
