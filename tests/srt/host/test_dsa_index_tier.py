"""Index keys of models with sparse attention in a host tier: SGLang's own index-key pool beside our rows.

SGLang's pool takes capacity, page size and label from ours, and moves pages with CUDA kernels that it selects
by label and io backend. Copies on the CPU with the kernels' own arguments replace them (`kernels` of
conftest.py), so the tests cover SGLang's selection and the pages it would move.
"""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from codec_oracle import LAYOUTS
from host_tier import IO_BACKENDS, LABELS, host_pool, slots, stride_bytes
from pools import DSA_PAGE as PAGE
from pools import (
    GUARD,
    INDEX_BYTES,
    INDEX_PAGE_BYTES,
    LAYERS,
    assert_holds,
    copied,
    dsa_pool,
    dsa_row_bytes,
    fill,
    guard,
)
from test_dsa_tier import BIG, SHARED

pytestmark = pytest.mark.usefixtures("no_reserve")


# -------------------------------------------------------------------- index keys


EXPECTED = {
    "page_first": ["all_layer_mla_lf_pf", "per_layer_mla_pf_lf"],
    "page_first_direct": ["all_layer_direct_lf_pf", "per_layer_direct_pf_lf"],
}


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sglangs_pool_of_index_keys_takes_ours_for_its_anchor(kernels, layout, label):
    from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl

    pool = dsa_pool(layout, **SHARED)
    was = fill(pool)
    anchor = host_pool(pool, label)
    decl = make_dsa_indexer_pool_decl(pool)
    indexer = decl.host_pool_builder.build(
        decl=decl, anchor_host=anchor, allocator_type="default", packed_draft_device_pools=()
    )
    assert type(indexer) is DSAIndexerPoolHost
    assert (indexer.size, indexer.page_num, indexer.page_size) == (anchor.size, anchor.page_num, PAGE)
    assert (indexer.layout, indexer.layer_num) == (label, 2)
    assert indexer.get_size_per_token() == 2 * INDEX_BYTES
    host = indexer.index_k_with_scale_buffer.numpy().reshape(-1, 2, INDEX_PAGE_BYTES)
    assert len(host) >= anchor.page_num
    host[...] = GUARD

    lists = slots([0, 3], PAGE), slots([4, 1], PAGE)
    indexer.backup_from_device_all_layer(pool, *lists, IO_BACKENDS[label])
    expected = np.full_like(host, GUARD)
    for place, index in enumerate((0, 2)):
        expected[[0, 3], place] = was["index", index + 2][[4, 1]]
    assert np.array_equal(host, expected)
    guard(pool)
    for index in range(LAYERS):
        indexer.load_to_device_per_layer(pool, *lists, index, IO_BACKENDS[label])
    assert kernels == [EXPECTED[label][0], *[EXPECTED[label][1]] * 2]  # none for layer 3, without index keys
    for (what, _), part in was.items():
        part[[0, 2, 3] if what == "index" and len(part) else slice(None)] = GUARD
    assert_holds(pool, was)


@pytest.mark.parametrize(("label", "io_backend"), [("page_first", "direct"), ("page_first_direct", "kernel")])
def test_other_pairs_are_unknown_to_sglangs_pool(kernels, label, io_backend):
    """The reason why the tier keeps the requested label. At start, SGLang changes these pairs."""
    from sglang.srt.mem_cache.pool_host.dsa import make_dsa_indexer_pool_decl

    pool = dsa_pool("fp4", **BIG)
    decl = make_dsa_indexer_pool_decl(pool)
    indexer = decl.host_pool_builder.build(
        decl=decl, anchor_host=host_pool(pool, label), allocator_type="default", packed_draft_device_pools=()
    )
    lists = slots([0], PAGE), slots([1], PAGE)
    with pytest.raises(ValueError, match=f"Unsupported layout: {label}"):
        indexer.backup_from_device_all_layer(pool, *lists, io_backend)
    with pytest.raises(ValueError, match=f"Unsupported layout: {label}"):
        indexer.load_to_device_per_layer(pool, *lists, 0, io_backend)


# -------------------------------------------------------------------- rows and index keys together


