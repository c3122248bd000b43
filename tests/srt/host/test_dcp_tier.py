"""The host tier of one of several ranks that share a prefix pool (`--dcp-size`), and its pages in a store.

`two_ranks.py` has ranks that run together.
"""

import numpy as np
import pools
import pytest
import torch
from cases import crossed
from codec_oracle import LAYOUTS, narrower
from host_tier import LABELS, backup, host_bytes, host_pool, load, page_memory, tier_of
from model_kinds import KINDS, request_pool
from pools import ARRANGEMENTS, DSA_PAGE, GUARD, LAYERS, assert_holds, at, device_pool, dsa_pool, fill, guard
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler
from sglang.srt.mem_cache.pool_host import mla
from sglang.srt.mem_cache.unified_cache.components.mamba import MambaComponent
from test_dcp_pool import as_rank
from test_hybrid_stores import fetched, files, stored

from sgl_kvpool.srt.host import tier_bytes
from sgl_kvpool.srt.host.tier_bytes import TierBytes
from sgl_kvpool.srt.self_check import check_tier

PAGE = 4


def rank_of(rank, ranks, groups=1):
    """Arguments of a rank of a server with `groups` groups of `ranks` ranks."""
    return {"rank": rank, "tp_size": groups * ranks, "dcp_size": ranks}


@pytest.mark.parametrize(
    ("layout", "arrangement", "page", "label", "ranks"),
    crossed(LAYOUTS, ARRANGEMENTS, [PAGE, 1], LABELS, [2, 3]),
)
def test_a_rank_moves_the_rows_of_its_slots(controller_of, layout, arrangement, page, label, ranks):
    """Slot s is row s // ranks of rank s % ranks, on the device as on the host."""
    for rank in range(ranks):
        pool = device_pool(layout, arrangement, page, pages=9)
        controller = controller_of(pool, label, **rank_of(rank, ranks))
        tier, allocator = tier_of(controller), controller.mem_pool_device_allocator
        assert tier.logical_size == ranks * tier.size
        page_memory(tier)[...] = GUARD
        tier.alloc(page * ranks)  # so that a page has other numbers on the two sides
        before = fill(pool, seed=rank)
        taken = allocator.alloc(3 * page * ranks)
        kept = controller.write(taken, node_id=1)
        guard(pool)
        found = controller.load(kept, node_id=1)
        assert not set(found.tolist()) & set(taken.tolist())
        controller.start_loading()

        def own(listed, rank=rank):
            return listed[listed % ranks == rank] // ranks

        host = np.full_like(host_bytes(tier), GUARD)
        wanted = {name: np.full_like(part, GUARD) for name, part in before.items()}
        for index, (name, part) in enumerate(before.items()):
            rows = part[at(pool, own(taken))]
            wanted[name][at(pool, own(found))] = rows
            host[:, index][np.divmod(own(kept).numpy(), page)] = rows
        assert_holds(pool, wanted)
        assert np.array_equal(host_bytes(tier), host)


@pytest.mark.parametrize(
    ("kind", "layout", "host"),
    [
        *(("dense", layout, host) for layout in LAYOUTS for host in ("same", *narrower(layout))),
        *((kind, layout, "fp4") for kind in KINDS if "dense, " in kind for layout in ("fp4", "bf16")),
    ],
)
def test_prompts_come_back_from_the_host(model_of, kind, layout, host):
    for rank in range(3):
        model = model_of(kind, layout, host, PAGE, pages=16, **rank_of(rank, 3))
        assert model.page_size == 3 * PAGE
        prefix = list(range(3 * 3 * PAGE))
        one, other = prefix + list(range(100, 100 + 3 * PAGE)), prefix + list(range(200, 200 + 3 * PAGE))
        assert model.returned(one, other) == [len(one), len(other)]


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize(("layout", "ranks"), [("fp4", 2), ("fp8_block_scale", 8), ("bf16", 3)])
def test_a_page_of_a_sparse_target_and_its_draft(layout, ranks, no_reserve):
    """It has a rank's own rows of the target, all rows of the draft, and all index keys of both."""
    with as_rank(ranks - 1, ranks):
        target = dsa_pool(layout, size=4 * DSA_PAGE)
        page = ranks * DSA_PAGE
        draft = dsa_pool(layout, size=4 * page, page_size=page, layer_num=1, dcp_replicated=True)
        both = (target, draft)
        tier = host_pool(target, draft_pools=[draft])
        assert TierBytes.of(target, row_drafts=[draft]).rows == target.size * tier.get_size_per_token()
        filled = [fill(pool, seed=seed) for seed, pool in enumerate(both)]
        moved = [{3: 1, 1: 4}, {3: 2, 1: 3}]  # device pages by host pages: backed up, loaded
        backup(tier, *zip(*moved[0].items(), strict=True))
        for host, device in moved[0].items():
            keys = [layer.reshape(5, -1)[device] for pool in both for layer in pools.index_pages(pool)]
            parts = [*(layer[device] for pool in both for layer in pools.rows(pool)), *keys]
            content = np.concatenate([part.reshape(-1) for part in parts])
            assert np.array_equal(page_memory(tier)[host, : len(content)], content)
        guard(*both)
        wanted = [pools.copied(pool) for pool in both]
        for host, device in moved[1].items():
            for before, after in zip(filled, wanted, strict=True):
                for name, part in after.items():
                    part.reshape(5, -1)[device] = before[name].reshape(5, -1)[moved[0][host]]
        load(tier, *zip(*moved[1].items(), strict=True))
        load(tier, *zip(*moved[1].items(), strict=True), layers=[LAYERS], is_draft=True)
        for pool, expected in zip(both, wanted, strict=True):
            assert_holds(pool, expected)


