"""Host tier rows of models with sparse attention; test_dsa_index_tier.py has the index keys."""

import codec_oracle as oracle
import numpy as np
import pytest
import torch
from dsa_pools import (
    CASES,
    GUARD,
    LAYERS,
    PAGE,
    dsa_pool,
    fill,
    index_pages,
    layer,
    row_bytes,
    rows,
    values,
)
from host_tier import LABELS, host_bytes, host_pool, slots, stride_bytes

pytestmark = pytest.mark.usefixtures("no_reserve")

PAGES = 5
BIG = {"size": (PAGES - 1) * PAGE}
#: The second layer reuses the first layer's top-k, and has no index keys.
SHARED = {**BIG, "skip_topk_layers": [False, True, False]}
IO_BACKENDS = {"page_first": "kernel", "page_first_direct": "direct"}


def pages_of(part):
    """Rows of a layer by pages, a view."""
    return part.reshape(-1, PAGE, part.shape[1])


def move(tier, name, host_pages, device_pages, layers=range(LAYERS)):
    lists = slots(host_pages, PAGE), slots(device_pages, PAGE)
    if name == "backup":
        tier.backup_from_device_all_layer(None, *lists, IO_BACKENDS[tier.layout])
        return
    for index in layers:
        tier.load_to_device_per_layer(None, *lists, index, IO_BACKENDS[tier.layout])


# -------------------------------------------------------------------- rows


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize(("layout", "rank", "rope"), CASES)
def test_rows_there_and_back(layout, rank, rope, label):
    """Bit for bit, whatever the content; index keys, other pages and the source stay unchanged."""
    pool = dsa_pool(layout, rank, rope, **SHARED)
    was, index_was = fill(pool)
    tier = host_pool(pool, label)
    row = row_bytes(layout, rank, rope)
    assert tier.page_bytes == LAYERS * PAGE * row
    assert tier.get_size_per_token() == stride_bytes(LAYERS, PAGE, row) // PAGE
    move(tier, "backup", [5, 0, 3], [2, 4, 1])
    expected = np.full((tier.page_num, LAYERS, PAGE, row), GUARD, dtype=np.uint8)
    for index, part in enumerate(was):
        expected[[5, 0, 3], index] = pages_of(part)[[2, 4, 1]]
    assert np.array_equal(host_bytes(tier), expected)
    assert all(map(np.array_equal, rows(pool), was))

    for part in rows(pool):
        part[...] = GUARD
    move(tier, "load", [3, 5], [4, 1])
    for found, part in zip(rows(pool), was, strict=True):
        back = np.full_like(part, GUARD)
        pages_of(back)[[4, 1]] = pages_of(part)[[1, 2]]
        assert np.array_equal(found, back)
    assert all(map(np.array_equal, index_pages(pool), index_was))


NARROWER = [
    (layout, host, rank, rope)
    for layout, rank, rope in CASES
    for host in oracle.HOST_LAYOUTS
    if row_bytes(host, rank, rope) < row_bytes(layout, rank, rope)
    # Rows of 264 bytes, for example, are not converted.
    and not any(row_bytes(one, rank, rope) % 16 for one in (layout, host))
]


@pytest.mark.parametrize(("layout", "host", "rank", "rope"), NARROWER)
def test_rows_of_a_narrower_host_tier(layout, host, rank, rope):
    """Backup and load each convert the rows through bf16; the oracle computes both conversions."""
    from sgl_kvpool.transfer.host_options import HostTierOptions

    pool = dsa_pool(layout, rank, rope, options={"host_tier": HostTierOptions(layout=host)}, **BIG)
    nope, keys = values(2 * PAGE, rank, rope)
    pool.set_mla_kv_buffer(layer(3), torch.arange(PAGE, 3 * PAGE), nope, keys)
    tier = host_pool(pool)
    assert tier.page_bytes == LAYERS * PAGE * row_bytes(host, rank, rope)
    move(tier, "backup", [4, 0], [1, 2])

    def converted(raw, source, target):
        decoded = oracle.cast(oracle.decode(raw, source, rank, rope), torch.bfloat16)
        parts = decoded[:, :rank], decoded[:, rank:] if rope else None
        return oracle.encode(*parts, target, rank, rope, row_bytes(target, rank, rope))

    there = converted(rows(pool, 3)[PAGE : 3 * PAGE], layout, host)
    oracle.assert_same_bytes(host_bytes(tier)[[4, 0], 1], pages_of(there))
    for part in rows(pool):
        part[...] = GUARD
    move(tier, "load", [0, 4], [3, 1])
    back = pages_of(converted(there, host, layout))
    oracle.assert_same_bytes(pages_of(rows(pool, 3))[[3, 1]], back[[1, 0]])
    assert (pages_of(rows(pool, 3))[[0, 2, 4]] == GUARD).all()


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

    pool = dsa_pool(layout, 256, 0, options={"host_tier": HostTierOptions(layout=host)})
    with pytest.raises(ValueError, match=f"--kv-host-layout {host} does not work: its rows {message}"):
        host_pool(pool)


def test_stored_pages_are_named_after_their_bytes():
    """Dense pools pad only rows of 264 bytes, to 272; equal rows have equal names."""
    from host_tier import device_pool

    def tag(pool):
        return host_pool(pool).storage_format_tag

    tags = {case: tag(dsa_pool(*case)) for case in CASES}
    for (layout, rank, rope), found in tags.items():
        name = f"{layout}-r{rank}-p{rope}-b{row_bytes(layout, rank, rope)}-v1-host_{layout}-l2.3.0-t64-s2"
        assert found == name
        dense = device_pool(layout, page_size=PAGE, start_layer=2, kv_lora_rank=rank, qk_rope_head_dim=rope)
        assert (tag(dense) == found) == ((layout, rank) != ("fp8_block_scale", 256))


def test_checksums_tell_pages_apart():
    """For stores with copies: a page of a dense pool's padded rows is refused."""
    from host_tier import device_pool

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
