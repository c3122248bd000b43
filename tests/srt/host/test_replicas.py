"""Ranks of one server: SGLang shares pages between them because MLA rows are the same on every rank.

Uses SGLang's own controllers and its `file` store, one per rank as its process would build them.
"""

import inspect
import os

import numpy as np
import pytest
import torch
from codec_oracle import LAYOUTS
from direct_stores import KEYS, Operation
from host_tier import LABELS, host_bytes, slots, tier_of
from pools import GUARD, LAYERS, START, device_pool, fill, memory, rows

PAGE_SIZE = 4
CHUNK_TOKENS = 2  # tokens of all layers: 6 rows of one layer


def files(store):
    return sorted(name for name in os.listdir(store) if name.endswith(".bin"))


def stored(controller, keys, pages):
    """Back up pages of the pool, then store them, on SGLang's threads; returns SGLang's completed tokens."""
    host_indices = controller.write(slots(pages, PAGE_SIZE))
    for ack in controller.ack_write_queue:
        ack.finish_event.synchronize()
    controller.ack_write_queue.clear()
    controller.write_storage(host_indices, list(range(len(host_indices))), hash_value=keys)
    return controller.ack_backup_queue.get(timeout=20).completed_tokens


def fetched(controller, keys, pages):
    host_bytes(tier_of(controller))[...] = GUARD
    hits = controller._generic_page_get(Operation(), keys, slots(pages, PAGE_SIZE))
    return hits, host_bytes(tier_of(controller))


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rank_0_writes_and_every_rank_reads(controller_of, store, layout, label):
    ranks, pools = [], []
    for rank in (0, 1):
        pools.append(pool := device_pool(layout, pages=9))
        fill(pool, seed=7)  # the same rows on both, as SGLang computes them
        ranks.append(controller_of(pool, label, store, rank=rank, tp_size=2))
    assert [(c.storage_config.tp_rank, c.storage_config.tp_size) for c in ranks] == [(0, 2), (1, 2)]
    assert all(c.storage_config.is_mla_model for c in ranks)
    assert [c.backup_skip for c in ranks] == [False, True]
    assert len({tier_of(c).storage_format_tag for c in ranks}) == 1

    assert stored(ranks[1], KEYS[:2], [3, 1]) == 0
    assert files(store) == []
    assert stored(ranks[0], KEYS[:2], [3, 1]) == 2 * PAGE_SIZE
    assert len(files(store)) == 2
    assert stored(ranks[1], KEYS[2:], [5, 6]) == 0
    assert len(files(store)) == 2

    wanted = np.stack(rows(pools[0]), axis=1)[[3, 1]]  # [pages, layers, tokens, bytes]
    for controller in ranks:
        assert controller.storage_backend.batch_exists(KEYS[:2]) == 2
        hits, found = fetched(controller, KEYS[:2], [5, 0])
        expected = np.full_like(found, GUARD)
        expected[[5, 0]] = wanted
        assert hits == 2
        assert np.array_equal(found, expected)


def test_host_pages_of_ranks_are_equal(controller_of, store):
    """With --kv-host-sharing rank, each rank keeps its own copy, so they use `tp_size` times the memory."""
    images = []
    for rank in (0, 1):
        fill(pool := device_pool("fp4", pages=9), seed=7)
        controller = controller_of(pool, store=store, rank=rank, tp_size=2)
        host_bytes(tier_of(controller))[...] = GUARD
        assert controller.write(slots([2, 8], PAGE_SIZE)) is not None
        for ack in controller.ack_write_queue:
            ack.finish_event.synchronize()
        images.append(host_bytes(tier_of(controller)).copy())
    assert np.array_equal(*images)
    assert (images[0] != GUARD).any()


def test_servers_of_other_tensor_parallel_sizes_share_a_store(controller_of, store):
    fill(pool := device_pool("fp4", pages=9))
    assert stored(controller_of(pool, store=store), KEYS, [1, 2, 3, 4]) == 4 * PAGE_SIZE
    wider = controller_of(device_pool("fp4", pages=9), store=store, rank=3, tp_size=4)
    assert fetched(wider, KEYS, [0, 1, 2, 3])[0] == 4