def test_the_self_check_compares_a_ranks_rows_and_all_keys(controller_of):
    with as_rank(1, 2):
        pool = dsa_pool("fp4", size=8 * DSA_PAGE)
        controller = controller_of(pool, **rank_of(1, 2))
        assert check_tier(controller, lambda good: good) == "2 pages to the host tier and back"
        assert tier_of(controller).index_keys.shape[1] == 2 * LAYERS * DSA_PAGE * 132


def test_sglangs_host_pool_takes_one_ranks_part_of_a_packed_draft(host_server, kernels, monkeypatch):
    """So a draft is refused beside it: of a page, the rank has half of the rows, and the draft all."""
    host_server(page_size=PAGE, hicache_mem_layout="page_first", hicache_ratio=2.0, **rank_of(1, 2))
    target = device_pool("bf16", page_size=PAGE)
    draft = device_pool("bf16", page_size=2 * PAGE, layers=1, dcp_replicated=True)
    monkeypatch.setattr(tier_bytes, "has_our_tier", lambda pool: False)
    tier = hybrid_pool_assembler.build_kv_host_pool(
        kv_pool=target, page_size=2 * PAGE, use_mla=True, mtp_draft_device_pools=(draft,)
    )
    moved = []
    monkeypatch.setattr(
        mla, "transfer_kv_all_layer_mla_lf_pf", lambda **given: moved.append(given), raising=False
    )
    slots = torch.arange(2 * PAGE, 4 * PAGE)
    tier.backup_from_device_all_layer(target, slots, slots, "kernel")
    assert [given["num_layers"] for given in moved] == [LAYERS + 1]
    assert moved[0]["src_indices"].tolist() == (slots[1::2] // 2).tolist()


@pytest.mark.usefixtures("published")
def test_sglangs_tree_without_extra_states_takes_pages_of_one_token():
    """So no_buffer is refused for hybrid models: a page has a token of each rank."""
    params = CacheInitParams(
        disable=False, req_to_token_pool=request_pool(), token_to_kv_pool_allocator=None, page_size=2,
        enable_mamba_extra_buffer=False,
    )  # fmt: skip
    with pytest.raises(AssertionError, match="requires page_size=1 .*, got 2"):
        MambaComponent(None, params)


def test_lists_of_other_pages_are_a_miss(controller_of, failures, caplog):
    controller = controller_of(device_pool("fp4", pages=9), **rank_of(1, 2))
    kept = controller.write(controller.mem_pool_device_allocator.alloc(4 * PAGE), node_id=1)
    assert controller.load(kept[PAGE : 3 * PAGE], node_id=1) is None  # pages of one rank
    assert f"not the {2 * PAGE} slots of one page" in caplog.text
    assert failures() == {"load_pages": 1}
    assert controller.load(kept, node_id=1) is not None


def test_a_small_tier_is_named_in_sglangs_tokens(model_of, caplog):
    model_of("dense", page_size=PAGE, pages=24, ratio=0.5, **rank_of(1, 2))
    (line,) = [line for line in caplog.messages if "fill the tier" in line]
    assert "the host tier has 104 tokens and the device's pool 192" in line
    assert "--hicache-ratio of at least 1.00" in line


# -------------------------------------------------------------------- stores


def serving(model_of, store, rank, ranks, groups=1, page=PAGE, kind="dense"):
    return model_of(kind, page_size=page, store=store, **rank_of(rank, ranks, groups))


@pytest.mark.parametrize(
    ("kind", "page", "others"),
    [
        # Pages of as many tokens, and so with the same hashes.
        ("dense", PAGE, [(4, 1, PAGE // 2), (1, 1, 2 * PAGE), (2, 1, PAGE)]),
        # Index keys lie in pages of 64 tokens per rank.
        ("DSA", DSA_PAGE, [(1, 4, DSA_PAGE), (4, 1, DSA_PAGE), (2, 1, DSA_PAGE)]),
    ],
)
def test_a_restarted_server_finds_its_pages_and_another_size_misses(model_of, store, kind, page, others):
    """The ranks of the first group store; those of the second hold the same rows."""
    prompt = list(range(4 * page))
    for rank in range(4):
        stored(first := serving(model_of, store, rank, 2, 2, page, kind), prompt)
    assert len(files(store, False)) == 2 * 2
    for ranks, groups, size in others:
        other = serving(model_of, store, 0, ranks, groups, size, kind)
        assert other.page_size == ranks * size
        tag = other.tier.storage_format_tag.replace("-d0.", "-d1.")
        assert (tag == first.tier.storage_format_tag) == (ranks == 2)  # groups are in the store's own name
        assert fetched(other, prompt) == 0
        stored(other, prompt)
    for rank in range(4):
        assert fetched(serving(model_of, store, rank, 2, 2, page, kind), prompt) == len(prompt)


def test_rows_of_another_rank_are_not_taken(model_of, store, failures):
    """Two files that changed places."""
    prompt = list(range(2 * PAGE))
    for rank in range(2):
        stored(serving(model_of, store, rank, 2), prompt)
    (one,), (other,) = ([f for f in files(store, False) if f"_dcp{rank}_2" in f.name] for rank in range(2))
    first, second = one.read_bytes(), other.read_bytes()
    assert len(first) == len(second)
    one.write_bytes(second)
    other.write_bytes(first)
    for rank in range(2):
        assert fetched(serving(model_of, store, rank, 2), prompt) == 0
    assert failures() == {"page_checksum": 2}
