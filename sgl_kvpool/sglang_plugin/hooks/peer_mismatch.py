"""Hooks of decode servers: a prefill server with other rows fails only its own requests.

Without these hooks, SGLang ends the decode server at the first request of such a prefill server. A decode
server learns of a prefill server from that request, so the mismatch cannot be found at start. SGLang does not
notify the prefill server, which holds the request, and with it the client behind a router, for
`SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT` (300 s).
"""

from __future__ import annotations

import itertools
import logging
import math
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from sgl_kvpool import metrics
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.sglang_plugin.hooks.disaggregation import MARK, ranks_name
from sgl_kvpool.sglang_plugin.options import LAYOUT
from sgl_kvpool.sglang_plugin.registry import around, uses

logger = logging.getLogger(__name__)

#: The two strings in SGLang's error for peers that differ.
_STRINGS = re.compile(r"kv_cache_dtype=(\S+?)[,.](?=\s)")

#: Numbers of ranks that a prefill server reports, in the order of a rank's address.
_SIZES = ("dp_size", "attn_cp_size", "attn_tp_size", "pp_size")

#: Characters of a peer's text that are repeated in messages.
_MOST_CHARACTERS = 400

#: Time for which a mismatched prefill server is not queried again; its operator may restart it.
_REMEMBERED_SECONDS = 10.0

#: Time for which a refused request is held, and interval at which its prefill server is notified meanwhile. A
#: prefill server forgets a notification for a request that is still in its own queue.
_HELD_SECONDS, _TOLD_EVERY_SECONDS = 2.0, 0.25

#: Ranks of a prefill server that are notified, each over a socket (ZeroMQ opens 1023), and prefill servers
#: that are notified at a time, each by a thread.
_MOST_RANKS, _MOST_NOTIFIERS = 512, 8

_CONN = "sglang.srt.disaggregation.common.conn"

uses(
    f"{_CONN}.CommonKVManager.record_failure",
    "disaggregation",
    takes=("self", "bootstrap_room", "failure_reason"),
)
uses(f"{_CONN}.CommonKVReceiver.abort", "disaggregation", takes=("self",))
uses(f"{_CONN}.CommonKVReceiver._send_abort_notification", "disaggregation", takes=("self", "force_arm"))
uses(
    f"{_CONN}.CommonKVReceiver._get_bootstrap_info_from_server",
    "disaggregation",
    takes=("self", "prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank"),
)
uses(
    f"{_CONN}.PrefillServerInfo.__annotations__",
    "disaggregation",
    members=(*_SIZES, "kv_cache_dtype", "kv_layout"),
)


class PeerMismatch(RuntimeError):
    """A prefill server does not match this decode server."""


@dataclass(frozen=True)
class _Mismatch:
    """Why a prefill server does not match, what notifies its ranks, and when this expires (monotonic)."""

    text: str
    notifier: _Notifier
    until: float


