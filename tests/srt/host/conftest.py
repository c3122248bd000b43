"""Real HiCache controllers in this process, over host tiers of a megabyte."""

import atexit
import ctypes
import gc
import threading
from types import SimpleNamespace

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
    from host_tier import controller_over
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
        controller = controller_over(pool, process_group, io_backend, store and "file", model_name)
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
    """Replaces CUDA kernels of SGLang's host pools by CPU copies; a list of those called for index keys."""
    from sglang.srt.mem_cache.pool_host import common, mha
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

    def transfer_kv_per_layer_pf_lf(
        *, src_k, dst_k, src_v, dst_v, src_indices, dst_indices, layer_id, item_size, src_layout_dim
    ):
        for there, here in ((dst_k, src_k), (dst_v, src_v)):
            begin = here.data_ptr() + layer_id * item_size
            item_copies(
                there.data_ptr(), item_size, begin, src_layout_dim, dst_indices, src_indices, item_size
            )

    def transfer_kv_all_layer_lf_pf(
        *, src_k_layers, dst_k, src_v_layers, dst_v, src_indices, dst_indices, item_size, dst_layout_dim,
        num_layers,
    ):  # fmt: skip
        for there, layers in ((dst_k, src_k_layers), (dst_v, src_v_layers)):
            assert num_layers == len(layers)
            for index, source in enumerate(layers.tolist()):
                begin = there.data_ptr() + index * item_size
                item_copies(begin, dst_layout_dim, source, item_size, dst_indices, src_indices, item_size)

    for kernel in (transfer_kv_per_layer_pf_lf, transfer_kv_all_layer_lf_pf):
        monkeypatch.setattr(mha, kernel.__name__, kernel, raising=False)
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


@pytest.fixture
def every(no_reserve, published, process_group, kernels, monkeypatch):
    """`every(kind, ...)`: an `EveryByte` of every_model.py, built by SGLang with our hooks.

    `automatic`: the arguments name no ratio, so that SGLang chooses 2 and lowers it.
    """
    from every_model import KINDS, build
    from sglang.srt.arg_groups import overrides
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
    before, made = snapshot_context(), []

    def model(
        kind,
        layout="fp4",
        host=None,
        page_size=64,
        tree="rust",
        pages=16,
        slots=8,
        ratio=2.0,
        automatic=False,
        store=None,
    ):
        args = ServerArgs(
            model_path="dummy", device="cpu", enable_hierarchical_cache=True, page_size=page_size,
            hicache_mem_layout="page_first", hicache_io_backend="kernel",
            hicache_write_policy="write_through", hicache_ratio=None if automatic else ratio,
            hicache_storage_backend=store and "file", served_model_name="model",
            hicache_storage_backend_extra_config=store and STORE_CONFIGURATIONS["file"],
            hicache_storage_prefetch_policy="wait_complete",
        )  # fmt: skip
        get_parallel().clear_stamp()
        publish(args, role="scheduler", ranks=SpawnRanks(0, None, 0))
        if store:
            monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(store))
        # The chunk size of the model's kernels; there is no model config to derive it from.
        monkeypatch.setattr(overrides, "mamba_cache_chunk_size", lambda args: page_size)
        with get_parallel().override(world_group=SimpleNamespace(cpu_group=process_group)):
            found = build(
                KINDS[kind], args, process_group, layout, host or layout, page_size, pages, slots, tree
            )
        made.append(found)
        return found

    yield model
    for each in made:
        if each.controller.enable_storage:
            each.controller.detach_storage_backend()
        atexit.unregister(each.cache.shutdown)
    get_parallel().clear_stamp()
    publish(published, role="scheduler", ranks=SpawnRanks(0, None, 0))
    restore_context(before)


@pytest.fixture
def dense_of(no_reserve, published, process_group, monkeypatch):
    """`dense_of(pages, ...)`: a `DenseModel` over a pool of `pages` pages, built by SGLang with our hooks."""
    from types import SimpleNamespace

    from dense_model import DenseModel
    from host_tier import device_pool
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.hicache_auto_size import auto_size_hicache
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
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

    def build(pages, folder=None, attached=False, layout="fp4", page_size=4, tree=None, **arguments):
        """`folder` is that of the `file` store, which the server gets at start if it is `attached`."""
        args = ServerArgs(
            model_path="dummy", device="cpu", enable_hierarchical_cache=True, page_size=page_size,
            hicache_storage_backend="file" if attached else None, served_model_name="model",
            hicache_storage_backend_extra_config=STORE_CONFIGURATIONS["file"] if attached else None,
            hicache_storage_prefetch_policy="wait_complete", **arguments,
        )  # fmt: skip
        args.resolve_once()
        get_parallel().clear_stamp()
        publish(args, role="scheduler", ranks=SpawnRanks(0, None, 0))
        if folder is not None:
            monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(folder))
        pool = device_pool(layout, page_size=page_size, pages=pages + 1, start_layer=0)
        allocator = PagedTokenToKVPoolAllocator(
            pool.size, page_size=page_size, dtype=pool.dtype, device="cpu", kvcache=pool, need_sort=False
        )
        params = CacheInitParams(
            disable=False, req_to_token_pool=SimpleNamespace(size=4), token_to_kv_pool_allocator=allocator,
            page_size=page_size, tree_components=(ComponentType.FULL,), tp_cache_group=process_group,
            tree_core_backend=tree,
        )  # fmt: skip
        cache = UnifiedRadixCache(params)
        world = SimpleNamespace(cpu_group=process_group)
        with get_parallel().override(world_group=world), auto_size_hicache(params, None, enabled=True):
            cache.init_hicache(args, params)
        cache.load_back_threshold = 1
        assert isinstance(cache.load_cache_event, type(threading.Event()))
        made.append(DenseModel(cache, pool, page_size))
        return made[-1]

    yield build
    for model in made:
        if model.controller.enable_storage:
            model.controller.detach_storage_backend()
        # SGLang's registration would keep the tiers until the last test has ended.
        atexit.unregister(model.cache.shutdown)
    get_parallel().clear_stamp()
    publish(published, role="scheduler", ranks=SpawnRanks(0, None, 0))
    restore_context(before)
