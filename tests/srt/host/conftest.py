"""Real HiCache controllers in this process, over host tiers of a megabyte."""

import atexit
import ctypes
import gc
import threading

import pytest

#: --hicache-storage-backend-extra-config of stores in a folder; prefixes of one token are fetched too.
STORE_CONFIGURATIONS = {
    "file": '{"prefetch_threshold": 1}',
    "nixl": '{"prefetch_threshold": 1, "plugin": {"posix": {"active": true}}, "use_direct_io": false}',
}


@pytest.fixture(scope="session")
def process_group():
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD


@pytest.fixture
def controller_of(no_reserve, published, process_group, tmp_path, monkeypatch):
    """`controller_of(pool, label=, store=)`: SGLang's controller for a pool, built by SGLang with our hooks.

    `store` is the folder of the `file` backend. Another controller over the same folder represents a
    restarted server or, with `rank`, another process of a server with `tp_size` or `pp_size`.
    """
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.hybrid_cache import hybrid_cache_controller, hybrid_pool_assembler
    from sglang.srt.runtime_context import (
        SpawnRanks,
        get_parallel,
        publish,
        restore_context,
        snapshot_context,
    )
    from sglang.srt.server_args import ServerArgs

    from sgl_kvpool.sglang_plugin import hook_groups

    hook_groups.apply(hook_groups.named("host tier, host tier of hybrid models"))
    before = snapshot_context()
    made = []

    def build(pool, label="page_first", store=None, model_name="model", io_backend=None, rank=0, **sizes):
        io_backend = io_backend or {"page_first": "kernel", "page_first_direct": "direct"}[label]
        args = ServerArgs(
            model_path="dummy", device="cpu", enable_hierarchical_cache=True, hicache_ratio=2.0,
            page_size=pool.page_size, hicache_mem_layout=label, hicache_io_backend=io_backend,
            hicache_storage_backend=store and "file", served_model_name=model_name, **sizes,
        )  # fmt: skip
        get_parallel().clear_stamp()  # set for the previous controller
        publish(args, role="scheduler", ranks=SpawnRanks(rank, None, 0))
        if store:
            monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(store))
        allocator = PagedTokenToKVPoolAllocator(
            pool.size, page_size=pool.page_size, dtype=pool.dtype, device="cpu", kvcache=pool, need_sort=False
        )
        group = hybrid_pool_assembler.build_kv_only_group(
            page_size=pool.page_size, kv_pool=pool, use_mla=True,
            full_layer_mapping={layer: layer for layer in range(pool.layer_num)},
        )  # fmt: skip
        controller = hybrid_cache_controller.HybridCacheController(
            allocator, group, pool.page_size, process_group, threading.Event(), write_policy="write_through",
            io_backend=io_backend, storage_backend=store and "file", model_name=model_name,
            transfer_layer_id_max=pool.layer_num,
        )  # fmt: skip
        made.append(controller)
        return controller

    yield build
    for controller in made:
        if controller.enable_storage:
            controller.detach_storage_backend()
    get_parallel().clear_stamp()  # SGLang's restore leaves the rank
    publish(published, role="scheduler", ranks=SpawnRanks(0, None, 0))
    restore_context(before)


@pytest.fixture
def direct(controller_of):
    """`direct(layout, page_size=)`: a controller over a `MemoryStore` of direct_stores.py."""
    from direct_stores import MemoryStore, tier_of
    from host_tier import device_pool

    undo = []

    def build(layout, page_size=4, store=None, whole_batches=False, **extra):
        controller = controller_of(device_pool(layout, page_size=page_size, pages=9, **extra))
        store = store or MemoryStore(tier_of(controller), whole_batches)
        store.tier = tier_of(controller)
        controller.storage_backend, controller.storage_host_pool = store, tier_of(controller)
        undo.append(controller)
        return controller

    yield build
    for controller in undo:
        controller.storage_backend = None


