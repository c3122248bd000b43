"""SGLang's kit for tests of its radix tree, `sglang.test.kits.unified_radix_cache`, over our pools.

SGLang's wheel has it for the tree in Python only; test_every_model.py has the tree in Rust.
"""

import unittest
from functools import partial

import numpy as np
import pools
import pytest
import torch
from codec_oracle import LAYOUTS

#: Mode of the host's memory, layout, arrangement, page size, and whether the model is hybrid.
CASES = [
    (mode, layout, pools.ARRANGEMENTS[(s + 2 * n) % 3], [1, 4, 64][(s + n) % 3], bool((n + s) % 2))
    for s, mode in enumerate(["cache", "buffer_only"])
    for n, layout in enumerate(LAYOUTS)
]


def steps(layout, arrangement, page, hybrid):
    """The kit's steps for such caches, and ours."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.test.kits.unified_radix_cache import fixtures
    from sglang.test.kits.unified_radix_cache.config import CacheConfig
    from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures

    class Steps(UnifiedRadixCacheStorageFixtures, unittest.TestCase):
        cfg = CacheConfig(
            page_size=page, kv_size=16 * page, num_layers=5, full_attention_layer_ids=(1, 4),
            components=(ComponentType.FULL, ComponentType.MAMBA)[: 1 + hybrid], mamba_cache_size=60,
            enable_mamba_extra_buffer=hybrid,
        )  # fmt: skip

        def pool(self, *, size, mamba_pool=None, **_):
            mixed = partial(pools.hybrid_pool, layers=[1, 4], mamba_pool=mamba_pool)
            make = mixed if hybrid else pools.device_pool
            return make(layout, arrangement, page_size=page, size=size, start_layer=0)

        match = staticmethod(fixtures.match_prefix)

        def cache(self):
            return fixtures.build_fixture(self.cfg)[0]

        # The kit writes and reads keys and values; packed rows have none.

        def _fill_full_kv(self, allocator, indices, marker):
            pool, generator = allocator.get_kvcache(), np.random.default_rng(marker)
            for rows in pools.rows(pool):
                rows[pools.at(pool, indices)] = generator.integers(0, 256, (len(indices), rows.shape[-1]))

        def _snapshot_full_kv(self, allocator, indices):
            pool = allocator.get_kvcache()
            found = [rows[pools.at(pool, indices)] for rows in pools.rows(pool)]
            return (torch.from_numpy(np.concatenate(found, axis=1)),) * 2

        def _init_buffer_hicache(self, cache, storage_dir, mode="buffer_only"):  # the kit's has no states
            store = {"storage_backend": "file", "storage_dir": storage_dir, "prefetch_threshold": 1}
            self._init_hicache(cache, host_memory_mode=mode, **store)

        def place(self, cache, tokens):
            """Last node of a prompt, its slots on the device, and where its state is."""
            leaf = self.match(cache, tokens).last_device_node
            slots = cache.path_device_indices(leaf)
            assert len(slots) == len(tokens)
            state = fixtures.node_device_value(cache, leaf, ComponentType.MAMBA)
            parts = pools.state_tensors(cache.req_to_token_pool.mamba_pool) if hybrid else []
            return leaf, slots, [part[:, int(state)] for part in parts]

        def bytes_of(self, cache, tokens):
            _, slots, states = self.place(cache, tokens)
            rows, _ = self._snapshot_full_kv(cache.token_to_kv_pool_allocator, slots)
            return [part.tobytes() for part in (rows.numpy(), *states)]

        def compute(self, cache, tokens):
            had = self.match(cache, tokens).full_kv_hit_length
            self._insert(cache, cache.token_to_kv_pool_allocator, cache.req_to_token_pool, tokens)
            _, slots, states = self.place(cache, tokens)
            self._fill_full_kv(cache.token_to_kv_pool_allocator, slots[had:], tokens[-1])
            for part in states:
                part[...] = np.random.default_rng(tokens[-1]).integers(0, 256, part.shape)
            return self.bytes_of(cache, tokens)

        def load(self, cache, tokens):
            self._load_back_through_admission(cache, cache.req_to_token_pool, tokens)
            self._finish_pending_loads(cache)
            return self.bytes_of(cache, tokens)

    return Steps()


@pytest.fixture
def kit(host_server, kernels, monkeypatch, request):
    """`kit(*case, hicache_ratio=)`: `steps` over caches on a CPU, with our hooks and a server's allocator."""
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
    from sglang.srt.server_args import ServerArgs
    from sglang.test.kits.unified_radix_cache import fixtures, mixins

    def make(layout, arrangement, page, hybrid, **arguments):
        host_server(page_size=page)
        on = steps(layout, arrangement, page, hybrid)
        request.addfinalizer(on.doCleanups)
        on_cpu = partial(ServerArgs, device="cpu", enable_hierarchical_cache=True, **arguments)
        monkeypatch.setattr(fixtures, "HybridLinearKVPool" if hybrid else "MHATokenToKVPool", on.pool)
        paged = partial(PagedTokenToKVPoolAllocator, page_size=page)
        for name, value in (("TokenToKVPoolAllocator", paged), ("get_device", lambda: "cpu")):
            monkeypatch.setattr(fixtures, name, value)
        for module in (fixtures, mixins):
            monkeypatch.setattr(module, "ServerArgs", on_cpu)
        return on

    return make


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
def test_prompts_come_back_from_a_store(kit, case):
    """With `buffer_only` the host keeps no page: requests get them on the device when they are admitted."""
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

    mode, on = case[0], kit(*case[1:], hicache_ratio=2.0)
    folder, tokens, first, again = on._make_storage_dir(), on._make_seq(1, 4), on.cache(), on.cache()
    on._init_buffer_hicache(first, folder, mode)
    free, wanted = on._host_avail_sizes(first), on.compute(first, tokens)
    leaf, *_ = on.place(first, tokens)
    if mode == "buffer_only":
        on._buffer_backup_and_wait(first, leaf)
    else:
        on._backup_node(first, leaf)
        on._write_path_to_l3(first, leaf)
        on._flush_l3_backups(first)
    on._init_buffer_hicache(again, folder, mode)
    pools.guard(again.token_to_kv_pool_allocator.get_kvcache())
    on._consume_prefetch(again, tokens, CacheRequestHandle("r", 0))
    assert (on.bytes_of if mode == "buffer_only" else on.load)(again, tokens) == wanted
    again.sanity_check()
    if mode == "buffer_only":
        assert on._host_avail_sizes(first) == on._host_avail_sizes(again) == free
        # SGLang's own test: another request computes the first page meanwhile.
        on._assert_sibling_head_is_trimmed(on._make_storage_dir(), on._make_seq(5000, 4), False)
