"""Deliberate breakages that the soak must report; `scripts.soak --break NAME`."""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch

#: "load-byte" and "host-overwrite" damage one in this many transfers; a leak happens once, after a multiple
#: of this many frees.
EVERY = 3


def _wrong_load(load: Callable) -> Callable:
    """Change one byte of the first row of a load, in the last layer."""
    loads = count(1)

    def damaged(self: Any, device_pool: Any, host_indices: Any, device_indices: Any, layer_id: int, *a, **k):
        load(self, device_pool, host_indices, device_indices, layer_id, *a, **k)
        if layer_id + 1 == device_pool.layer_num and next(loads) % EVERY == 0:
            rows = device_pool.kv_buffer[layer_id].view(torch.uint8)
            rows[int(device_pool.slot_to_row(device_indices[:1])), 0, 7] ^= 0x10

    return damaged


def _wrong_tokens(load: Callable) -> Callable:
    """Load the pages of a prefix in the wrong order."""

    def damaged(self: Any, device_pool: Any, host_indices: Any, *a, **k):
        load(self, device_pool, host_indices.view(-1, self.page_size).flip(0).reshape(-1), *a, **k)

    return damaged


def _overwritten_host_page(back_up: Callable) -> Callable:
    """Write one page too many in a backup, over a page of another prompt."""
    backups = count(1)

    def damaged(self: Any, device_pool: Any, host_indices: Any, *a, **k):
        back_up(self, device_pool, host_indices, *a, **k)
        if next(backups) % EVERY == 0:
            page = int(host_indices[0]) // self.page_size
            self.kv_buffer[(page + self.page_num // 2) % self.page_num] = self.kv_buffer[page]

    return damaged


def _leaked_device_page(release: Callable) -> Callable:
    """Lose a page of the pool when it is freed; all ways to free a page call this method."""
    releases = count(1)

    def leaky(self: Any, *page_ids: Any):
        if next(releases) == 5 * EVERY:
            page_ids = (page_ids[0][1:], *page_ids[1:])
        return release(self, *page_ids)

    return leaky


def _leaked_host_page(free: Callable) -> Callable:
    """Lose a page of the host tier when it is freed."""
    frees = count(1)

    def leaky(self: Any, indices: Any):
        if next(frees) != EVERY:
            return free(self, indices)
        free(self, indices[self.page_size :])
        return len(indices)

    return leaky


#: By name: whether the host tier's class is damaged or SGLang's allocator; the method; what replaces it.
BREAKAGES: dict[str, tuple[bool, str, Callable[[Callable], Callable]]] = {
    "load-byte": (True, "load_to_device_per_layer", _wrong_load),
    "load-order": (True, "load_to_device_per_layer", _wrong_tokens),
    "host-overwrite": (True, "backup_from_device_all_layer", _overwritten_host_page),
    "device-leak": (False, "_release_page_ids", _leaked_device_page),
    "host-leak": (True, "free", _leaked_host_page),
}


def apply(names: Sequence[str]) -> None:
    """Apply breakages by name, ignoring ""; KeyError for an unknown name."""
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

    from sgl_kvpool.srt.host.rows import HierarchicalMLAHostPool

    for of_host, method, damaged in (BREAKAGES[name] for name in names if name):
        kind = HierarchicalMLAHostPool if of_host else PagedTokenToKVPoolAllocator
        setattr(kind, method, damaged(getattr(kind, method)))
