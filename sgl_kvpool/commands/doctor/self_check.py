"""Self-check of every layout without a model, over small pools on this machine's device."""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from sgl_kvpool.attention.decode import mla_decode
from sgl_kvpool.commands import rehearsal
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.memory.arrangement import KVArrangement
from sgl_kvpool.srt.pool.row_pool import PoolOptions
from sgl_kvpool.transfer.conversion import narrower_layouts
from sgl_kvpool.transfer.host_options import HostTierOptions

_LAYERS, _PAGE_SIZE, _PAGES, _HEADS, _SCALE = 3, 64, 9, 16, 0.072
_GEOMETRY: dict[str, Any] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}


def self_check() -> tuple[dict[str, str], list[str]]:
    """Check each layout in each arrangement, with narrower hosts, `--dcp-size`, and sparse attention."""
    from sglang.srt.runtime_context import get_parallel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)  # for tensors this small, threads cost more than they gain
    _publish(device)
    facts: dict[str, str] = {"device": device}
    problems = []
    for name, ranks, make in _pools(device):
        began = time.monotonic()
        try:
            with get_parallel().override(attn_dcp_size=ranks, attn_dcp_rank=ranks - 1, dcp_enabled=ranks > 1):
                found = list(_checks(make()))
        except Exception as error:  # after any exception, the other layouts are checked
            facts[name] = "failed"
            problems.append(f"{name}: {error}; do not serve this, and report it")
        else:
            facts[name] = f"passed in {time.monotonic() - began:.2f} s: {', '.join(found)}"
    return facts, problems


def _publish(device: str) -> None:
    """Set what SGLang's pools and controllers need: process group and server arguments."""
    import torch.distributed as dist
    from sglang.srt.mem_cache.pool_host import base

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rehearsal.publish(
        device,
        enable_hierarchical_cache=True,
        hicache_ratio=2.0,
        page_size=_PAGE_SIZE,
        hicache_mem_layout="page_first",
        hicache_io_backend="kernel",
    )
    # SGLang keeps 10 GiB free; the tiers here have a few megabytes.
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


def _pools(device: str) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """Names made of the server's argument values, `--dcp-size`, and functions that make a pool."""
    make = partial(
        rehearsal.make_pool, **_GEOMETRY, size=(_PAGES - 1) * _PAGE_SIZE, page_size=_PAGE_SIZE,
        layer_num=_LAYERS, device=device,
    )  # fmt: skip
    for layout in MLAKVCacheLayout:
        for arrangement in KVArrangement.of_rows():
            yield f"{layout} {arrangement}", 1, partial(make, PoolOptions(layout, arrangement=arrangement))
        for host in narrower_layouts(layout.pool_row_format(**_GEOMETRY)):
            options = PoolOptions(layout, host_tier=HostTierOptions(layout=host.value))
            yield f"{layout}, host {host}", 1, partial(make, options)
        options = PoolOptions(layout, arrangement=KVArrangement.PAGE_MAJOR)
        yield f"{layout} {options.arrangement}, --dcp-size 2", 2, partial(make, options)
        sparse = partial(make, PoolOptions(layout), is_dsa=True)
        yield f"{layout}, sparse", 1, sparse
        if layout is not MLAKVCacheLayout.FP8_NOPE_FP8_ROPE:  # which servers refuse with ranks
            yield f"{layout}, sparse, --dcp-size 2", 2, sparse


def _checks(pool: Any) -> Iterator[str]:
    from sgl_kvpool.srt.self_check import check_lists, check_rows, check_tier

    yield check_rows(pool)

    def attend(q, rows, kv_indices, kv_lens, scale):
        rows, page = rows.squeeze(1), pool.page_stride
        if pool.serves_dsa:  # lists of row numbers, without the entries of other ranks
            kv_indices, page = pool.rows_to_write(kv_indices), None
        elif pool.dcp_size > 1:
            kv_indices, kv_lens = kv_indices[:, pool.dcp_rank :: pool.dcp_size], kv_lens // pool.dcp_size
        return mla_decode(q, rows, kv_indices, kv_lens, pool.row_format, scale, page=page)

    yield check_lists(pool, _LAYERS - 1, _HEADS, _SCALE, attend)
    controller = _controller(pool)
    if controller is None:
        yield "host tier not checked, it is SGLang's own"
        return
    yield check_tier(controller, lambda good: good)


def _controller(pool: Any) -> Any:
    """SGLang's controller over our host tier of a pool; None if SGLang's tier serves its rows."""
    import torch.distributed as dist
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
    from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_kv_only_group

    from sgl_kvpool.sglang_plugin import hook_groups
    from sgl_kvpool.srt.host.tier_bytes import has_our_tier

    if not has_our_tier(pool):
        return None
    hook_groups.apply(hook_groups.named("host tier"))
    page_size = _PAGE_SIZE * pool.dcp_size
    allocator = PagedTokenToKVPoolAllocator(
        pool.size * pool.dcp_size,
        page_size=page_size,
        dtype=pool.dtype,
        device=pool.device,
        kvcache=pool,
        need_sort=False,
    )
    group = build_kv_only_group(
        page_size=page_size,
        kv_pool=pool,
        use_mla=True,
        full_layer_mapping={layer: layer for layer in range(_LAYERS)},
    )
    return HybridCacheController(
        allocator,
        group,
        page_size,
        dist.group.WORLD,
        threading.Event(),
        write_policy="write_through",
        io_backend="kernel",
        transfer_layer_id_max=_LAYERS,
    )
