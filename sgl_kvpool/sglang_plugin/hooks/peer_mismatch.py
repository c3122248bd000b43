"""Hooks of decode servers: a prefill server with other rows fails only its own requests.

Without these hooks, SGLang's scheduler waits for the answer of a prefill server that a request names, and
ends if the rows differ; the prefill server, and a router's client, wait for the request for 300 s
(`SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT`). Here, one thread asks prefill servers and notifies them.
"""

import asyncio
import functools
import ipaddress
import json
import logging
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import zmq

from sgl_kvpool import metrics
from sgl_kvpool.sglang_plugin.hooks.disaggregation import PeerMismatch, check_peer, short
from sgl_kvpool.sglang_plugin.registry import around, uses

logger = logging.getLogger(__name__)

#: How a request names a rank.
_RANK = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
#: Limits of an answer, and of names looked up and ranks notified at a time.
_ANSWER_SECONDS, _ANSWER_BYTES, _MOST_NOTIFIED = 5.0, 1 << 16, 256
#: A mismatch is remembered (the server may be restarted), and its first requests are held, so that all ranks
#: of this server know why they fail. A prefill server forgets what it hears of a request in its own queue.
_REMEMBERED_SECONDS, _HELD_SECONDS, _TOLD_TIMES, _TOLD_EVERY_SECONDS = 10.0, 1.0, 8, 0.25

_CONN, _GROUP = "sglang.srt.disaggregation.common.conn", "disaggregation"
uses(f"{_CONN}.CommonKVManager.record_failure", _GROUP, takes=("self", "bootstrap_room", "failure_reason"))
uses(f"{_CONN}.CommonKVReceiver.abort", _GROUP, takes=("self",))


@dataclass
class _Peer:
    """A prefill server since it was asked, or since it was refused for the reason in `text` (monotonic)."""

    answer: Future[dict[str, Any]]
    since: float
    text: str = ""
    has_warned: bool = False


#: Prefill servers that are not known to match, by address.
_peers: dict[str, _Peer] = {}
_notified = asyncio.Semaphore(_MOST_NOTIFIED)
_zmq = functools.cache(zmq.Context)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    # aiohttp looks up names in threads, and each question waits for one: a name may take long.
    loop.set_default_executor(ThreadPoolExecutor(_MOST_NOTIFIED, "kvpool-peer-names"))
    threading.Thread(target=loop.run_forever, name="kvpool-peers", daemon=True).start()
    return loop


def _begin(work: Coroutine[Any, Any, Any]) -> Future[Any]:
    """Do it in the thread; the future has the error if the thread cannot be started."""
    try:
        return asyncio.run_coroutine_threadsafe(work, _loop())
    except RuntimeError as error:  # no more threads
        work.close()
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return failed


async def _get(address: str, *rank: int) -> dict[str, Any]:
    """A prefill server's answer about a rank, or about all ranks if the numbers are -1."""
    import aiohttp

    limit = aiohttp.ClientTimeout(_ANSWER_SECONDS)
    url, query = f"http://{address}/route", dict(zip(_RANK, rank, strict=True))
    try:
        async with (
            aiohttp.ClientSession(timeout=limit, raise_for_status=True, trust_env=True) as session,
            session.get(url, params=query) as response,
        ):
            body = b""
            while part := await response.content.read(_ANSWER_BYTES + 1 - len(body)):
                body += part
        return {**json.loads(body)}
    except Exception as error:  # whatever a peer answers instead is no answer
        raise ValueError(short(str(error) or repr(error))) from None


async def _notify(address: str, peer: _Peer, room: int, message: list[bytes]) -> None:
    """Notify the first rank of each DP rank that may have a request; if it fails there, all ranks fail it."""
    from sglang.srt.utils.network import NetworkAddress

    async def notify(dp_rank: int) -> None:
        try:
            rank = await _get(address, dp_rank, 0, 0, 0)
            ip = str(ipaddress.ip_address(rank["rank_ip"]))  # a name could hold up ZeroMQ's thread
            with _zmq().socket(zmq.PUSH) as socket:
                socket.linger, socket.ipv6 = 1000, True
                socket.connect(NetworkAddress(ip, int(rank["rank_port"])).to_tcp())
                for _ in range(_TOLD_TIMES):
                    socket.send_multipart(message, zmq.DONTWAIT)
                    await asyncio.sleep(_TOLD_EVERY_SECONDS)
        finally:
            _notified.release()

    try:
        if _notified.locked():
            raise RuntimeError(f"{_MOST_NOTIFIED} ranks are being notified")
        dp_size, by_room = (peer.answer.result()[name] for name in ("dp_size", "follow_bootstrap_room"))
        dp_ranks = [room % dp_size] if by_room else range(min(dp_size, _MOST_NOTIFIED))
        told = [asyncio.create_task(notify(rank)) for rank in dp_ranks if await _notified.acquire()]
        await asyncio.gather(*told)
    except Exception as error:  # whatever a peer answers is its own failure
        if not peer.has_warned:  # a line for each request would fill the log
            text = "sgl-kvpool: the prefill server at %s is not notified of refused requests: %s"
            logger.warning(text, short(address), short(repr(error)))
        peer.has_warned = True


def _peer(address: str) -> _Peer:
    if address not in _peers:
        _peers[address] = _Peer(_begin(_get(address, -1, -1, -1, -1)), time.monotonic())
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
    from sglang.srt.disaggregation.common.conn import AbortNotification

    if receiver is None:  # SGLang has dropped the request meanwhile
        return False
    manager, room = receiver.kv_mgr, receiver.bootstrap_room
    is_held = time.monotonic() < peer.since + _HELD_SECONDS
    if not is_held:
        metrics.failed("peer_mismatch", f"room {room}: {peer.text}")
        receiver.abort()
        message = AbortNotification(room, manager.local_ip, manager.rank_port).to_zmq()
        _begin(_notify(receiver.bootstrap_addr, peer, room, message))
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
