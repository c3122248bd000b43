"""Calls of a store under the host tier: keys name the weights, calls have a limit, damaged pages are misses.

While weights may have changed, no page is stored or looked up (`served_weights`); afterwards the store knows
pages by other keys. It stays attached: a new Mooncake client would lose the pages in its memory, and NIXL and
Mooncake would register the tier again.

SGLang has one thread each for searching, reading and writing a store. A call that hangs (a dead mount, a FIFO
among the files) holds up all later ones: prompts are answered, and no page is found or stored. Calls that
take too long are counted while they last, since they may never return.
"""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from sgl_kvpool import metrics
from sgl_kvpool.srt.host.page_format import failure_kind
from sgl_kvpool.srt.host.served_weights import SERVED
from sgl_kvpool.srt.host.tier_bytes import holds_our_rows

#: SGLang waits this long for its threads in a flush, and ends the server if one has not stopped.
_LIMIT_SECONDS = 10.0
#: Whether this thread is in a call, which may make others.
_in_call = threading.local()


def _keys(controller: Any, hash_values: list[str], host_indices: Any) -> dict[int, str]:
    """Key of each page by its first host slot."""
    return dict(zip(host_indices[:: controller.page_size].tolist(), SERVED.keys(hash_values), strict=True))


def wrap_calls(store: Any, of_states: Mapping[str, Callable]) -> None:
    """Replace the methods by which SGLang's controllers call a store.

    A call longer than ten seconds is counted. Keys name the pages' weights, and a store has no pages of
    unsettled weights. The store may be of any class, so methods are replaced on the object. `of_states`:
    method -> `wrapped(original, *args)`, which checks the states that it moves. It gets the keys with the
    weights' name, from which checksums of states begin, and its own time is not limited.
    """
    for method, (action, by_key) in _METHODS.items():
        if hasattr(store, method):
            call = partial(_timed, getattr(store, method), action)
            if method in of_states:
                call = partial(of_states[method], call)
            setattr(store, method, partial(by_key, call))


def _exists(original, keys, *args, **kwargs):
    return 0 if SERVED.unsettled else original(SERVED.keys(keys), *args, **kwargs)


def _exists_v2(original, keys, pool_transfers=None, *args, **kwargs):
    from sglang.srt.mem_cache.hicache_storage import PoolTransferResult

    if SERVED.unsettled:
        return PoolTransferResult.empty()
    return original(SERVED.keys(keys), pool_transfers and _named(pool_transfers), *args, **kwargs)


def _pages(original, keys, *args, **kwargs):
    return original(SERVED.keys(keys), *args, **kwargs)


def _pages_v2(original, transfers, *args, **kwargs):
    return original(_named(transfers), *args, **kwargs)


def _named(transfers: Any) -> list[Any]:
    return [replace(one, keys=one.keys and SERVED.keys(one.keys)) for one in transfers]


#: What the log says of a call of a method, and the wrapper that names its keys.
_METHODS: Mapping[str, tuple[str, Callable]] = {
    "batch_exists": ("search for", _exists),
    "batch_exists_v2": ("search for", _exists_v2),
    **dict.fromkeys(("batch_get", "batch_get_v1"), ("read", _pages)),
    "batch_get_v2": ("read", _pages_v2),
    **dict.fromkeys(("batch_set", "batch_set_v1"), ("write", _pages)),
    "batch_set_v2": ("write", _pages_v2),
}


