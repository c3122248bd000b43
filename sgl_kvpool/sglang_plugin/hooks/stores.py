"""Hooks of the stores under a host tier: checksums of pages are written and verified, failures are counted.

SGLang has two kinds of stores. A store that copies calls methods of the tier for each page
(`get_data_page`), which compute and verify checksums. A store without copies (Mooncake, NIXL, ...) reads and
writes the tier's memory: checksums are written before it reads, and verified after it has written. Some
stores of the second kind call these methods too; the tier then verifies twice.
"""

from sgl_kvpool import metrics
from sgl_kvpool.sglang_plugin.registry import around
from sgl_kvpool.srt.host.served_weights import SERVED
from sgl_kvpool.srt.host.store_calls import get_pages, set_pages

_CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController"


@around(f"{_CONTROLLER}._generic_page_get", "host tier")
def _generic_page_get(original, self, operation, hash_values, host_indices, extra_info=None):
    """Number of pages read, from the first on; the first damaged page and all pages after it are misses."""
    return get_pages(original, self, operation, hash_values, host_indices, extra_info, in_place=False)


@around(f"{_CONTROLLER}._page_get_zero_copy", "host tier")
def _page_get_zero_copy(original, self, operation, hash_values, host_indices, extra_info=None):
    """`_generic_page_get` for stores that write the tier's memory; the written pages are verified afterwards.

    Such a store may fail the whole batch for one bad page (NIXL). SGLang requests only pages that the store
    has reported, so a page that does not arrive is counted as a failure, not as an ordinary miss.
    """
    return get_pages(original, self, operation, hash_values, host_indices, extra_info, in_place=True)


@around(f"{_CONTROLLER}._page_backup_or_log", "host tier", repairs="#26792, closed")
def _page_backup_or_log(original, self, operation):
    """Store rows and states of a node, unless other weights may have written part of them."""
    with SERVED.storing():
        if SERVED.unsettled or operation.id < SERVED.first_operation:
            pages = len(operation.hash_value)
            metrics.uncached("weights", pages, f"{pages} pages of a prompt")
            return None
        return original(self, operation)


@around(f"{_CONTROLLER}._generic_page_set", "host tier")
def _generic_page_set(original, self, hash_values, host_indices, extra_info=None):
    """Store the pages before the first one that was lost in its backup."""
    return set_pages(original, self, hash_values, host_indices, extra_info, in_place=False)


@around(f"{_CONTROLLER}._page_set_zero_copy", "host tier")
def _page_set_zero_copy(original, self, hash_values, host_indices, extra_info=None):
    """`_generic_page_set` for stores that read the tier's memory, where the checksums are written first."""
    return set_pages(original, self, hash_values, host_indices, extra_info, in_place=True)
