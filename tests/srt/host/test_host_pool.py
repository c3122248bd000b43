"""HierarchicalMLAHostPool: round trips, SGLang's slot allocator, sizes, the view of stores and peers."""

import numpy as np
import pools
import pytest
import torch
from codec_oracle import LAYOUTS, ROW_BYTES, narrower
from host_tier import LABELS, backup, host_bytes, host_pool, load, page_memory, slots, stride_bytes
from pools import ARRANGEMENTS, GUARD, LAYERS, START, assert_holds, device_pool, dsa_pool, fill, rows

from sgl_kvpool.transfer.host_options import HostTierOptions

pytestmark = pytest.mark.usefixtures("no_reserve")


# ------------------------------------------------------------------ transfers


#: Pools: arrangements and page sizes decide which bytes are copied at once, layouts and geometries the rows.
POOLS = [
    *((device_pool, layout, {"arrangement": arrangement, "page_size": page_size})
      for layout in LAYOUTS for arrangement in ARRANGEMENTS for page_size in (1, 61, 64)),
    # The second layer reuses the first layer's top-k, and has no index keys.
    *((dsa_pool, layout, {"rank": rank, "rope": rope, "size": 256, "skip_topk_layers": [False, True, False]})
      for layout, rank, rope in pools.DSA_CASES),
    # GLM-5.3-Flash: a page of 256 tokens has 64 keys; tails of requests stay on the device.
    (dsa_pool, "bf16", {"page_size": 256, "size": 1024, "index_kpool": 4, "index_kpool_compress": True,
                        "max_running_requests": 2}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("number", "make", "layout", "arguments"), [(n, *case) for n, case in enumerate(POOLS)]
)
def test_round_trip(number, make, layout, arguments):
    """Bit for bit, index keys too; the source and every byte of other pages stay unchanged."""
    make, layout, arguments = POOLS[number]
    pool = make(layout, **arguments)
    was, tier = fill(pool), host_pool(pool, LABELS[number % 2])
    page_size, row_bytes = pool.page_size, rows(pool)[0].shape[-1]
    keys = [part for part in pools.index_pages(pool) if len(part)]
    key_bytes = sum(part.shape[1] for part in keys)
    assert tier.page_bytes == LAYERS * page_size * row_bytes + key_bytes
    assert tier.get_size_per_token() == stride_bytes(LAYERS, page_size, row_bytes, key_bytes) // page_size
    there, taken = [5, 0, 3], [2, 4, 1]
    backup(tier, there, taken)
    assert_holds(pool, was)
    expected = np.full((tier.page_num, LAYERS, page_size, row_bytes), GUARD, dtype=np.uint8)
    for place, layer_id in enumerate(pools.layer_ids(pool)):
        expected[there, place] = was["rows", layer_id][taken]
    assert np.array_equal(host_bytes(tier), expected)

    for part in (*rows(pool), *keys):
        part[...] = GUARD
    load(tier, [3, 5], [4, 1])
    for part in was.values():
        if not len(part):
            continue  # a layer without index keys
        back = part[[1, 2]].copy()
        part[...] = GUARD
        part[[4, 1]] = back
    assert_holds(pool, was)
    assert np.array_equal(host_bytes(tier), expected)
    assert (page_memory(tier)[:, tier.page_bytes :] == GUARD).all()  # padding and the place of the checksum


def test_layers_beyond_those_of_this_pipeline_stage_are_ignored():
    """As in SGLang's pool; draft layers must exist."""
    pool = device_pool("fp8_block_scale", "token_major")
    was = fill(pool)
    tier = host_pool(pool)
    load(tier, [1, 2], [3, 1], layers=[LAYERS])
    with pytest.raises(KeyError):
        load(tier, [1, 2], [3, 1], layers=[LAYERS], is_draft=True)
    assert_holds(pool, was)


def test_lists_that_are_not_contiguous_in_memory():
    pool = device_pool("fp4", page_size=2)
    fill(pool)
    tier = host_pool(pool)
    there, taken = slots([4, 1, 2], 2), slots([1, 3, 4], 2)
    padded = [torch.stack([each, each * 0 - 7], dim=1).view(-1)[::2] for each in (there, taken)]
    assert not padded[0].is_contiguous()
    tier.backup_from_device_all_layer(None, *padded, "direct")
    assert np.array_equal(host_bytes(tier)[[4, 1, 2], 1], rows(pool)[1][[1, 3, 4]])


def test_drafts_that_cannot_be_packed():
    for reason, layout, sizes in (
        ("one layer and the target's rows", "fp8", {"layers": 1}),
        ("has 3 pages, the target 5", "fp4", {"layers": 1, "pages": 3}),
        (r"\[2\] layers", "fp4", {"layers": 2}),
    ):
        with pytest.raises(ValueError, match=reason):
            host_pool(device_pool("fp4"), draft_pools=[device_pool(layout, **sizes)])


def test_pools_that_are_not_ours():
    with pytest.raises(TypeError, match="not MLATokenToKVPool"):
        host_pool(device_pool("bf16", stock=True))


# ------------------------------------------------------------------ sizes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ratio_and_size_count_the_layouts_bytes(layout):
    token_bytes = stride_bytes(LAYERS, 4, ROW_BYTES[layout]) // 4
    by_ratio = host_pool(device_pool(layout), ratio=3)
    assert by_ratio.size_per_token == token_bytes
    assert by_ratio.page_num == 3 * (pools.PAGES - 1) * 4 // 4 + 1  # SGLang adds a page
    assert by_ratio.kv_buffer.nbytes == by_ratio.size * token_bytes
    by_size = host_pool(device_pool(layout), host_size=1e-3)
    assert by_size.page_num == int(1e6 // token_bytes) // 4 + 1


def test_a_slot_is_allocated_and_freed_once():
    """Freed slots wait until no others are free; with their new owner, nothing of them is lost."""
    tier = host_pool(device_pool("fp4"))
    one, other = tier.alloc(8), tier.alloc(4)
    tier._lost.set(one // 4, True)
    assert tier.free(one) == 8
    rest = [tier.alloc(tier.available_size() - 8), tier.alloc(8), tier.alloc(4)]
    assert rest[1].tolist() == one.tolist()
    assert (rest[2], tier.host_indices_problem(one)) == (None, None)
    tier.free_slots = other
    with pytest.raises(AssertionError, match="Double-alloc"):
        tier.alloc(4)
    tier.clear()
    for freed in (one, other):
        with pytest.raises(AssertionError, match="Double-free"):
            tier.free(freed)


# ------------------------------------------------------------------ the view of stores and peers


@pytest.mark.parametrize(("page_size", "label"), [(1, LABELS[0]), (61, LABELS[1])])
def test_views_of_pages(page_size, label):
    """As stores without copies use them; `test_stores.py` has the copied pages."""
    tier = host_pool(device_pool("fp4", page_size=page_size), label)
    assert tier.layout == label
    page_bytes = stride_bytes(LAYERS, page_size, ROW_BYTES["fp4"])
    begin, raw = tier.kv_buffer.data_ptr(), page_memory(tier)
    assert tier.get_contiguous_buf_infos() == ([begin], [tier.page_num * page_bytes], [page_bytes])
    assert tier.get_size_per_token() == tier.get_ksize_per_token() == page_bytes // page_size
    tier.get_data_page(torch.tensor(2 * page_size), flat=False).view(torch.uint8).fill_(7)
    assert raw.shape[1] == page_bytes
    assert (raw[2] == 7).all()
    assert (np.delete(raw, 2, axis=0) == GUARD).all()
    into = tier.get_dummy_flat_data_page()
    for bad in (tier.size, -page_size, *([1] if page_size > 1 else [])):
        for call in (
            lambda bad=bad: tier.get_data_page(bad),
            lambda bad=bad: tier.set_from_flat_data_page(bad, into),
            lambda bad=bad: tier.get_page_buffer_meta(torch.arange(bad, bad + page_size)),
        ):
            with pytest.raises(IndexError, match=f"no page of {page_size} tokens begins at slot {bad}; "):
                call()
    if page_size > 1:
        with pytest.raises(ValueError, match="1 slots are not a multiple of the page size 61"):
            tier.get_page_buffer_meta(torch.tensor([0]))


def test_format_tags_tell_pages_apart():
    """Everything that changes the bytes of a stored page changes its key; the arrangement does not."""
    base = {"layout": "fp8", "page_size": 4}
    others = {
        "layout": {"layout": "fp4"},
        **{host: {"host_tier": HostTierOptions(layout=host)} for host in narrower("fp8")},
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
