"""Hooks of decode servers: a prefill server with other rows fails only its own requests.

Without these hooks, SGLang's scheduler waits for the answer of a prefill server that a request names, and
ends if the rows differ; the prefill server, and a router's client, wait for the request for 300 s
(`SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT`). Here, one thread asks prefill servers and notifies them.
"""

import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from sgl_kvpool import metrics
from sgl_kvpool.sglang_plugin.registry import around, uses
from sgl_kvpool.srt.peers import PeerMismatch, ask, check_peer, notify_of_refusal, short, start

#: A mismatch is remembered (the server may be restarted), and its first requests are held, so that all ranks
#: of this server know why they fail.
_REMEMBERED_SECONDS, _HELD_SECONDS = 10.0, 1.0

_CONN, _GROUP = "sglang.srt.disaggregation.common.conn", "disaggregation"
uses(f"{_CONN}.CommonKVManager.record_failure", _GROUP, takes=("self", "bootstrap_room", "failure_reason"))
uses(f"{_CONN}.CommonKVReceiver.abort", _GROUP, takes=("self",))


@dataclass
class _Peer:
    """A prefill server since it was asked, or since it was refused for the reason in `text` (monotonic)."""

    answer: Future[dict[str, Any]]
    since: float
    text: str = ""


#: Prefill servers that are not known to match, by address.
_peers: dict[str, _Peer] = {}


def _peer(address: str) -> _Peer:
    if address not in _peers:
        _peers[address] = _Peer(start(ask(address, -1, -1, -1, -1)), time.monotonic())
    return _peers[address]


@around("sglang.srt.disaggregation.decode.DecodePreallocQueue._ensure_prefill_info", _GROUP)
def _ensure_prefill_info(original, self, addr_to_reqs):
    """Fail the requests of a mismatched prefill server; those of one that has not answered wait."""
    ready: dict[str, list[Any]] = {}
    remaining: list[Any] = []
    now = time.monotonic()
    for old in [address for address, peer in _peers.items() if now >= peer.since + _REMEMBERED_SECONDS]:
        del _peers[old]
    for address, requests in addr_to_reqs.items():
        peer = None if address in self.kv_manager.prefill_info_table else _peer(address)
        fit, rest = {}, requests
        if peer is not None and peer.text:
            rest = [request for request in requests if _holds(peer, request.kv_receiver)]
        elif peer is None or peer.answer.done():
            with suppress(PeerMismatch):  # its requests are refused from the next call on
                fit, rest = original(self, {address: requests})
        ready.update(fit)
        remaining += rest
    return ready, remaining


def _holds(peer: _Peer, receiver: Any) -> bool:
    """Fail a request of a refused prefill server; True while it is held."""
    if receiver is None:  # SGLang has dropped the request meanwhile
        return False
    manager, room = receiver.kv_mgr, receiver.bootstrap_room
    is_held = time.monotonic() < peer.since + _HELD_SECONDS
    if not is_held:
        metrics.failed("peer_mismatch", f"room {room}: {peer.text}")
        receiver.abort()
        start(notify_of_refusal(receiver.bootstrap_addr, peer.answer, manager, room))
    manager.record_failure(room, peer.text)
    return is_held


@around(f"{_CONN}.CommonKVManager.try_ensure_parallel_info", _GROUP)
def _try_ensure_parallel_info(original, self, bootstrap_addr):
    """Raise PeerMismatch for a prefill server that does not match, or does not report its rows."""
    from sglang.srt.disaggregation.common import conn

    if bootstrap_addr in self.prefill_info_table:
        return True
    peer, requests = _peer(bootstrap_addr), conn.requests
    where = f"the prefill server at {short(bootstrap_addr)}"
    try:
        if bootstrap_addr != short(bootstrap_addr):
            raise ValueError("this is no address")
        if peer.answer.exception() is None:
            check_peer(self, where, peer.answer.result())
        answered = SimpleNamespace(status_code=200, json=peer.answer.result)
        # SGLang's lookup reads the answer; its other threads use other names of the module.
        conn.requests = SimpleNamespace(**{**vars(requests), "get": lambda *_, **__: answered})
        known = original(self, bootstrap_addr)
        del _peers[bootstrap_addr]  # which is known, or is asked again
        return known
    except Exception as error:  # a wrong field fails anywhere in SGLang's code, also with a MemoryError
        if not isinstance(error, PeerMismatch):
            error = PeerMismatch(f"{where}: {short(str(error) or repr(error))}")
        peer.text, peer.since = str(error), time.monotonic()
        raise error from None
    finally:
        conn.requests = requests