@pytest.fixture
def stack_of(kernels, host_server, process_group):
    """`stack_of(pool, label, drafts)`: the pools that SGLang's strategy for DSA builds, with our hooks."""
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    def build(pool, label="page_first", drafts=()):
        args = host_server(
            page_size=PAGE, hicache_ratio=2.0, hicache_mem_layout=label, hicache_io_backend=IO_BACKENDS[label]
        )
        allocator = PagedTokenToKVPoolAllocator(
            pool.size, page_size=PAGE, dtype=pool.dtype, device="cpu", kvcache=pool, need_sort=False
        )
        params = SimpleNamespace(
            page_size=PAGE, mtp_draft_device_pools=drafts, token_to_kv_pool_allocator=allocator,
            tp_cache_group=process_group, attn_cp_cache_group=None, attn_tp_cache_group=None,
            pp_cache_group=None,
        )  # fmt: skip
        strategy = hybrid_pool_assembler._select_strategy(pool, {ComponentType.FULL})
        assert type(strategy).__name__ == "_DsaStrategy"
        result = strategy.build(
            cache=None, kvcache=pool, params=params, server_args=args, load_cache_event=threading.Event()
        )
        hybrid_pool_assembler._check_declared_pools_present(kvcache=pool, result=result, strategy=strategy)
        return result

    return build


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_and_index_keys_travel_together(stack_of, kernels, layout, label):
    """Through SGLang's queues, its lists for each pool and its submission, to other pages."""
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
    from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost

    from sgl_kvpool.srt.host.rows import HierarchicalMLAHostPool

    pool = dsa_pool(layout, **SHARED)
    result = stack_of(pool, label)
    entries = result.host_pool_group.entry_map
    assert {name: type(entry.host_pool) for name, entry in entries.items()} == {
        PoolName.KV: HierarchicalMLAHostPool, PoolName.INDEXER: DSAIndexerPoolHost,
    }  # fmt: skip
    assert result.host_pool_group.anchor_entry is entries[PoolName.KV]
    assert entries[PoolName.INDEXER].host_pool.page_num == entries[PoolName.KV].host_pool.page_num
    (sidecar,) = result.sidecars
    assert (sidecar.pool_name, sidecar.indices_from_pool) == (PoolName.INDEXER, PoolName.KV)

    def beside():
        """The transfer of index keys as the tree passes it; SGLang fills in the lists of the rows."""
        return [PoolTransfer(name=PoolName.INDEXER, indices_from_pool=PoolName.KV)]

    controller = result.cache_controller
    was = fill(pool)
    taken = controller.mem_pool_device_allocator.alloc(2 * PAGE)
    kept = controller.write(taken, node_id=1, extra_pools=beside())
    moved = 2 * (stride_bytes(LAYERS, PAGE, dsa_row_bytes(layout)) + PAGE * 2 * INDEX_BYTES)
    assert controller.ack_write_queue[0].num_bytes == moved
    guard(pool)
    wanted = copied(pool)
    found = controller.load(kept, node_id=1, extra_pools=beside())
    assert controller.start_loading() >= 0
    here, there = (each[::PAGE].div(PAGE, rounding_mode="floor").tolist() for each in (taken, found))
    assert not set(here) & set(there)
    for name, part in was.items():
        if len(part):
            wanted[name][there] = part[here]
    assert_holds(pool, wanted)
    assert kernels == [EXPECTED[label][0], *[EXPECTED[label][1]] * 2]


@pytest.mark.parametrize(("layout", "host"), [("bf16", "fp4"), ("fp8_block_scale", "fp4")])
def test_index_keys_beside_a_narrower_tier(stack_of, layout, host):
    """A narrower tier holds more tokens in the same bytes, and the index-key pool follows."""
    from sglang.srt.mem_cache.hicache_storage import PoolName

    from sgl_kvpool.transfer.host_options import HostTierOptions

    def sizes(options):
        pool = dsa_pool(layout, **options, **BIG)
        entries = stack_of(pool).host_pool_group.entry_map
        return [entries[name].host_pool for name in (PoolName.KV, PoolName.INDEXER)]

    same, _ = sizes({})
    narrower, indexer = sizes({"host_tier": HostTierOptions(layout=host)})
    ratio = dsa_row_bytes(layout) / dsa_row_bytes(host)
    assert narrower.page_num == int(2 * BIG["size"] * ratio) // PAGE + 1 > same.page_num
    assert (indexer.size, indexer.page_num) == (narrower.size, narrower.page_num)
    assert len(indexer.index_k_with_scale_buffer) >= narrower.page_num


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_drafts_have_rows_and_index_keys(stack_of, kernels, layout):
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    pool = dsa_pool(layout, **SHARED)
    draft = dsa_pool(layout, **{**BIG, "layer_num": 1})
    controller = (result := stack_of(pool, drafts=(draft,))).cache_controller
    entries = result.host_pool_group.entry_map
    assert entries[PoolName.KV].host_pool.layer_num == LAYERS + 1
    assert entries[PoolName.INDEXER].host_pool.layer_num == 2 + 1

    def beside():
        return [PoolTransfer(name=PoolName.INDEXER, indices_from_pool=PoolName.KV)]

    fill(pool)
    was = fill(draft, seed=1)
    taken = controller.mem_pool_device_allocator.alloc(PAGE)
    kept = controller.write(taken, node_id=1, extra_pools=beside())
    guard(draft)
    wanted = copied(draft)
    found = controller.load(kept, node_id=1, extra_pools=beside())
    controller.start_loading()
    here, there = int(taken[0]) // PAGE, int(found[0]) // PAGE
    for name, part in was.items():
        wanted[name][there] = part[here]
    assert_holds(draft, wanted)
