"""Hooks of decode servers: a prefill server with other rows fails only its own requests.

Without these hooks, SGLang ends the decode server at the first request of such a prefill server. A decode
server learns of a prefill server from that request, so the mismatch cannot be found at start. SGLang does not
notify the prefill server, which holds the request, and with it the client behind a router, for
`SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT` (300 s).
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from sgl_kvpool import metrics
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.sglang_plugin import hook_points
from sgl_kvpool.sglang_plugin.hooks.disaggregation import MARK
from sgl_kvpool.sglang_plugin.options import LAYOUT

__all__ = ["PeerMismatch", "install"]

#: The two strings in SGLang's error for peers that differ.
_STRINGS = re.compile(r"kv_cache_dtype=(\S+?)[,.](?=\s)")

#: Time for which a mismatched prefill server is not queried again; its operator may restart it.
_REMEMBERED_SECONDS = 10.0

#: Time for which a refused request is held, and interval at which its prefill server is notified meanwhile. A
#: prefill server forgets a notification for a request that is still in its own queue.
_HELD_SECONDS, _TOLD_EVERY_SECONDS = 2.0, 0.25


class PeerMismatch(RuntimeError):
    """A prefill server does not match this decode server."""


@dataclass(frozen=True)
class _Mismatch:
    """Why a prefill server does not match, the addresses of its ranks, and when this expires (monotonic)."""

    text: str
    ranks: list[dict[str, Any]]
    until: float


@dataclass
class _Refusal:
    """When a request was refused, and when its prefill server is to be notified again (monotonic)."""

    since: float
    tell_at: float


#: KV manager -> address of a prefill server -> mismatch.
_mismatches: WeakKeyDictionary[Any, dict[str, _Mismatch]] = WeakKeyDictionary()

#: Receiver of a refused request -> times of the refusal.
_refusals: WeakKeyDictionary[Any, _Refusal] = WeakKeyDictionary()


def install() -> None:
    """Apply the hooks."""
    hook_points.wrap_all(HOOKS)


# -------------------------------------------------------------------- the error


def _try_ensure_parallel_info(original, self, bootstrap_addr):
    """Raise PeerMismatch for a prefill server that does not match, or does not report its rows.

    SGLang's error for other rows names `--kv-cache-dtype`, which would not help, and SGLang accepts a peer
    that reports no dtype. Errors about page size or stages, some of which are failed assertions, also concern
    this prefill server only.
    """
    try:
        known = original(self, bootstrap_addr)
    except (RuntimeError, AssertionError) as error:
        strings = _STRINGS.findall(str(error))
        if len(strings) != 2 or not any(MARK in text for text in strings):
            if MARK not in self.kv_cache_dtype_str:
                raise PeerMismatch(str(error)) from error
            raise PeerMismatch(f"the prefill server at {bootstrap_addr}: {error}") from error
        prefill, decode = strings
        raise PeerMismatch(
            f"KV cache layout mismatch: the prefill server at {bootstrap_addr} stores {_described(prefill)}, "
            f"and this decode server stores {_described(decode)}. {_remedy(prefill, decode)}"
        ) from error
    if known and MARK in self.kv_cache_dtype_str:
        info = self.prefill_info_table.get(bootstrap_addr)
        if info is not None and info.kv_cache_dtype is None:
            del self.prefill_info_table[bootstrap_addr]
            raise PeerMismatch(
                f"KV cache layout mismatch: the prefill server at {bootstrap_addr} does not report what rows "
                f"it stores, and this decode server stores {_described(self.kv_cache_dtype_str)}. "
                f"{_remedy('', self.kv_cache_dtype_str)}"
            )
    return known


def _layout_name(text: str) -> str | None:
    """Layout named in a string that peers compare; None for SGLang's own rows."""
    _, mark, rows = text.partition(MARK)
    return rows.partition("-")[0] if mark else None


def _described(text: str) -> str:
    name = _layout_name(text)
    return f"SGLang's own rows ({text})" if name is None else f"rows of layout {name} ({text})"