def test_stages_of_a_pipeline_have_names_of_their_own(controller_of, store):
    """The stages have different layers: both write, and neither reads the other's pages."""
    stages = []
    for rank in (0, 1):
        fill(pool := device_pool("fp4", pages=9, start_layer=START + rank * LAYERS), seed=rank)
        stages.append(controller_of(pool, store=store, rank=rank, pp_size=2))
    assert [c.storage_config.pp_rank for c in stages] == [0, 1]
    assert [c.backup_skip for c in stages] == [False, False]
    first, second = (tier_of(c).storage_format_tag for c in stages)
    assert f"-l{START}.{LAYERS}." in first
    assert f"-l{START + LAYERS}.{LAYERS}." in second
    assert stored(stages[0], KEYS[:1], [4]) == PAGE_SIZE
    assert [c.storage_backend.batch_exists(KEYS[:1]) for c in stages] == [1, 0]
    assert stored(stages[1], KEYS[:1], [4]) == PAGE_SIZE
    assert len(files(store)) == 2
    images = [fetched(c, KEYS[:1], [1])[1][1].copy() for c in stages]
    assert not np.array_equal(*images)


# -------------------------------------------------------------------- one copy on the host for all ranks


@pytest.fixture
def broadcasters(process_group, published):
    """`broadcasters(source, target)`: SGLang's class for two ranks, with the attributes of its constructor.

    A gloo group of this process replaces the NCCL group: its broadcast leaves the buffer unchanged, and both
    ranks share the buffer.
    """
    from sglang.srt.mem_cache.mla_host_dedup import MLAHostDedupBroadcaster

    def build(*pools):
        elements = LAYERS * CHUNK_TOKENS * pools[0].kv_cache_dim
        staging = torch.empty(elements, dtype=pools[0].kv_buffer[0].dtype)
        for rank, pool in enumerate(pools):
            broadcaster = object.__new__(MLAHostDedupBroadcaster)
            vars(broadcaster).update(
                device_pool=pool, group=process_group, src_global_rank=0, is_src=rank == 0,
                layer_num=pool.layer_num, device="cpu", chunk_tokens=CHUNK_TOKENS, idx_bufs=None,
                idx_elem=None, idx_staging=None, kv_staging=staging,
            )  # fmt: skip
            yield broadcaster

    return build


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sglangs_broadcast_of_loaded_rows(broadcasters, layout):
    """It indexes a layer by slot, so it copies whole rows of any layout in layer-major pools."""
    source, target = (device_pool(layout, page_size=PAGE_SIZE) for _ in range(2))
    fill(source, seed=5)
    for buffer in memory(target):
        buffer[...] = GUARD
    pages = [3, 1, 4], [2, 4, 1]  # pages of each rank for the same tokens
    ranks = list(broadcasters(source, target))
    rows_at_once = LAYERS * CHUNK_TOKENS  # one chunk: the target reads it right after the source
    for layer in range(LAYERS):
        for start in range(0, len(pages[0]) * PAGE_SIZE, rows_at_once):
            for rank, own in zip(ranks, pages, strict=True):
                some = slots(own, PAGE_SIZE)[start : start + rows_at_once]
                rank.broadcast_loaded_layer(layer, rank.prepare_broadcast(some, None))
    for sent, arrived in zip(rows(source), rows(target), strict=True):
        expected = np.full_like(arrived, GUARD)
        expected[pages[1]] = sent[pages[0]]
        assert np.array_equal(arrived, expected)


def test_sglangs_dedup_takes_other_rows_of_a_page_major_pool():
    """Refused for this reason; SGLang uses it only with `--enable-linker-mla-dedup`."""
    from sglang.srt.mem_cache import mla_host_dedup

    from sgl_kvpool.sglang_plugin.rules.features import LAYOUT_FEATURES

    refused = {feature.field for feature in LAYOUT_FEATURES}
    assert {"enable_linker_mla_dedup", "enable_unified_cache_external_linker"} <= refused
    assert "torch.index_select(layer_buf, 0, idx" in inspect.getsource(mla_host_dedup.MLAHostDedupBroadcaster)
    pool = device_pool("fp4", "page_major", page_size=PAGE_SIZE)
    where = pool.slot_to_row(slots([1], PAGE_SIZE))
    assert not torch.equal(where, slots([1], PAGE_SIZE).to(where.dtype))
