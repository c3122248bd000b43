"""Host tiers of small real pools; the bytes of pool and tier are found with numpy alone."""

import math
import threading
import time

import torch
from pools import GUARD, LAYERS

#: Labels of SGLang's host pools, with an io backend that SGLang's argument check leaves beside them.
IO_BACKENDS = {"page_first": "kernel", "page_first_direct": "direct"}
LABELS = [*IO_BACKENDS]


def host_pool(pool, label="page_first", ratio=1.5, host_size=0, **extra):
    """Host tier with guard bytes in every page."""
    from sgl_kvpool.srt.host.rows import HierarchicalMLAHostPool

    page_size = pool.page_size * getattr(pool, "dcp_size", 1)  # which SGLang's own pools lack
    tier = HierarchicalMLAHostPool(pool, ratio, host_size, page_size, label, **extra)
    page_memory(tier)[...] = GUARD
    return tier


def host_bytes(tier):
    """`[pages, layers, page_size, row_bytes]` of a host tier, without our own views."""
    whole, rows_bytes = page_memory(tier), tier.layer_num * tier.page_size * tier.row_format.row_bytes
    return whole[:, :rows_bytes].reshape(tier.page_num, tier.layer_num, tier.page_size, -1)


def page_memory(tier):
    """`[pages, bytes]` of a host tier, padding and checksums included."""
    raw = tier.kv_buffer.view(-1).view(torch.uint8).numpy()
    return raw.reshape(tier.page_num, -1)


def stride_bytes(layers, page_size, row_bytes, key_bytes=0):
    """Bytes from one page to the next by docs/transfer.md: a multiple of 4096 if that adds at most 3 %."""
    rows_bytes = layers * page_size * row_bytes + key_bytes

    def up(multiple):
        return -(-(rows_bytes + 16) // multiple) * multiple

    aligned = up(math.lcm(4096, page_size))
    return aligned if aligned * 100 <= rows_bytes * 103 else up(math.lcm(16, page_size))


def allocator_of(pool):
    """SGLang's allocator over a pool; its pages have the slots of all ranks of `--dcp-size`."""
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
    from sglang.srt.runtime_context import get_parallel

    ranks = get_parallel().attn_dcp_size
    return PagedTokenToKVPoolAllocator(
        pool.size * ranks, page_size=pool.page_size * ranks, dtype=pool.dtype, device=pool.device,
        kvcache=pool, need_sort=False,
    )  # fmt: skip


def controller_over(pool, process_group, io_backend, store=None, model_name="model", drafts=()):
    """SGLang's controller of a pool, whose host tier SGLang builds; `store` names a backend of stores."""
    from sglang.srt.mem_cache.hybrid_cache import hybrid_cache_controller, hybrid_pool_assembler

    allocator = allocator_of(pool)
    group = hybrid_pool_assembler.build_kv_only_group(
        page_size=allocator.page_size, kv_pool=pool, use_mla=True,
        full_layer_mapping={layer: layer for layer in range(pool.layer_num)}, mtp_draft_device_pools=drafts,
    )  # fmt: skip
    return hybrid_cache_controller.HybridCacheController(
        allocator, group, allocator.page_size, process_group, threading.Event(), write_policy="write_through",
        io_backend=io_backend, storage_backend=store, model_name=model_name,
        transfer_layer_id_max=pool.layer_num,
    )  # fmt: skip


def tier_of(controller):
    """Host tier of rows of a controller."""
    return controller.mem_pool_host.anchor_entry.host_pool


def until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def slots(pages, page_size):
    """The slots of pages, in SGLang's order."""
    pages = torch.tensor(pages, dtype=torch.int64)
    return (pages[:, None] * page_size + torch.arange(page_size)).view(-1)


def load(tier, host_pages, device_pages, layers=range(LAYERS), io_backend="kernel", **extra):
    host, device = (slots(pages, tier.logical_page_size) for pages in (host_pages, device_pages))
    for layer in layers:
        tier.load_to_device_per_layer(None, host, device, layer, io_backend, **extra)


def backup(tier, host_pages, device_pages, io_backend="kernel"):
    host, device = (slots(pages, tier.logical_page_size) for pages in (host_pages, device_pages))
    tier.backup_from_device_all_layer(None, host, device, io_backend)
