"""Real HiCache controllers in this process, over host tiers of a megabyte."""

import atexit
import ctypes
import gc

import pytest
from model_kinds import KINDS, pool_of, publish_server, request_pool
from tree_model import build


@pytest.fixture
def host_server(no_reserve, published, kept_context, monkeypatch):
    """`host_server(...)`: `publish_server`, with our hooks; SGLang's context is put back at the end."""
    from sgl_kvpool.sglang_plugin import hook_groups

    hook_groups.apply(hook_groups.named("host tier, host tier of hybrid models"))
    return lambda **arguments: publish_server(monkeypatch, **arguments)


@pytest.fixture
def store(tmp_path):
    """Folder of a store; SGLang makes it."""
    return tmp_path / "store"


@pytest.fixture
def controller_of(host_server, process_group):
    """`controller_of(pool, label=, store=)`: SGLang's controller for a pool, built by SGLang with our hooks.

    `store` is the folder of the `file` backend. Another controller over the same folder represents a
    restarted server or, with `rank`, another process of a server with `tp_size` or `pp_size`.
    """
    from host_tier import IO_BACKENDS, controller_over

    made = []

    def make(pool, label="page_first", store=None, model_name="model", io_backend=None, **arguments):
        io_backend = io_backend or IO_BACKENDS[label]
        host_server(
            page_size=pool.page_size, store=store, model_name=model_name, hicache_ratio=2.0,
            hicache_mem_layout=label, hicache_io_backend=io_backend, **arguments,
        )  # fmt: skip
        made.append(controller_over(pool, process_group, io_backend, store and "file", model_name))
        return made[-1]

    yield make
    for controller in made:
        if controller.enable_storage:
            controller.detach_storage_backend()


@pytest.fixture
def direct(controller_of):
    """`direct(layout, page_size=)`: a controller over a `MemoryStore` of direct_stores.py."""
    from direct_stores import MemoryStore
    from host_tier import tier_of
    from pools import device_pool

    undo = []

    def build(layout, page_size=4, store=None, whole_batches=False, server=None, **extra):
        pool = device_pool(layout, page_size=page_size, pages=9, **extra)
        controller = controller_of(pool, **(server or {}))
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
    """Replaces CUDA kernels of SGLang's host pools by CPU copies."""
    from sglang.srt.mem_cache.pool_host import common, mha
    from sglang.srt.mem_cache.pool_host import dsa as pool_host

    def item_copies(target, target_stride, source, source_stride, targets, sources, size):
        for there, here in zip(targets.tolist(), sources.tolist(), strict=True):
            ctypes.memmove(target + there * target_stride, source + here * source_stride, size)

    def transfer_kv_per_layer_mla_pf_lf(
        *, src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim
    ):
        begin = src.data_ptr() + layer_id * item_size
        item_copies(dst.data_ptr(), item_size, begin, src_layout_dim, dst_indices, src_indices, item_size)

    def transfer_kv_all_layer_mla_lf_pf(
        *, src_layers, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers
    ):
        assert num_layers == len(src_layers)
        for index, source in enumerate(src_layers.tolist()):
            begin = dst.data_ptr() + index * item_size
            item_copies(begin, dst_layout_dim, source, item_size, dst_indices, src_indices, item_size)

    def transfer_kv_per_layer_direct_pf_lf(
        *, src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size
    ):
        assert page_size == 1
        (source,), (target,) = src_ptrs, dst_ptrs
        target[dst_indices] = source[src_indices, layer_id].view(len(src_indices), -1)

    def transfer_kv_all_layer_direct_lf_pf(*, src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
        assert page_size == 1
        (target,) = dst_ptrs
        for index, source in enumerate(src_ptrs):
            target[dst_indices, index, 0] = source[src_indices]

    for kernel in (
        transfer_kv_per_layer_mla_pf_lf, transfer_kv_all_layer_mla_lf_pf,
        transfer_kv_per_layer_direct_pf_lf, transfer_kv_all_layer_direct_lf_pf,
    ):  # fmt: skip
        monkeypatch.setattr(pool_host, kernel.__name__, kernel, raising=False)

    def transfer_kv_per_layer_pf_lf(*, src_k, dst_k, src_v, dst_v, **rest):
        transfer_kv_per_layer_mla_pf_lf(src=src_k, dst=dst_k, **rest)
        transfer_kv_per_layer_mla_pf_lf(src=src_v, dst=dst_v, **rest)

    def transfer_kv_all_layer_lf_pf(*, src_k_layers, dst_k, src_v_layers, dst_v, **rest):
        transfer_kv_all_layer_mla_lf_pf(src_layers=src_k_layers, dst=dst_k, **rest)
        transfer_kv_all_layer_mla_lf_pf(src_layers=src_v_layers, dst=dst_v, **rest)

    for kernel in (transfer_kv_per_layer_pf_lf, transfer_kv_all_layer_lf_pf):
        monkeypatch.setattr(mha, kernel.__name__, kernel, raising=False)
    # SGLang's pool of index keys pins its memory whatever the device.
    monkeypatch.setattr(common, "_cuda_host_register", lambda *args: None)


@pytest.fixture
def model_of(host_server, process_group, kernels):
    """`model_of(kind, ...)`: a `Model` of tree_model.py, built by SGLang with our hooks.

    `pages` and `slots` are those of the device; `states` names the states of a hybrid model.
    """
    from host_tier import IO_BACKENDS

    from sgl_kvpool.transfer.host_options import HostTierOptions

    made, large = [], False

    def make(
        kind, layout="fp4", host="same", page_size=1, *, pages=32, slots=6, states="kda", tree=None,
        arrangement="layer_major", label="page_first", ratio=2.0, **arguments,
    ):  # fmt: skip
        nonlocal large
        kind = KINDS[kind]
        if "hicache_size" not in arguments:
            arguments["hicache_ratio"] = ratio
        large |= "hicache_size" in arguments
        args = host_server(
            page_size=page_size, hicache_mem_layout=label, hicache_io_backend=IO_BACKENDS[label], **arguments
        )
        requests = request_pool(states, slots) if kind.hybrid else None
        options = {"host_tier": HostTierOptions(layout="same" if host == layout else host)}
        given = (kind, layout, page_size, pages, requests)
        pool = pool_of(*given, arrangement=arrangement, **options)
        # Drafts keep layer_major, whatever the target's arrangement.
        packed, own = (
            tuple(pool_of(*given, draft=draft, **({} if draft == "heads" else options)) for draft in drafts)
            for drafts in (kind.packed, [kind.own] if kind.own else [])
        )
        made.append(build(args, {"tp_cache_group": process_group}, pool, requests, packed, own, tree))
        return made[-1]

    yield make
    for model in made:
        if model.controller.enable_storage:
            model.controller.detach_storage_backend()
        # SGLang's registration would keep the tiers until the last test has ended.
        atexit.unregister(model.cache.shutdown)
    if large:
        made.clear()
        del model
        gc.collect()