class _Notifier(threading.Thread):
    """Looks up the ranks of a mismatched prefill server, and notifies them of refused requests.

    All ranks are notified, whichever of them has the request; the others ignore its abort. Each lookup and
    each notification may take seconds if the peer is slow, so the scheduler does not wait for them.
    """

    def __init__(self, address: str, receiver: Any):
        super().__init__(name=f"kvpool-mismatch-{address}", daemon=True)
        self._address = address
        self._receiver = receiver
        self._lock = threading.Lock()
        #: Receivers of refused requests, and until when each is to be notified (monotonic).
        self._refused: dict[Any, float] = {}
        #: Whether the peer did not answer the lookup.
        self.is_unanswered = False

    def add(self, receiver: Any) -> None:
        """Notify the ranks of this request too."""
        with self._lock:
            self._refused[receiver] = math.inf

    def run(self) -> None:
        ranks = self._ranks(time.monotonic() + _REMEMBERED_SECONDS)
        ends = time.monotonic() + _REMEMBERED_SECONDS
        while ranks and ((receivers := self._to_notify()) or time.monotonic() < ends):
            for receiver in receivers:
                receiver.bootstrap_infos = ranks
                receiver._send_abort_notification()
            time.sleep(_TOLD_EVERY_SECONDS)

    def _to_notify(self) -> list[Any]:
        """Receivers of requests whose time since the first notification has not ended."""
        now = time.monotonic()
        with self._lock:
            self._refused = {
                receiver: min(until, now + _HELD_SECONDS)
                for receiver, until in self._refused.items()
                if now < until
            }
            return list(self._refused)

    def _ranks(self, until: float) -> list[dict[str, Any]]:
        """Addresses of all ranks; fewer or none if the server stops answering, or reports unusable sizes."""
        sizes = self._receiver._get_bootstrap_info_from_server(-1, -1, -1, -1)
        if sizes is None:
            self.is_unanswered = True
            return []
        found = {name: sizes.get(name) for name in _SIZES}
        if (
            not all(type(size) is int and size > 0 for size in found.values())
            or math.prod(found.values()) > _MOST_RANKS
        ):
            logger.warning(
                "sgl-kvpool: the prefill server at %s is not notified of refused requests: it reports %s, "
                "and at most %d ranks are notified",
                *(self._address, _listed(found), _MOST_RANKS),
            )
            return []
        ranks: list[dict[str, Any]] = []
        for rank in itertools.product(*map(range, found.values())):
            answer = self._receiver._get_bootstrap_info_from_server(*rank)
            if answer is None or time.monotonic() >= until:
                break
            ranks.append(answer)
        self.is_unanswered = not ranks
        return ranks


#: KV manager -> address of a prefill server -> mismatch.
_mismatches: WeakKeyDictionary[Any, dict[str, _Mismatch]] = WeakKeyDictionary()

#: Receiver of a refused request -> when it was refused (monotonic).
_refusals: WeakKeyDictionary[Any, float] = WeakKeyDictionary()

_notifiers: WeakSet[_Notifier] = WeakSet()


@around(f"{_CONN}.CommonKVManager.try_ensure_parallel_info", "disaggregation")
def _try_ensure_parallel_info(original, self, bootstrap_addr):
    """Raise PeerMismatch for a prefill server that does not match, or does not report its rows.

    SGLang's error for other rows names `--kv-cache-dtype`, which would not help, and SGLang accepts a peer
    that reports no dtype. Errors about page size, sizes of 0 or stages, some of which are failed assertions,
    also concern this prefill server only.
    """
    try:
        known = original(self, bootstrap_addr)
    except (ArithmeticError, AssertionError, AttributeError, RuntimeError) as error:
        strings = _STRINGS.findall(str(error))
        if len(strings) != 2 or not any(MARK in text for text in strings):
            text = _short(str(error))
            if MARK not in self.kv_cache_dtype_str:
                raise PeerMismatch(text) from error
            raise PeerMismatch(f"the prefill server at {bootstrap_addr}: {text}") from error
        prefill, decode = strings
        raise PeerMismatch(
            f"KV cache layout mismatch: the prefill server at {bootstrap_addr} stores {_described(prefill)}, "
            f"and this decode server stores {_described(decode)}. {_remedy(prefill, decode)}"
        ) from error
    info = self.prefill_info_table.get(bootstrap_addr)
    if known and info is not None:
        sizes = {name: getattr(info, name) for name in _SIZES}
        if min(sizes.values()) < 1:
            del self.prefill_info_table[bootstrap_addr]
            raise PeerMismatch(f"the prefill server at {bootstrap_addr} reports {_listed(sizes)}")
        if MARK in self.kv_cache_dtype_str and info.kv_cache_dtype is None:
            del self.prefill_info_table[bootstrap_addr]
            raise PeerMismatch(
                f"KV cache layout mismatch: the prefill server at {bootstrap_addr} does not report what rows "
                f"it stores, and this decode server stores {_described(self.kv_cache_dtype_str)}. "
                f"{_remedy('', self.kv_cache_dtype_str)}"
            )
        if self.kv_layout is None and info.kv_layout not in (None, ranks_name(self)):
            del self.prefill_info_table[bootstrap_addr]
            raise PeerMismatch(
                f"the prefill server at {bootstrap_addr} shares rows over {_short(str(info.kv_layout))}, and "
                f"this decode server over {ranks_name(self)}: SGLang sends to other ranks only what one rank "
                "has. Start the prefill server without --dcp-size, or both with the same ranks."
            )
    return known


