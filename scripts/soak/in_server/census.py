"""Census of the pages of a running scheduler, from the allocators' lists and the nodes of the tree.

SGLang sums up sizes; this census counts the occurrences of every page, on the device and on the host, so that
a page in two places does not compensate for a leaked page.
"""

import os
import re
import sys
import tempfile
from typing import Any

import torch
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from scripts.soak.in_server import transfers
from scripts.soak.in_server.transfers import inward_equal, outward_equal, relative_error, rows_of
from sgl_kvpool.srt.host.rows import HierarchicalMLAHostPool

#: Largest relative error between two computations of a token's row; the error between rows of different
#: tokens is above 1.
CLOSE = 0.2


def take(scheduler: Any) -> dict[str, Any]:
    """Census of one scheduler (rank); every value can be written as JSON.

    `scheduler`: The scheduler, between two steps.
    Returns: `idle` (bool), `busy` (reasons why it is not idle), `requests`, `device`, `host` (None without a
      tier), `tree`, `bytes` (None without a tier of ours), `transfers` (None if none was compared),
      `resident_bytes` (of the process).
    """
    tree = scheduler.tree_cache
    nodes = _nodes(tree)
    host_pool = getattr(tree, "full_kv_pool_host", None) or getattr(tree, "token_to_kv_pool_host", None)
    return {
        "idle": bool(scheduler.is_fully_idle()),
        "busy": _busy(scheduler, tree),
        "requests": {
            "slots": scheduler.req_to_token_pool.size,
            "free_slots": len(scheduler.req_to_token_pool.free_slots),
        },
        "device": _device(scheduler, tree, nodes),
        "host": None if host_pool is None else _host(host_pool, nodes),
        "tree": {"problem": _sanity(tree)},
        "bytes": _bytes(scheduler, host_pool, nodes),
        "transfers": transfers.report(),
        "resident_bytes": _resident_bytes(),
    }


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _busy(scheduler: Any, tree: Any) -> dict[str, int]:
    names = ("ongoing_write_through", "ongoing_load_back", "ongoing_prefetch", "ongoing_backup")
    queued = {name: len(getattr(tree, name, ())) for name in names}
    return {
        "running": len(scheduler.running_batch.reqs),
        "waiting": len(scheduler.waiting_queue),
        "chunked": int(scheduler.chunked_req is not None),
        **queued,
    }


def _node_ids(tree: Any) -> list[int]:
    """Ids of all nodes, roots included.

    SGLang's tree in Rust lists its nodes only in text that it prints to standard output.
    """
    sys.stdout.flush()
    keep = os.dup(1)
    with tempfile.TemporaryFile() as printed:
        os.dup2(printed.fileno(), 1)
        try:
            tree.pretty_print()
            sys.stdout.flush()
        finally:
            os.dup2(keep, 1)
            os.close(keep)
        printed.seek(0)
        text = printed.read().decode(errors="replace")
    return [int(number) for number in re.findall(r"^\s*\[(\d+)\]", text, re.MULTILINE)]