def _remedy(prefill: str, decode: str) -> str:
    if _layout_name(prefill) == _layout_name(decode):
        return (
            "Serve the same model and checkpoint on both, with the same draft model "
            "(--speculative-algorithm) and the same release of sgl-kvpool."
        )
    return (
        f"Start both with the same {LAYOUT.flag}; {MLAKVCacheLayout.BF16} also works with servers that do "
        "not have sgl-kvpool."
    )


# -------------------------------------------------------------------- its requests


def _ensure_prefill_info(original, self, addr_to_reqs):
    """Fail the requests of a mismatched prefill server; the decode server continues to serve the others."""
    ready: dict[str, list[Any]] = {}
    remaining: list[Any] = []
    mismatches = _mismatches.setdefault(self.kv_manager, {})
    for address, requests in addr_to_reqs.items():
        mismatch = mismatches.get(address)
        if mismatch is None or time.monotonic() >= mismatch.until:
            mismatches.pop(address, None)
            try:
                fit, rest = original(self, {address: requests})
            except PeerMismatch as error:
                ranks = _ranks(requests)
                mismatch = _Mismatch(str(error), ranks, time.monotonic() + _REMEMBERED_SECONDS)
                if ranks:  # else later requests would fail without a notification of their prefill server
                    mismatches[address] = mismatch
            else:
                ready.update(fit)
                remaining += rest
                continue
        remaining += [request for request in requests if _held(request.kv_receiver, mismatch)]
    return ready, remaining


def _held(receiver: Any, mismatch: _Mismatch) -> bool:
    """Refuse a request, or hold it while its prefill server is being notified; True while it is held.

    The request fails like one whose prefill server does not answer, with our text.
    """
    if receiver is None:  # SGLang has dropped the request meanwhile
        return False
    now = time.monotonic()
    refusal = _refusals.get(receiver)
    if refusal is None:
        refusal = _refusals[receiver] = _Refusal(since=now, tell_at=now)
        metrics.failed("peer_mismatch", f"room {receiver.bootstrap_room}: {mismatch.text}")
        # SGLang fails this rank's request too if another rank's two seconds end first; that failure needs the
        # text.
        receiver.kv_mgr.record_failure(receiver.bootstrap_room, mismatch.text)
    if now >= refusal.tell_at:
        refusal.tell_at = now + _TOLD_EVERY_SECONDS
        receiver.bootstrap_infos = mismatch.ranks
        receiver._send_abort_notification()
    if now < refusal.since + _HELD_SECONDS and mismatch.ranks:
        return True
    receiver.abort()
    receiver.kv_mgr.record_failure(receiver.bootstrap_room, mismatch.text)
    return False


def _ranks(requests: list[Any]) -> list[dict[str, Any]]:
    """Addresses of all ranks of the requests' prefill server; fewer or none if that server stops answering.

    All ranks are notified, whichever of them has the request; the others ignore its abort.
    """
    receiver = next((request.kv_receiver for request in requests if request.kv_receiver is not None), None)
    if receiver is None:
        return []
    sizes = receiver._get_bootstrap_info_from_server(-1, -1, -1, -1)
    if sizes is None:
        return []
    ranges = (range(sizes[f"{kind}_size"]) for kind in ("dp", "attn_cp", "attn_tp", "pp"))
    ranks: list[dict[str, Any]] = []
    for rank in itertools.product(*ranges):
        found = receiver._get_bootstrap_info_from_server(*rank)
        if found is None:
            return ranks
        ranks.append(found)
    return ranks


_CONN = "sglang.srt.disaggregation.common.conn"

#: Function of SGLang -> hook around it.
HOOKS: Mapping[str, Callable] = {
    f"{_CONN}.CommonKVManager.try_ensure_parallel_info": _try_ensure_parallel_info,
    "sglang.srt.disaggregation.decode.DecodePreallocQueue._ensure_prefill_info": _ensure_prefill_info,
}