@pytest.fixture
def kernels(monkeypatch):
    """Replaces CUDA kernels of SGLang's index-key pool by CPU copies; a list of the kernels called."""
    from sglang.srt.mem_cache.pool_host import common
    from sglang.srt.mem_cache.pool_host import dsa as pool_host

    called = []

    def item_copies(target, target_stride, source, source_stride, targets, sources, size):
        for there, here in zip(targets.tolist(), sources.tolist(), strict=True):
            ctypes.memmove(target + there * target_stride, source + here * source_stride, size)

    def transfer_kv_per_layer_mla_pf_lf(
        *, src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim
    ):
        called.append("per_layer_mla_pf_lf")
        begin = src.data_ptr() + layer_id * item_size
        item_copies(dst.data_ptr(), item_size, begin, src_layout_dim, dst_indices, src_indices, item_size)

    def transfer_kv_all_layer_mla_lf_pf(
        *, src_layers, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers
    ):
        called.append("all_layer_mla_lf_pf")
        assert num_layers == len(src_layers)
        for index, source in enumerate(src_layers.tolist()):
            begin = dst.data_ptr() + index * item_size
            item_copies(begin, dst_layout_dim, source, item_size, dst_indices, src_indices, item_size)

    def transfer_kv_per_layer_direct_pf_lf(
        *, src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size
    ):
        called.append("per_layer_direct_pf_lf")
        assert page_size == 1
        (source,), (target,) = src_ptrs, dst_ptrs
        target[dst_indices] = source[src_indices, layer_id].view(len(src_indices), -1)

    def transfer_kv_all_layer_direct_lf_pf(*, src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
        called.append("all_layer_direct_lf_pf")
        assert page_size == 1
        (target,) = dst_ptrs
        for index, source in enumerate(src_ptrs):
            target[dst_indices, index, 0] = source[src_indices]

    for kernel in (
        transfer_kv_per_layer_mla_pf_lf, transfer_kv_all_layer_mla_lf_pf,
        transfer_kv_per_layer_direct_pf_lf, transfer_kv_all_layer_direct_lf_pf,
    ):  # fmt: skip
        monkeypatch.setattr(pool_host, kernel.__name__, kernel, raising=False)
    # SGLang's pool of index keys pins its memory whatever the device.
    monkeypatch.setattr(common, "_cuda_host_register", lambda *args: None)
    return called


@pytest.fixture
def hybrid_of(no_reserve, published, process_group, monkeypatch):
    """`hybrid_of(layout, ...)`: a `Model` of hybrid_tier.py, built by SGLang with our hooks."""
    import hybrid_tier
    from sglang.srt.runtime_context import (
        SpawnRanks,
        get_parallel,
        publish,
        restore_context,
        snapshot_context,
    )
    from sglang.srt.server_args import ServerArgs

    from sgl_kvpool.sglang_plugin import hook_groups

    hook_groups.apply(hook_groups.named("host tier, host tier of hybrid models"))
    before = snapshot_context()
    made, in_gigabytes = [], []

    def build(
        layout="fp4", states="kda", arrangement="layer_major", page_size=1, *, tokens=32, slots=6,
        label="page_first", store=None, sizes=None, policy="write_through", tree=None, drafts=(),
        backend="file", **extra,
    ):  # fmt: skip
        args = ServerArgs(
            model_path="dummy", device="cpu", enable_hierarchical_cache=True, page_size=page_size,
            hicache_mem_layout=label, hicache_write_policy=policy,
            hicache_io_backend={"page_first": "kernel", "page_first_direct": "direct"}[label],
            hicache_storage_backend=store and backend, served_model_name="model",
            hicache_storage_backend_extra_config=store and STORE_CONFIGURATIONS[backend],
            hicache_storage_prefetch_policy="wait_complete", **(sizes or {"hicache_ratio": 2.0}),
        )  # fmt: skip
        get_parallel().clear_stamp()
        publish(args, role="scheduler", ranks=SpawnRanks(0, None, 0))
        if store:
            monkeypatch.setenv(f"SGLANG_HICACHE_{backend.upper()}_BACKEND_STORAGE_DIR", str(store))
        requests = hybrid_tier.request_pool(states, slots)
        pool = hybrid_tier.hybrid_pool(
            layout, requests.mamba_pool, arrangement, page_size, tokens * page_size, **extra
        )
        packed = [
            hybrid_tier.draft_pool(
                kind, layout, requests.mamba_pool, page_size, tokens * page_size, extra.get("sparse", False)
            )
            for kind in drafts
        ]
        model = hybrid_tier.make_model(
            args, process_group, pool, requests, page_size, monkeypatch, tree, packed
        )
        made.append(model)
        in_gigabytes.extend(sizes or ())
        return model

    yield build
    for model in made:
        if model.controller.enable_storage:
            model.controller.detach_storage_backend()
        # SGLang's registration would keep the tiers until the last test has ended.
        atexit.unregister(model.cache.shutdown)
    if in_gigabytes:
        made.clear()
        del model
        gc.collect()
    get_parallel().clear_stamp()
    publish(published, role="scheduler", ranks=SpawnRanks(0, None, 0))
    restore_context(before)
