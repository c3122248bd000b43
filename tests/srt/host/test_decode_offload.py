"""Decode servers that offload through SGLang's manager to our tier; a prefill server finds the pages."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from codec_oracle import LAYOUTS
from host_tier import page_memory, slots, until
from pools import GUARD, device_pool, dsa_pool, fill, index_pages, rows
from sglang.srt.disaggregation.decode_kvcache_offload_manager import DecodeKVCacheOffloadManager
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs

from sgl_kvpool.sglang_plugin import hook_groups
from sgl_kvpool.srt.host.rows import HierarchicalMLAHostPool

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
def manager_of(no_reserve, kept_context, process_group, tmp_path, monkeypatch):
    hook_groups.apply(hook_groups.named("host tier"))
    made = []
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "store"))

    def build(pool, table, model_name="model"):
        args = ServerArgs(
            model_path="dummy", device="cpu", disaggregation_mode="decode", hicache_ratio=2.0,
            disaggregation_decode_enable_offload_kvcache=True, page_size=pool.page_size,
            hicache_mem_layout="page_first", hicache_io_backend="kernel", hicache_storage_backend="file",
            served_model_name=model_name,
        )  # fmt: skip
        publish(args, role="scheduler", ranks=SpawnRanks(0, None, 0))
        allocator = PagedTokenToKVPoolAllocator(
            pool.size, page_size=pool.page_size, dtype=pool.dtype, device="cpu", kvcache=pool, need_sort=False
        )
        tokens = SimpleNamespace(req_to_token=table)
        manager = DecodeKVCacheOffloadManager(tokens, allocator, process_group, tree_cache=None)
        made.append(manager.cache_controller)
        return manager

    yield build
    for controller in made:
        controller.detach_storage_backend()


def dense(layout, arrangement="layer_major"):
    return device_pool(layout, arrangement, PAGE_SIZE, pages=9)


def sparse(layout):
    return dsa_pool(layout, size=8 * 64, skip_topk_layers=[False, True, False])


MADE = [(layout, (dense, where)) for layout in LAYOUTS for where in ("layer_major", "page_major")]


@pytest.mark.parametrize(("layout", "made"), [*MADE, ("fp4", (sparse,))])
def test_a_prefill_server_finds_what_a_decode_server_offloaded(
    manager_of, controller_of, tmp_path, layout, made
):
    """With the index keys of a sparse model."""
    make, *arrangement = made
    fill(pool := make(layout, *arrangement))
    for number, keys in enumerate(index_pages(pool)):
        keys[...] = np.arange(9, dtype=np.uint8)[: len(keys), None] + 16 * number
    # A page and a token of the prompt and two pages of output: pages 6 and 2 are offloaded, the first is not.
    page_size = pool.page_size
    table = torch.zeros(2, 4 * page_size, dtype=torch.int32)
    table[1] = slots([3, 6, 2, 7], page_size)
    manager = manager_of(pool, table)
    tier = manager.decode_host_mem_pool
    assert isinstance(tier, HierarchicalMLAHostPool)
    free = tier.available_size()
    request = Request(list(range(page_size + 1)), list(range(page_size + 1, 3 * page_size + 1)))
    assert manager.offload_kv_cache(request)
    until(lambda: manager.check_offload_progress() or not (manager.ongoing_offload or manager.ongoing_backup))
    assert tier.available_size() == free

    keys = manager._compute_prefix_hash(request, list(range(3 * page_size)))
    prefill = controller_of(make(layout), store=tmp_path / "store")
    assert prefill.storage_backend.batch_exists(keys[1:]) == 2
    there = prefill.mem_pool_host.anchor_entry.host_pool
    found = page_memory(there)[:, : there.page_bytes]
    found[...] = GUARD
    operation = SimpleNamespace(request_id="r", is_terminated=lambda: False)
    assert prefill._generic_page_get(operation, keys[1:], slots([5, 0], page_size)) == 2
    expected = np.full_like(found, GUARD)
    parts = [part for part in (*rows(pool), *index_pages(pool)) if len(part)]
    expected[[5, 0]] = np.concatenate([part[[6, 2]].reshape(2, -1) for part in parts], axis=1)
    assert np.array_equal(found, expected)


def test_names_too_long_for_files(manager_of):
    """The names of SGLang's plain controller are checked too, not only those of a hierarchical cache."""
    table = torch.zeros(2, 16, dtype=torch.int32)
    with pytest.raises(ValueError, match="--hicache-storage-backend file .* a shorter --served-model-name"):
        manager_of(device_pool("fp4", pages=9), table, model_name="m" * 200)
