"""A store that reads and writes the tier's memory, called as SGLang's controller calls such stores."""

import ctypes

import numpy as np
from host_tier import page_memory, slots, tier_of
from pools import GUARD

KEYS = [f"{n}" * 64 for n in range(4)]
PUT, GOT = [3, 1, 4, 0], [0, 5, 2, 6]


class Operation:
    request_id = "r"

    def is_terminated(self):
        return False


class MemoryStore:
    """A store without copies: `pages` by key; `broken` are keys whose reads fail."""

    def __init__(self, tier, whole_batches=False):
        self.tier, self.whole_batches = tier, whole_batches
        self.pages, self.broken, self.calls = {}, set(), 0

    def _places(self, host_indices):
        return list(zip(*self.tier.get_page_buffer_meta(host_indices), strict=True))

    def batch_set_v1(self, keys, host_indices, extra_info=None):
        for key, (address, size) in zip(keys, self._places(host_indices), strict=True):
            self.pages[key] = ctypes.string_at(address, size)
        return [True] * len(keys)

    def batch_get_v1(self, keys, host_indices, extra_info=None):
        self.calls += 1
        bad = [key in self.broken or key not in self.pages for key in keys]
        if self.whole_batches and any(bad):
            return [False] * len(keys)
        for key, failed, (address, size) in zip(keys, bad, self._places(host_indices), strict=True):
            if not failed:
                ctypes.memmove(address, self.pages[key].ljust(size, b"\0"), size)
        return [not failed for failed in bad]


def flipped(page, place):
    """The bytes of a page with one bit changed."""
    return page[:place] + bytes([page[place] ^ 1]) + page[place + 1 :]


def filled(tier, seed=3):
    """Fill every row with random bytes and the rest with guard bytes; returns the pages' memory."""
    whole = page_memory(tier)
    whole[...] = GUARD
    shape = (tier.page_num, tier.page_bytes)
    whole[:, : tier.page_bytes] = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return whole.copy()


def put_in(controller):
    """Fill a controller's tier and put pages into its store; returns the tier's memory."""
    filled(tier_of(controller))
    assert put(controller)
    return page_memory(tier_of(controller)).copy()


def put(controller, pages=PUT):
    return controller._page_set_zero_copy(KEYS[: len(pages)], slots(pages, controller.page_size))


def get(controller, pages=GOT, keys=KEYS):
    """Fetch pages as SGLang's prefetch thread does; returns the number of pages and the tier's memory."""
    memory = page_memory(tier_of(controller))
    memory[...] = GUARD
    hits = controller._page_get_zero_copy(Operation(), keys, slots(pages, controller.page_size))
    return hits, memory
