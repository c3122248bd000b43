"""Host tiers of small real pools; the bytes of pool and tier are found with numpy alone."""

import itertools
import math
import threading

import numpy as np
import torch
from codec_oracle import LAYOUTS, ROW_BYTES

LAYERS, START, PAGES = 3, 5, 5  # page 0 takes the writes of padded tokens
ARRANGEMENTS = ["layer_major", "token_major", "page_major"]
LABELS = ["page_first", "page_first_direct"]
CASES = list(itertools.product(LAYOUTS, ARRANGEMENTS, [1, 2, 61, 64, 128]))
#: Axes in memory, outermost first.
ORDER = {"layer_major": "LBNC", "token_major": "BNLC", "page_major": "BLNC"}
GUARD = 0xEE


def device_pool(layout, arrangement="layer_major", page_size=4, pages=PAGES, layers=LAYERS, **extra):
    from sgl_kvpool.layout import MLAKVCacheLayout
    from sgl_kvpool.srt.pool import LayoutMLATokenToKVPool, PoolOptions

    chosen = {name: extra.pop(name) for name in ("k_scales", "readers", "host_tier") if name in extra}
    shown = MLAKVCacheLayout(layout).sglang_kv_cache_dtype()
    return LayoutMLATokenToKVPool(
        size=(pages - 1) * page_size, page_size=page_size,
        dtype={"bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}[shown],
        options=PoolOptions(layout, arrangement=arrangement, **chosen),
        **{"kv_lora_rank": 512, "qk_rope_head_dim": 64, "layer_num": layers, "device": "cpu",
           "enable_memory_saver": False, "start_layer": START, **extra},
    )  # fmt: skip


def host_pool(pool, label="page_first", ratio=1.5, host_size=0, **extra):
    """Host tier with guard bytes in every page."""
    from sgl_kvpool.srt.host.rows import HierarchicalMLAHostPool

    tier = HierarchicalMLAHostPool(pool, ratio, host_size, pool.page_size, label, **extra)
    page_memory(tier)[...] = GUARD
    return tier


def memory(pool):
    """The bytes of a pool, one flat array per buffer."""
    if pool.cross_layer is None:
        return [layer.view(torch.uint8).view(-1).numpy() for layer in pool.kv_buffer]
    return [pool.cross_layer.view(-1).numpy().view(np.uint8)]


def rows(pool):
    """The rows of a pool as `[layers, pages, tokens, row_bytes]`, writable views made without torch."""
    order, row = ORDER[pool.kv_cache_arrangement.value], ROW_BYTES[pool.kv_cache_layout.value]
    flat = memory(pool)
    sizes = {"L": pool.layer_num, "N": pool.page_size, "C": row}
    sizes["B"] = sum(map(len, flat)) // (pool.layer_num * pool.page_size * row)
    if order[0] == "L":
        return [layer.reshape(sizes["B"], pool.page_size, row) for layer in flat]
    grid = flat[0].reshape([sizes[axis] for axis in order])
    return list(grid.transpose([order.index(axis) for axis in "LBNC"]))


def host_bytes(tier):
    """`[pages, layers, page_size, row_bytes]` of a host tier, without our own views."""
    whole, rows_bytes = page_memory(tier), tier.layer_num * tier.page_size * tier.row_format.row_bytes
    return whole[:, :rows_bytes].reshape(tier.page_num, tier.layer_num, tier.page_size, -1)


def page_memory(tier):
    """`[pages, bytes]` of a host tier, padding and checksums included."""
    raw = tier.kv_buffer.view(-1).view(torch.uint8).numpy()
    return raw.reshape(tier.page_num, -1)


def stride_bytes(layers, page_size, row_bytes):
    """Bytes from one page to the next by docs/transfer.md: a multiple of 4096 if that adds at most 3 %."""
    rows_bytes = layers * page_size * row_bytes

    def up(multiple):
        return -(-(rows_bytes + 16) // multiple) * multiple

    aligned = up(math.lcm(4096, page_size))
    return aligned if aligned * 100 <= rows_bytes * 103 else up(math.lcm(16, page_size))


def fill(pool, seed=0):
    """Different bytes in every row of every layer."""
    generator = np.random.default_rng(seed)
    for layer in rows(pool):
        layer[...] = generator.integers(0, 256, layer.shape, dtype=np.uint8)


def controller_over(pool, process_group, io_backend, store=None, model_name="model"):
    """SGLang's controller of a pool, whose host tier SGLang builds; `store` names a backend of stores."""
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.hybrid_cache import hybrid_cache_controller, hybrid_pool_assembler

    allocator = PagedTokenToKVPoolAllocator(
        pool.size, page_size=pool.page_size, dtype=pool.dtype, device=pool.device, kvcache=pool,
        need_sort=False,
    )  # fmt: skip
    group = hybrid_pool_assembler.build_kv_only_group(
        page_size=pool.page_size, kv_pool=pool, use_mla=True,
        full_layer_mapping={layer: layer for layer in range(pool.layer_num)},
    )  # fmt: skip
    return hybrid_cache_controller.HybridCacheController(
        allocator, group, pool.page_size, process_group, threading.Event(), write_policy="write_through",
        io_backend=io_backend, storage_backend=store, model_name=model_name,
        transfer_layer_id_max=pool.layer_num,
    )  # fmt: skip


def slots(pages, page_size):
    """The slots of pages, in SGLang's order."""
    pages = torch.tensor(pages, dtype=torch.int64)
    return (pages[:, None] * page_size + torch.arange(page_size)).view(-1)


def load(tier, host_pages, device_pages, layers=range(LAYERS), io_backend="kernel"):
    for layer in layers:
        tier.load_to_device_per_layer(
            None, slots(host_pages, tier.page_size), slots(device_pages, tier.page_size), layer, io_backend
        )


def backup(tier, host_pages, device_pages, io_backend="kernel"):
    tier.backup_from_device_all_layer(
        None, slots(host_pages, tier.page_size), slots(device_pages, tier.page_size), io_backend
    )
