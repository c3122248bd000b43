"""HierarchicalMLAHostPool: round trips, SGLang's slot allocator, sizes, the view of stores and peers."""

import numpy as np
import pytest
import torch
from codec_oracle import LAYOUTS, ROW_BYTES
from host_tier import LABELS, backup, host_bytes, host_pool, load, page_memory, slots, stride_bytes
from pools import (
    ARRANGEMENTS,
    DSA_CASES,
    DSA_PAGE,
    GUARD,
    LAYERS,
    PAGES,
    START,
    assert_holds,
    device_pool,
    dsa_pool,
    dsa_row_bytes,
    fill,
    layer_ids,
    memory,
    rows,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("no_reserve")
MARGIN = 4096


# ------------------------------------------------------------------ transfers


@pytest.fixture
def margins(monkeypatch):
    """`margins()`: whether the bytes before and behind every host buffer are still guard bytes."""
    from sglang.srt.mem_cache.pool_host.common import HostTensorAllocator

    allocate, around = HostTensorAllocator.allocate, []

    def with_margins(self, dims, dtype, device):
        size = int(np.prod(dims)) * dtype.itemsize
        whole = allocate(self, (size + 2 * MARGIN,), torch.uint8, device).fill_(GUARD)
        around.append((whole[:MARGIN], whole[-MARGIN:]))
        return whole[MARGIN:-MARGIN].view(dtype).view(dims)

    monkeypatch.setattr(HostTensorAllocator, "allocate", with_margins)
    return lambda: bool(around) and all(bool((part == GUARD).all()) for pair in around for part in pair)


#: Pools: arrangements and page sizes decide which bytes are copied at once, layouts and geometries the rows.
POOLS = [
    *((device_pool, layout, {"arrangement": arrangement, "page_size": page_size})
      for layout in LAYOUTS for arrangement in ARRANGEMENTS for page_size in (1, 61, 64)),
    # The second layer reuses the first layer's top-k, and has no index keys.
    *((dsa_pool, layout, {"rank": rank, "rope": rope, "size": 256, "skip_topk_layers": [False, True, False]})
      for layout, rank, rope in DSA_CASES),
]  # fmt: skip


@pytest.mark.parametrize(
    ("number", "make", "layout", "arguments"), [(n, *case) for n, case in enumerate(POOLS)]
)
def test_round_trip(margins, number, make, layout, arguments):
    """Bit for bit; the source, index keys and every byte of other pages stay unchanged."""
    make, layout, arguments = POOLS[number]
    pool = make(layout, **arguments)
    was, tier = fill(pool), host_pool(pool, LABELS[number % 2])
    page_size, row_bytes = pool.page_size, rows(pool)[0].shape[-1]
    assert tier.page_bytes == LAYERS * page_size * row_bytes
    assert tier.get_size_per_token() == stride_bytes(LAYERS, page_size, row_bytes) // page_size
    there, taken = [5, 0, 3], [2, 4, 1]
    backup(tier, there, taken)
    assert_holds(pool, was)
    expected = np.full((tier.page_num, LAYERS, page_size, row_bytes), GUARD, dtype=np.uint8)
    for place, layer_id in enumerate(layer_ids(pool)):
        expected[there, place] = was["rows", layer_id][taken]
    assert np.array_equal(host_bytes(tier), expected)

    for part in rows(pool):
        part[...] = GUARD
    load(tier, [3, 5], [4, 1])
    for layer_id in layer_ids(pool):
        part = was["rows", layer_id]
        back = part[[1, 2]].copy()
        part[...] = GUARD
        part[[4, 1]] = back
    assert_holds(pool, was)
    assert np.array_equal(host_bytes(tier), expected)
    assert (page_memory(tier)[:, tier.page_bytes :] == GUARD).all()  # padding and the place of the checksum
    assert margins()


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_layers_arrive_one_by_one(arrangement):
    pool = device_pool("fp8_block_scale", arrangement)
    fill(pool)
    tier = host_pool(pool)
    wanted = [layer.copy() for layer in rows(pool)]
    backup(tier, [1, 2], [3, 1])
    for part in memory(pool):
        part[...] = GUARD
    load(tier, [1, 2], [3, 1], layers=[1])
    assert (rows(pool)[0] == GUARD).all()
    assert np.array_equal(rows(pool)[1][[3, 1]], wanted[1][[3, 1]])
    assert (rows(pool)[2] == GUARD).all()
    # Layers beyond those of this pipeline stage are ignored, as in SGLang's pool; draft layers must exist.
    load(tier, [1, 2], [3, 1], layers=[LAYERS])
    with pytest.raises(KeyError):
        tier.load_to_device_per_layer(
            None, slots([1, 2], 4), slots([3, 1], 4), LAYERS, "kernel", is_draft=True
        )
    assert (rows(pool)[2] == GUARD).all()


def test_lists_that_are_not_contiguous_in_memory():
    pool = device_pool("fp4", page_size=2)
    fill(pool)
    tier = host_pool(pool)
    there, taken = slots([4, 1, 2], 2), slots([1, 3, 4], 2)
    padded = [torch.stack([each, each * 0 - 7], dim=1).view(-1)[::2] for each in (there, taken)]
    assert not padded[0].is_contiguous()
    tier.backup_from_device_all_layer(None, *padded, "direct")
    assert np.array_equal(host_bytes(tier)[[4, 1, 2], 1], rows(pool)[1][[1, 3, 4]])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_packed_drafts_travel_with_the_target(layout, arrangement):
    """SGLang numbers draft layers behind the target's layers, and stores their rows behind its rows."""
    pool = device_pool(layout, arrangement)
    drafts = [device_pool(layout, layers=1, start_layer=0) for _ in range(2)]
    for seed, each in enumerate((pool, *drafts)):
        fill(each, seed)
    tier = host_pool(pool, draft_pools=drafts)
    assert tier.layer_num == LAYERS + 2
    assert tier.page_bytes == 4 * (LAYERS + 2) * ROW_BYTES[layout]
    wanted = [rows(each)[0].copy() for each in drafts]
    backup(tier, [2, 0], [1, 4])
    for depth, draft in enumerate(drafts):
        assert np.array_equal(host_bytes(tier)[[2, 0], LAYERS + depth], wanted[depth][[1, 4]])
        rows(draft)[0][...] = GUARD
        tier.load_to_device_per_layer(
            None, slots([2, 0], 4), slots([3, 2], 4), LAYERS + depth, "kernel", is_draft=True
        )
        assert np.array_equal(rows(draft)[0][[3, 2]], wanted[depth][[1, 4]])
        assert (rows(draft)[0][[0, 1, 4]] == GUARD).all()


def test_drafts_that_cannot_be_packed():
    pool = device_pool("fp4")
    with pytest.raises(ValueError, match="one layer and the target's rows"):
        host_pool(pool, draft_pools=[device_pool("fp8", layers=1)])
    with pytest.raises(ValueError, match="has 3 pages, the target 5"):
        host_pool(pool, draft_pools=[device_pool("fp4", layers=1, pages=3)])
    with pytest.raises(ValueError, match=r"\[2\] layers"):
        host_pool(pool, draft_pools=[device_pool("fp4", layers=2)])


def test_pools_that_are_not_ours():
    with pytest.raises(TypeError, match="not MLATokenToKVPool"):
        host_pool(device_pool("bf16", stock=True))


def test_clear_forgets_everything():
    tier = host_pool(device_pool("fp4"))
    given = tier.alloc(12)
    tier._lost.set(0, True)
    tier.clear()
    assert tier.available_size() == tier.page_num * 4
    assert not tier.slot_used.any()
    assert not tier._lost.any(slice(None))
    assert tier.alloc(12).tolist() == given.tolist()


# ------------------------------------------------------------------ sizes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ratio_and_size_count_the_layouts_bytes(layout):
    token_bytes = stride_bytes(LAYERS, 4, ROW_BYTES[layout]) // 4
    by_ratio = host_pool(device_pool(layout), ratio=3)
    assert by_ratio.size_per_token == token_bytes
    assert by_ratio.page_num == 3 * (PAGES - 1) * 4 // 4 + 1  # SGLang adds a page
    assert by_ratio.kv_buffer.nbytes == by_ratio.size * token_bytes
    by_size = host_pool(device_pool(layout), host_size=1e-3)
    assert by_size.page_num == int(1e6 // token_bytes) // 4 + 1


def test_a_capacity_that_is_given_is_kept():
    """A draft's tier is built with the capacity of its target's tier."""
    tier = host_pool(device_pool("fp8", layers=1), ratio=9, host_token_capacity=20, pool_label="draft")
    assert (tier.size, tier.page_num) == (20, 5)


# ------------------------------------------------------------------ the view of stores and peers


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_pointer_per_page(layout, label):
    tier = host_pool(device_pool(layout, page_size=2), label)
    page_bytes = stride_bytes(LAYERS, 2, ROW_BYTES[layout])
    addresses, sizes = tier.get_page_buffer_meta(slots([3, 0, 4], 2))
    begin = tier.kv_buffer.data_ptr()
    assert addresses == [begin + page * page_bytes for page in (3, 0, 4)]
    assert sizes == [page_bytes] * 3
    assert tier.get_page_buffer_element_size() == page_bytes
    assert tier.get_contiguous_buf_infos() == ([begin], [tier.page_num * page_bytes], [page_bytes])
    assert tier.get_size_per_token() == tier.get_ksize_per_token() == page_bytes // 2
    assert tier.layout == label
    for bad in ([1, 2], [tier.size, tier.size + 1], [-2, -1]):
        text = f"no page of 2 tokens begins at slot {bad[0]}; .* {tier.page_num} pages"
        with pytest.raises(IndexError, match=text):
            tier.get_page_buffer_meta(torch.tensor(bad))
    with pytest.raises(ValueError, match="1 slots are not a multiple of the page size 2"):
        tier.get_page_buffer_meta(torch.tensor([0]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 61])
def test_data_pages_are_the_pages_bytes(layout, page_size):
    tier = host_pool(device_pool(layout, page_size=page_size))
    generator = np.random.default_rng(1)
    host_bytes(tier)[...] = generator.integers(0, 256, host_bytes(tier).shape, dtype=np.uint8)
    page = tier.get_data_page(3 * page_size)
    assert page.dtype == tier.dtype
    raw = page.view(torch.uint8).numpy()
    size_bytes = stride_bytes(LAYERS, page_size, ROW_BYTES[layout])
    assert len(raw) == -(-size_bytes // 4096) * 4096
    assert np.array_equal(raw[: size_bytes - 16], page_memory(tier)[3, :-16])
    assert np.array_equal(raw[: tier.page_bytes], host_bytes(tier)[3].ravel())
    assert not raw[size_bytes:].any()
    assert (page_memory(tier)[:, tier.page_bytes :] == GUARD).all()  # only the copy has a checksum
    into = tier.get_dummy_flat_data_page()
    assert (into.dtype, into.shape) == (page.dtype, page.shape)

    expected = host_bytes(tier).copy()
    expected[1] = expected[3]
    into.copy_(page)
    tier.set_from_flat_data_page(page_size, into)
    assert np.array_equal(host_bytes(tier), expected)

    # Stores without copies read and write through a view.
    view = tier.get_data_page(torch.tensor(2 * page_size), flat=False)
    assert view.nbytes == size_bytes
    view.view(torch.uint8).fill_(7)
    assert (page_memory(tier)[2] == 7).all()
    assert np.array_equal(host_bytes(tier)[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])
    for bad in (tier.size, -page_size, *([1] if page_size > 1 else [])):
        with pytest.raises(IndexError, match="no page of"):
            tier.get_data_page(bad)
        with pytest.raises(IndexError, match="no page of"):
            tier.set_from_flat_data_page(bad, into)


def test_format_tags_tell_pages_apart():
    """Everything that changes the bytes of a stored page changes its key; the arrangement does not."""
    base = {"layout": "fp8", "page_size": 4}
    others = {
        "layout": {"layout": "fp4"},
        "page size": {"page_size": 2},
        "layers": {"layers": 2},
        "as many as with a draft": {"layers": 4},
        "stage": {"start_layer": START + 1},
        "rope": {"qk_rope_head_dim": 0},
        "rank": {"kv_lora_rank": 256},
        "k_scale": {"k_scales": {START + 1: 0.5}},
        "other k_scale": {"k_scales": {START + 2: 0.5}},
    }
    tags = {name: host_pool(device_pool(**{**base, **change})).storage_format_tag
            for name, change in others.items()}  # fmt: skip
    plain = host_pool(device_pool(**base))
    tags["plain"] = plain.storage_format_tag
    for name, scales in (("draft", {}), ("scaled draft", {START: 0.5})):
        draft = device_pool("fp8", layers=1, k_scales=scales)
        tags[name] = host_pool(device_pool(**base), draft_pools=[draft]).storage_format_tag
    assert len(set(tags.values())) == len(tags)
    for arrangement in ARRANGEMENTS:
        for label in LABELS:
            arranged = host_pool(device_pool(**base, arrangement=arrangement), label)
            assert arranged.storage_format_tag == tags["plain"]
    assert host_pool(device_pool(**base, k_scales={START: 1.0})).storage_format_tag == tags["plain"]

    from sglang.srt.managers.cache_controller import storage_model_name

    assert storage_model_name("model", plain) == f"model-{tags['plain']}"


# ------------------------------------------------------------------ sparse attention


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
        dense = device_pool(
            layout, page_size=DSA_PAGE, start_layer=2, kv_lora_rank=rank, qk_rope_head_dim=rope
        )
        assert (tag(dense) == found) == ((layout, rank) != ("fp8_block_scale", 256))