def _layout_name(text: str) -> str | None:
    """Layout named in a string that peers compare; None for SGLang's own rows."""
    _, mark, rows = text.partition(MARK)
    return rows.partition("-")[0] if mark else None


def _listed(sizes: Mapping[str, Any]) -> str:
    return _short(", ".join(f"{name}={size!r}" for name, size in sizes.items()))


def _short(text: str) -> str:
    """The beginning of a text that a peer may have chosen, as one line that any encoding has."""
    text = text[:_MOST_CHARACTERS]
    return " ".join(text.encode("ascii", "backslashreplace").decode().split()) or repr(text)


def _described(text: str) -> str:
    name, text = _layout_name(text), _short(text)
    name = None if name is None else _short(name)
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


@around("sglang.srt.disaggregation.decode.DecodePreallocQueue._ensure_prefill_info", "disaggregation")
def _ensure_prefill_info(original, self, addr_to_reqs):
    """Fail the requests of a mismatched prefill server; the decode server continues to serve the others."""
    ready: dict[str, list[Any]] = {}
    remaining: list[Any] = []
    mismatches = _mismatches.setdefault(self.kv_manager, {})
    for address, requests in addr_to_reqs.items():
        mismatch = mismatches.get(address)
        if mismatch is None or time.monotonic() >= mismatch.until or mismatch.notifier.is_unanswered:
            mismatches.pop(address, None)
            try:
                fit, rest = original(self, {address: requests})
            except PeerMismatch as error:
                mismatch = _mismatch(address, str(error), requests)
                if mismatch is None:  # SGLang has dropped the requests meanwhile
                    continue
                for old in [old for old, one in mismatches.items() if time.monotonic() >= one.until]:
                    del mismatches[old]
                mismatches[address] = mismatch
            else:
                ready.update(fit)
                remaining += rest
                continue
        remaining += [request for request in requests if _held(request.kv_receiver, mismatch)]
    return ready, remaining


def _mismatch(address: str, text: str, requests: list[Any]) -> _Mismatch | None:
    """A new mismatch, whose notifier has started; None if none of the requests has a receiver."""
    receiver = next((request.kv_receiver for request in requests if request.kv_receiver is not None), None)
    if receiver is None:
        return None
    notifier = _Notifier(address, receiver)
    if sum(one.is_alive() for one in _notifiers) < _MOST_NOTIFIERS:
        _notifiers.add(notifier)
        notifier.start()
    return _Mismatch(text, notifier, time.monotonic() + _REMEMBERED_SECONDS)


def _held(receiver: Any, mismatch: _Mismatch) -> bool:
    """Refuse a request, or hold it while its prefill server is being notified; True while it is held.

    The request fails like one whose prefill server does not answer, with our text.
    """
    if receiver is None:  # SGLang has dropped the request meanwhile
        return False
    now = time.monotonic()
    since = _refusals.get(receiver)
    if since is None:
        since = _refusals[receiver] = now
        metrics.failed("peer_mismatch", f"room {receiver.bootstrap_room}: {mismatch.text}")
        # SGLang fails this rank's request too if another rank's two seconds end first; that failure needs the
        # text.
        receiver.kv_mgr.record_failure(receiver.bootstrap_room, mismatch.text)
        mismatch.notifier.add(receiver)
    if now < since + _HELD_SECONDS and mismatch.notifier.is_alive():
        return True
    receiver.abort_notified = True  # by the notifier; here, SGLang's `abort` could wait for the peer
    receiver.abort()
    receiver.kv_mgr.record_failure(receiver.bootstrap_room, mismatch.text)
    return False
