"""Deliberate breakages that the soak must report; `scripts.soak --break NAME`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["BREAKAGES", "apply"]

#: "load-byte" and "host-overwrite" damage one in this many transfers; a leak happens once, after a multiple
#: of this many frees.
EVERY = 3


def _wrong_load() -> None:
    """Change one byte of the first row of a load, in the last layer."""
    from sgl_kvpool.srt.host.rows import HierarchicalMLAHostPool as Pool

    load = Pool.load_to_device_per_layer
    counts = {"loads": 0}

    def damaged(self: Any, device_pool: Any, host_indices: Any, device_indices: Any, layer_id: int, *a, **k):
        load(self, device_pool, host_indices, device_indices, layer_id, *a, **k)
        if layer_id + 1 == device_pool.layer_num:
            counts["loads"] += 1
            if counts["loads"] % EVERY == 0:
                rows = device_pool.kv_buffer[layer_id].view(torch.uint8)
                rows[int(device_pool.slot_to_row(device_indices[:1])), 0, 7] ^= 0x10

    Pool.load_to_device_per_layer = damaged


def _wrong_tokens() -> None:
    """Load the pages of a prefix in the wrong order."""
    from sgl_kvpool.srt.host.rows import HierarchicalMLAHostPool as Pool

    load = Pool.load_to_device_per_layer

    def damaged(self: Any, device_pool: Any, host_indices: Any, *a, **k):
        load(self, device_pool, host_indices.view(-1, self.page_size).flip(0).reshape(-1), *a, **k)

    Pool.load_to_device_per_layer = damaged


def _overwritten_host_page() -> None:
    """Write one page too many in a backup, over a page of another prompt."""
    from sgl_kvpool.srt.host.rows import HierarchicalMLAHostPool as Pool

    back_up = Pool.backup_from_device_all_layer
    counts = {"backups": 0}

    def damaged(self: Any, device_pool: Any, host_indices: Any, *a, **k):
        back_up(self, device_pool, host_indices, *a, **k)
        counts["backups"] += 1
        if counts["backups"] % EVERY == 0:
            page = int(host_indices[0]) // self.page_size
            self.kv_buffer[(page + self.page_num // 2) % self.page_num] = self.kv_buffer[page]

    Pool.backup_from_device_all_layer = damaged


def _leaked_device_page() -> None:
    """Lose a page of the pool when it is freed."""
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator as Allocator

    release = Allocator._release_page_ids  # all ways to free a page call this method
    counts = {"releases": 0}

    def leaky(self: Any, *page_ids: Any):
        counts["releases"] += 1
        if counts["releases"] == 5 * EVERY:
            page_ids = (page_ids[0][1:], *page_ids[1:])
        return release(self, *page_ids)

    Allocator._release_page_ids = leaky


def _leaked_host_page() -> None:
    """Lose a page of the host tier when it is freed."""
    from sgl_kvpool.srt.host.rows import HierarchicalMLAHostPool as Pool

    free = Pool.free
    counts = {"frees": 0}

    def leaky(self: Any, indices: Any):
        counts["frees"] += 1
        if counts["frees"] == EVERY:
            free(self, indices[self.page_size :])
            return len(indices)
        return free(self, indices)

    Pool.free = leaky


#: Breakages by name.
BREAKAGES = {
    "load-byte": _wrong_load,
    "load-order": _wrong_tokens,
    "host-overwrite": _overwritten_host_page,
    "device-leak": _leaked_device_page,
    "host-leak": _leaked_host_page,
}


def apply(names: Sequence[str]) -> None:
    """Apply breakages by name, ignoring ""; KeyError for an unknown name."""
    for name in names:
        if name:
            BREAKAGES[name]()