def _nodes(tree: Any) -> list[tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Device slots and host slots of every node but roots; None for a node without slots in a tier."""
    core = tree.tree_core
    found = []
    for node_id in _node_ids(tree):
        if tree.is_root(node_id):
            continue
        device = core.get_component_device_value(node_id, ComponentType.FULL)
        spec = core.build_storage_backup_spec(node_id, False)
        host = None if spec is None else spec.host_value
        found.append((None if device is None else device.cpu(), None if host is None else host.cpu()))
    return found


def _sanity(tree: Any) -> str:
    """Problem that SGLang's own check of the tree finds; "" without a problem."""
    try:
        tree.sanity_check()
    except AssertionError as error:
        return str(error)[:2000]
    return ""


def _places(total_pages: range, free: torch.Tensor, held: torch.Tensor) -> dict[str, Any]:
    """Occurrences of every page in the free list and in the tree.

    `nowhere` counts leaked pages, `twice` pages that occur more than once; the first 16 of each are listed.
    """
    counts = torch.zeros(total_pages.stop, dtype=torch.int64)
    for pages in (free, held):
        counts += torch.bincount(pages, minlength=len(counts))[: len(counts)]
    counts = counts[total_pages.start :]
    nowhere = (counts == 0).nonzero().flatten() + total_pages.start
    twice = (counts > 1).nonzero().flatten() + total_pages.start
    return {
        "pages": len(total_pages),
        "free": len(free),
        "in_tree": len(held),
        "nowhere": len(nowhere),
        "twice": len(twice),
        "nowhere_pages": nowhere[:16].tolist(),
        "twice_pages": twice[:16].tolist(),
    }


def _page_list(slots: list[torch.Tensor | None], page_size: int) -> torch.Tensor:
    """Pages of lists of slots; ValueError if a list does not consist of whole pages."""
    pages = [torch.empty(0, dtype=torch.int64)]
    for listed in slots:
        if listed is None:
            continue
        grid = listed.view(-1, page_size)
        if not torch.equal(grid, grid[:, :1] + torch.arange(page_size)) or bool(
            (grid[:, 0] % page_size).any()
        ):
            raise ValueError(f"a node's slots are not whole pages: {listed[: 2 * page_size].tolist()}")
        pages.append(grid[:, 0] // page_size)
    return torch.cat(pages)


def _device(scheduler: Any, tree: Any, nodes: list) -> dict[str, Any]:
    allocator = scheduler.token_to_kv_pool_allocator
    page_size = allocator.page_size
    free = allocator.get_all_free_pages().cpu()
    held = _page_list([device for device, _ in nodes], page_size)
    # Page 0 is reserved for the writes of padded tokens.
    return {
        **_places(range(1, allocator.size // page_size + 1), free, held),
        "page_size_tokens": page_size,
        # SGLang's own sums, in tokens.
        "size_tokens": scheduler.max_total_num_tokens,
        "available_tokens": allocator.available_size(),
        "evictable_tokens": tree.evictable_size(),
        "protected_tokens": tree.protected_size(),
    }


def _host(host_pool: Any, nodes: list) -> dict[str, Any]:
    page_size = host_pool.page_size
    free_slots = torch.cat([host_pool.free_slots, *host_pool.release_slots])
    held = _page_list([host for _, host in nodes], page_size)
    free = _page_list([free_slots], page_size)
    used = host_pool.slot_used.view(-1, page_size)
    marked = used.all(dim=1)
    in_tree = torch.zeros(len(marked), dtype=torch.bool)
    in_tree[held] = True
    lost = getattr(host_pool, "_lost", None)
    return {
        **_places(range(host_pool.page_num), free, held),
        "page_size_tokens": page_size,
        "available_tokens": host_pool.available_size(),
        # Bytes that transfers move, without the padding and checksum of our tier's pages.
        "token_bytes": getattr(host_pool, "page_bytes", page_size * host_pool.get_size_per_token())
        // page_size,
        # Compare SGLang's marks of used slots with the tree's pages.
        "marked_otherwise": int((marked != in_tree).sum() + (used.any(dim=1) != marked).sum()),
        "lost_in_tree": 0 if lost is None else int(lost.of(in_tree.nonzero()[:, 0].numpy()).sum()),
    }


def _bytes(scheduler: Any, host_pool: Any, nodes: list) -> dict[str, Any] | None:
    """Compare the rows of pages in both tiers.

    They are equal, or one is the codec's conversion of the other, unless a request has recomputed rows that
    the host had too: a node of SGLang's tree then has rows of two computations with different rounding. So
    only `different_pages`, whose values are not close, are faults.
    """
    if not isinstance(host_pool, HierarchicalMLAHostPool):
        return None
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    pool = getattr(pool, "row_pool", pool)  # hybrid pools
    result: dict[str, Any] = {"pages": 0, "different_pages": 0, "different": []}
    page_size = host_pool.page_size
    for device_indices, host_indices in nodes:
        if device_indices is None or host_indices is None:
            continue
        host_pages = host_indices.view(-1, page_size)[:, 0] // page_size
        errors = torch.zeros(len(host_pages))
        for layer in range(pool.layer_num):
            rows = rows_of(pool, host_pool, layer, device_indices, host_pages)
            # The direction of the last transfer of a page is unknown, so both are tried.
            equal = outward_equal(pool, host_pool, layer, *rows) | inward_equal(pool, host_pool, layer, *rows)
            if not bool(equal.all()):
                error = relative_error(pool, host_pool, layer, *rows) * ~equal
                errors = torch.maximum(errors, error.view(-1, page_size).amax(dim=1))
        different = errors > CLOSE
        result["pages"] += len(host_pages)
        result["different_pages"] += int(different.sum())
        result["different"] += host_pages[different][: 16 - len(result["different"])].tolist()
    return result
