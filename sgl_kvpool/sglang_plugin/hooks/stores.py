"""Hooks of the stores under a host tier: pages are sealed and verified, failures are counted.

SGLang has two ways. Stores that copy get pages through the tier (`get_data_page`), which makes and verifies
checksums. Stores without copies (Mooncake, NIXL, ...) read and write the tier's memory: checksums are written
before they read it, and verified behind them. Some of these copy all the same; the tier then verifies twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sgl_kvpool import metrics
from sgl_kvpool.sglang_plugin import hook_points
from sgl_kvpool.srt.host.page_digest import failure_kind

__all__ = ["install"]


def install() -> None:
    """Register and apply the hooks; part of `host_tier.install`."""
    hook_points.wrap_all(HOOKS)


def _ours(host_pool: Any) -> bool:
    from sgl_kvpool.srt.host.rows import HierarchicalMLAHostPool

    return isinstance(host_pool, HierarchicalMLAHostPool)


def _keys(controller: Any, hash_values: list[str], host_indices: Any) -> dict[int, str]:
    """Key of each page by its first host slot."""
    return dict(zip(host_indices[:: controller.page_size].tolist(), hash_values, strict=True))


def _failed_page(kind: str, key: str, slot: int, *, error: Exception | None = None, what: str = "") -> None:
    """Count a page that is a miss. The store keeps it: stores do not replace a key."""
    metrics.failed(kind, f"page {key} of the store, host slot {slot}{what}", error=error)


# -------------------------------------------------------------------- fetching


def _generic_page_get(original, self, operation, hash_values, host_indices, extra_info=None):
    """Pages that could be read, from the first on; a damaged one ends them and is a miss."""
    pool = self.storage_host_pool
    if not _ours(pool):
        return original(self, operation, hash_values, host_indices, extra_info)
    keys = _keys(self, hash_values, host_indices)

    def read(hashes: list[str], slots: Any) -> int:
        return original(self, operation, hashes, slots, extra_info)

    with pool.stored_under(keys):
        try:
            return read(hash_values, host_indices)
        except Exception as error:  # of some page of the batch: which, is found one by one
            first = error
        # A page that is not there is an ordinary miss, here as in SGLang.
        count, problem = _one_by_one(self.page_size, keys, host_indices, read)
    if count == len(keys):
        _read_at_last(len(keys), first)
    elif problem is not None:
        _failed_page(failure_kind(problem), hash_values[count], list(keys)[count], error=problem)
    return count


def _page_get_zero_copy(original, self, operation, hash_values, host_indices, extra_info=None):
    """The same for stores that write the tier's memory: what they have written is verified behind them.

    Such stores may fail as a whole where one page is bad (NIXL). SGLang asks for pages that the store said it
    has, so one that does not come could not be read.
    """
    pool = self.storage_host_pool
    if not _ours(pool):
        return original(self, operation, hash_values, host_indices, extra_info)
    keys = _keys(self, hash_values, host_indices)

    def read(hashes: list[str], slots: Any) -> int:
        return original(self, operation, hashes, slots, extra_info)

    first: Exception | None = None
    problem: Exception | None = None
    with pool.stored_under(keys):
        try:
            count = read(hash_values, host_indices)
        except Exception as error:  # of some page of the batch, as above
            first, count = error, 0
        retried = bool(keys) and not count
        if retried:
            count, problem = _one_by_one(self.page_size, keys, host_indices, read)
        bad = pool.first_damaged(host_indices[: count * self.page_size])
    slots = list(keys)
    if bad is not None:
        count, what = bad
        _failed_page("page_digest", hash_values[count], slots[count], what=f": {what}")
    elif count < len(keys):
        kind = "page_read" if problem is None else failure_kind(problem)
        _failed_page(kind, hash_values[count], slots[count], error=problem)
    elif retried:
        _read_at_last(count, first)
    return count


def _one_by_one(
    page_size: int, keys: Mapping[int, str], host_indices: Any, read: Callable[[list[str], Any], int]
) -> tuple[int, Exception | None]:
    """How many pages could be read before the first that could not, and the reason if there was one."""
    for number, key in enumerate(keys.values()):
        try:
            if read([key], host_indices[number * page_size : (number + 1) * page_size]) == 0:
                return number, None
        except Exception as error:  # whatever a store raises, this page is a miss, which the caller counts
            return number, error
    return len(keys), None


def _read_at_last(count: int, first: Exception | None) -> None:
    """Count a batch that failed as a whole, and of which every page could be read then."""
    kind = "page_read" if first is None else failure_kind(first)
    metrics.failed(kind, f"{count} pages of the store, all of which were read at last", error=first)


# -------------------------------------------------------------------- storing


def _generic_page_set(original, self, hash_values, host_indices, extra_info=None):
    """Pages up to the first that was lost in its backup, with their keys known to the digest meanwhile."""
    pool = self.storage_host_pool
    if not _ours(pool):
        return original(self, hash_values, host_indices, extra_info)
    with pool.stored_under(_keys(self, hash_values, host_indices)):
        return _set_pages(original, self, hash_values, host_indices, extra_info)


def _page_set_zero_copy(original, self, hash_values, host_indices, extra_info=None):
    """The same for stores that read the tier's memory, where the checksums are written first."""
    pool = self.storage_host_pool
    if not _ours(pool):
        return original(self, hash_values, host_indices, extra_info)
    with pool.stored_under(_keys(self, hash_values, host_indices)):
        return _set_pages(original, self, hash_values, host_indices, extra_info, seal=pool.seal_pages)


def _set_pages(
    original,
    controller: Any,
    hash_values: list[str],
    host_indices: Any,
    extra_info: Any,
    seal: Callable[[Any], None] | None = None,
) -> bool:
    """Store what may be stored; False if that is not all of it, or the store refused something."""
    count = controller.storage_host_pool.pages_before_a_lost_one(host_indices)
    if count < len(hash_values):
        metrics.failed("page_write", f"{len(hash_values) - count} pages, the first was lost in its backup")
    if not count:
        return not hash_values
    slots = host_indices[: count * controller.page_size]
    try:
        if seal is not None:
            seal(slots)
        stored = original(controller, hash_values[:count], slots, extra_info)
    except Exception as error:  # SGLang logs it too, and goes on without these pages
        metrics.failed("page_write", f"{count} pages", error=error)
        raise
    if not stored:
        metrics.failed("page_write", f"{count} pages, of which the store refused one")
    return stored and count == len(hash_values)


_CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController"

#: Function of SGLang -> hook around it.
HOOKS: Mapping[str, Callable] = {
    f"{_CONTROLLER}._generic_page_get": _generic_page_get,
    f"{_CONTROLLER}._generic_page_set": _generic_page_set,
    f"{_CONTROLLER}._page_get_zero_copy": _page_get_zero_copy,
    f"{_CONTROLLER}._page_set_zero_copy": _page_set_zero_copy,
}
