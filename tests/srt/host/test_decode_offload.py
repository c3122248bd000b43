"""Decode servers that offload through SGLang's manager to our tier; a prefill server finds the pages."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from codec_oracle import LAYOUTS
from host_tier import host_bytes, slots
from pools import GUARD, device_pool, fill, rows

PAGE_SIZE = 4


class Request:
    """The fields of SGLang's request that the manager reads; a class because it keeps weak references."""

    rid, extra_key, cache_salt = "r", None, None

    def __init__(self, prompt, output):
        self.origin_input_ids, self.output_ids = prompt, output
        self.kv = SimpleNamespace(req_pool_idx=1)

    def finished(self):
        return False


@pytest.fixture
def manager_of(no_reserve, process_group, tmp_path, monkeypatch):
    from sglang.srt.disaggregation.decode_kvcache_offload_manager import DecodeKVCacheOffloadManager
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
    from sglang.srt.runtime_context import SpawnRanks, publish, restore_context, snapshot_context
    from sglang.srt.server_args import ServerArgs

    from sgl_kvpool.sglang_plugin import hook_groups

    hook_groups.apply(hook_groups.named("host tier"))
    before, made = snapshot_context(), []
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "store"))

    def build(pool, table, model_name="model"):
        args = ServerArgs(
            model_path="dummy", device="cpu", disaggregation_mode="decode", hicache_ratio=2.0,
            disaggregation_decode_enable_offload_kvcache=True, page_size=PAGE_SIZE,
            hicache_mem_layout="page_first", hicache_io_backend="kernel", hicache_storage_backend="file",
            served_model_name=model_name,
        )  # fmt: skip
        publish(args, role="scheduler", ranks=SpawnRanks(0, None, 0))
        allocator = PagedTokenToKVPoolAllocator(
            pool.size, page_size=PAGE_SIZE, dtype=pool.dtype, device="cpu", kvcache=pool, need_sort=False
        )
        tokens = SimpleNamespace(req_to_token=table)
        manager = DecodeKVCacheOffloadManager(tokens, allocator, process_group, tree_cache=None)
        made.append(manager.cache_controller)
        return manager

    yield build
    for controller in made:
        controller.detach_storage_backend()
    restore_context(before)


@pytest.mark.parametrize("arrangement", ["layer_major", "page_major"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prefill_server_finds_what_a_decode_server_offloaded(
    manager_of, controller_of, tmp_path, layout, arrangement
):
    from sgl_kvpool.srt.host.rows import HierarchicalMLAHostPool

    fill(pool := device_pool(layout, arrangement, pages=9))
    # 5 prompt tokens and 8 output tokens: pages 6 and 2 are offloaded, the prompt's first page is not.
    table = torch.zeros(2, 16, dtype=torch.int32)
    table[1] = slots([3, 6, 2, 7], PAGE_SIZE)
    manager = manager_of(pool, table)
    tier = manager.decode_host_mem_pool
    assert isinstance(tier, HierarchicalMLAHostPool)
    free = tier.available_size()
    request = Request(list(range(5)), list(range(5, 13)))
    assert manager.offload_kv_cache(request)
    for _ in range(500):
        manager.check_offload_progress()
        if not (manager.ongoing_offload or manager.ongoing_backup):
            break
        time.sleep(0.02)
    assert tier.available_size() == free

    keys = manager._compute_prefix_hash(request, list(range(12)))
    prefill = controller_of(device_pool(layout, pages=9), store=tmp_path / "store")
    assert prefill.storage_backend.batch_exists(keys[1:]) == 2
    there = prefill.mem_pool_host.anchor_entry.host_pool
    host_bytes(there)[...] = GUARD
    operation = SimpleNamespace(request_id="r", is_terminated=lambda: False)
    assert prefill._generic_page_get(operation, keys[1:], slots([5, 0], PAGE_SIZE)) == 2
    expected = np.full_like(host_bytes(there), GUARD)
    expected[[5, 0]] = np.stack(rows(pool), axis=1)[[6, 2]]
    assert np.array_equal(host_bytes(there), expected)


def test_names_too_long_for_files(manager_of):
    """The names of SGLang's plain controller are checked too, not only those of a hierarchical cache."""
    table = torch.zeros(2, 16, dtype=torch.int32)
    with pytest.raises(ValueError, match="--hicache-storage-backend file .* a shorter --served-model-name"):
        manager_of(device_pool("fp4", pages=9), table, model_name="m" * 200)