def _timed(call: Callable, action: str, first: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of a call, whose first argument is a list of keys or of transfers."""
    if getattr(_in_call, "now", False):
        return call(first, *args, **kwargs)
    pages = sum(len(getattr(one, "keys", None) or ()) if not isinstance(one, str) else 1 for one in first)
    what = f"to {action} {pages} pages takes longer than {_LIMIT_SECONDS:g} s"
    timer = threading.Timer(_LIMIT_SECONDS, metrics.uncached, ("store_slow", pages, what))
    timer.daemon = True
    with suppress(RuntimeError):  # no more threads can be started: the call is made without a limit
        timer.start()
    _in_call.now = True
    try:
        return call(first, *args, **kwargs)
    finally:
        _in_call.now = False
        timer.cancel()


def get_pages(
    original,
    controller: Any,
    operation: Any,
    hash_values: list[str],
    host_indices: Any,
    extra_info: Any,
    *,
    in_place: bool,
) -> int:
    """Number of intact pages of a list, from the first on; the page after them is counted as a failure.

    A page that is absent from a store that copies is an ordinary miss, as in SGLang.
    """
    if SERVED.unsettled:
        return 0  # requested before the update, or without asking the store
    pool = controller.storage_host_pool
    if not holds_our_rows(pool):
        return original(controller, operation, hash_values, host_indices, extra_info)
    if pool.shared is not None and not pool.shared.ranks.is_leader:
        # The machine's first rank reads the pages for all ranks. SGLang uses the smallest number over the
        # ranks.
        return len(hash_values)
    keys = _keys(controller, hash_values, host_indices)

    def read(hashes: list[str], slots: Any) -> int:
        return original(controller, operation, hashes, slots, extra_info)

    first: Exception | None = None
    problem: Exception | None = None
    bad: tuple[int, str] | None = None
    with pool.stored_under(keys):
        try:
            count = read(hash_values, host_indices)
        except Exception as error:  # one page caused it; reading page by page finds that page
            first, count = error, 0
        retried = first is not None or (in_place and bool(keys) and not count)
        if retried:
            count, problem = _one_by_one(controller.page_size, keys, host_indices, read)
        if in_place:
            bad = pool.first_damaged(host_indices[: count * controller.page_size])
    kind, what = "page_read" if problem is None else failure_kind(problem), ""
    if bad is not None:
        count, kind, problem, what = bad[0], "page_checksum", None, f": {bad[1]}"
    elif count == len(keys):
        if retried:
            kind = "page_read" if first is None else failure_kind(first)
            metrics.failed(kind, f"{count} pages of the store, all of which a retry has read", error=first)
        return count
    elif problem is None and not in_place:
        return count
    # The store keeps the page: stores do not replace a key.
    page = f"page {SERVED.key(hash_values[count])} of the store, host slot {list(keys)[count]}{what}"
    metrics.failed(kind, page, error=problem)
    return count


def _one_by_one(
    page_size: int, keys: Mapping[int, str], host_indices: Any, read: Callable[[list[str], Any], int]
) -> tuple[int, Exception | None]:
    """Number of pages read before the first failure, and the exception if there was one."""
    for number, key in enumerate(keys.values()):
        try:
            if read([key], host_indices[number * page_size : (number + 1) * page_size]) == 0:
                return number, None
        except Exception as error:  # any exception is a miss of this page, which the caller counts
            return number, error
    return len(keys), None


def set_pages(
    original, controller: Any, hash_values: list[str], host_indices: Any, extra_info: Any, *, in_place: bool
) -> bool:
    """Store the pages before the first lost one; False if a page was lost or the store refused one."""
    pool = controller.storage_host_pool
    if not holds_our_rows(pool):
        return original(controller, hash_values, host_indices, extra_info)
    count = pool.pages_before_a_lost_one(host_indices)
    if count < len(hash_values):
        metrics.failed("page_write", f"{len(hash_values) - count} pages, the first was lost in its backup")
    if not count:
        return not hash_values
    slots = host_indices[: count * controller.page_size]
    try:
        with pool.stored_under(_keys(controller, hash_values, host_indices)):
            if in_place:
                pool.write_checksums(slots)
            stored = original(controller, hash_values[:count], slots, extra_info)
    except Exception as error:  # SGLang logs it too, and goes on without these pages
        metrics.failed("page_write", f"{count} pages", error=error)
        raise
    if not stored:
        metrics.failed("page_write", f"{count} pages, of which the store refused one")
    return stored and count == len(hash_values)
