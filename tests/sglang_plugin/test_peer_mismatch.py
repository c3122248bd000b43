"""Requests of a prefill server with other rows, through SGLang's queue, receivers and sockets."""

import asyncio
import contextlib
import functools
import json
import logging
import threading
import time
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import pytest
from live_processes import holds
from managers import STRINGS, pool_of
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import AbortNotification, CommonKVReceiver, KVTransferError
from sglang.srt.disaggregation.decode import DecodePreallocQueue

from sgl_kvpool.sglang_plugin.hooks import peer_mismatch
from sgl_kvpool.srt import peers


class Decode:
    """A decode server's queue, with the attributes that `_ensure_prefill_info` reads."""

    def __init__(self, manager):
        self.queue = object.__new__(DecodePreallocQueue)
        vars(self.queue).update(kv_manager=manager, _ensure_last_attempt_time={}, _ensure_retry_count={})
        vars(self.queue).update(_ensure_retry_interval=0.0, _max_ensure_retries=3)

    def request(self, address, room):
        class Receiver(CommonKVReceiver):
            """Without the methods that engines add, which are not called."""

            send_metadata = None

        Receiver.__abstractmethods__ = frozenset()
        return SimpleNamespace(kv_receiver=Receiver(self.queue.kv_manager, address, room))

    def ensure(self, requests):
        """One call of the scheduler, which waits for no peer."""
        began = time.monotonic()
        found = self.queue._ensure_prefill_info({address: list(some) for address, some in requests.items()})
        assert time.monotonic() - began < 0.5
        return found

    def settled(self, requests, seconds=8):
        """Addresses whose requests go on, after the requests of the others have failed."""
        ready, until = {}, time.monotonic() + seconds
        while requests:
            assert time.monotonic() < until
            fit, rest = self.ensure(requests)
            ready.update(fit)
            requests = {a: left for a, some in requests.items() if (left := [r for r in some if r in rest])}
            time.sleep(0.02)
        return set(ready)


def told(manager, *rooms, seconds=5):
    """Rooms that a prefill server's rank is told to abort, in order, until it was told all of `rooms`."""
    found, until = [], time.monotonic() + seconds
    while time.monotonic() < until and not (rooms and set(rooms) <= set(found)):
        if manager.server_socket.poll(50):
            found.append(AbortNotification.from_zmq(manager.server_socket.recv_multipart()).room)
    return found


def failure(request):
    """The text with which SGLang fails a request."""
    with pytest.raises(KVTransferError) as error:
        request.kv_receiver.failure_exception()
    assert not error.value.is_from_another_rank
    return error.value.failure_reason


def logged(caplog):
    """What SGLang and we have logged; asyncio complains of bootstrap servers of tests before."""
    return [record.getMessage() for record in caplog.records if record.name != "asyncio"]


@pytest.fixture
def peer():
    """`peer(manager, **fields)`: address of a prefill server like `manager`'s but for `fields`, ranks asked.

    `drip` and `ranks_drip` are seconds before each byte of an answer about all ranks, and about one.
    """
    servers = []

    def start(manager, drip=0.0, ranks_drip=0.0, body=None, **fields):
        asked = []
        described = {
            **dict.fromkeys(peers.SIZES, 1), "page_size": manager.kv_args.page_size,
            "follow_bootstrap_room": True, "kv_cache_dtype": manager.kv_cache_dtype_str, **fields,
        }  # fmt: skip
        here = {"rank_ip": manager.local_ip, "rank_port": manager.rank_port}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                rank = tuple(int(value) for (value,) in parse_qs(urlsplit(self.path).query).values())
                asked.append(rank)
                answer, seconds = (described, drip) if min(rank) < 0 else (here, ranks_drip)
                text = (json.dumps(answer) if body is None or answer is here else body).encode()
                self.send_response(200)
                self.end_headers()
                with contextlib.suppress(OSError):  # the decode server has hung up
                    for part in [text[n : n + 1] for n in range(len(text))] if seconds else [text]:
                        time.sleep(seconds)
                        self.wfile.write(part)

            def log_message(self, *_):
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        servers[-1].daemon_threads, servers[-1].block_on_close = True, False
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"127.0.0.1:{servers[-1].server_port}", asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    """Failures that are counted: (kind, text), and no peers of another test."""
    found = []
    monkeypatch.setattr(peer_mismatch, "_peers", {})
    monkeypatch.setattr(peer_mismatch.metrics, "failed", lambda kind, what: found.append((kind, what)))
    return found


@pytest.fixture
def pair(manager_of):
    """A prefill server of other rows, and a decode server."""
    return manager_of("prefill", pool_of("fp8")), Decode(manager_of("decode", pool_of("fp4")))


def test_a_request_fails_and_its_prefill_server_is_told(pair, bootstrap, counted):
    prefill, decode = pair
    one, two = (decode.request(bootstrap, room) for room in (71, 72))
    began = time.monotonic()
    assert decode.settled({bootstrap: [one]}) == set()
    assert time.monotonic() - began >= peer_mismatch._HELD_SECONDS
    # The mismatch is remembered: a later request fails at once.
    assert decode.ensure({bootstrap: [two]}) == ({}, [])
    found = told(prefill, seconds=peers.TOLD_TIMES * peers.TOLD_EVERY_SECONDS + 1)
    assert found.count(71) == found.count(72) == peers.TOLD_TIMES
    for request in (one, two):
        assert request.kv_receiver.conclude_state == KVPoll.Failed
        assert "KV cache layout mismatch: " in (text := failure(request))
        assert " stores rows of layout fp8 (" in text
    # Each request is counted once, however often its prefill server was told.
    assert [(kind, what[:8]) for kind, what in counted] == [("peer_mismatch", f"room {n}:") for n in (71, 72)]


def test_a_request_that_another_rank_fails_has_the_text(pair, bootstrap):
    """Ranks of a decode server hear of a mismatch one by one; the first to fail a request fails it on all."""
    decode, until = pair[1], time.monotonic() + peer_mismatch._HELD_SECONDS / 2
    request = decode.request(bootstrap, 71)
    while time.monotonic() < until:
        assert decode.ensure({bootstrap: [request]}) == ({}, [request])
    assert failure(request).startswith("KV cache layout mismatch: ")


@pytest.mark.parametrize(("by_room", "ranks"), [(True, [71 % 4]), (False, [0, 1, 2, 3])])
def test_one_rank_of_each_group_that_may_have_a_request_is_told(pair, peer, by_room, ranks):
    """SGLang's prefill server fails a request on all attention ranks and stages if the first one fails it."""
    prefill, decode = pair
    address, asked = peer(prefill, dp_size=4, attn_tp_size=8, pp_size=2, follow_bootstrap_room=by_room)
    assert decode.settled({address: [decode.request(address, 71)]}) == set()
    assert told(prefill, 71) == [71]
    expected = [(-1, -1, -1, -1), *((rank, 0, 0, 0) for rank in ranks)]
    assert holds(lambda: len(asked) >= len(expected), 5)
    assert sorted(asked) == expected


@pytest.mark.parametrize("slow", [{"drip": 1.0}, {"drip": 600.0}, {"ranks_drip": 1.0}], ids=str)
def test_slow_peers_delay_nobody_else(pair, bootstrap, peer, monkeypatch, slow):
    """SGLang's request has a timeout for each read, which a byte a second never reaches."""
    prefill, decode = pair
    decode.queue._max_ensure_retries = 1
    monkeypatch.setattr(peers, "_ANSWER_SECONDS", 2.0)
    slow_ones = [peer(prefill, **slow)[0] for _ in range(12)]
    fit, _ = peer(decode.queue.kv_manager)
    requests = {a: [decode.request(a, 80 + n)] for n, a in enumerate([*slow_ones, fit, bootstrap])}
    began = time.monotonic()
    assert holds(lambda: fit in decode.ensure(requests)[0], 1)
    del requests[fit]
    assert decode.settled(requests) == set()
    assert time.monotonic() - began < 4
    assert told(prefill, 80 + len(slow_ones) + 1)
    assert sum(thread.name == "kvpool-peers" for thread in threading.enumerate()) == 1


def test_no_more_threads_can_be_started(pair, bootstrap, monkeypatch):
    """Neither asking a prefill server nor notifying one ends the scheduler's loop."""
    _, decode = pair
    asked, refused = decode.request(bootstrap, 71), decode.request("127.0.0.1:1", 72)
    peer_mismatch._peers["127.0.0.1:1"] = peer_mismatch._Peer(Future(), time.monotonic() - 5, "other rows")
    monkeypatch.setattr(peers, "_loop", functools.cache(peers._loop.__wrapped__))

    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert decode.settled({bootstrap: [asked], "127.0.0.1:1": [refused]}) == set()
    assert failure(refused) == "other rows"


def test_notifications_are_bounded(pair, bootstrap, caplog, monkeypatch):
    """Nobody takes them at the address of a rank that has ended; requests fail all the same."""
    prefill, decode = pair
    prefill.server_socket.close(0)
    monkeypatch.setattr(peers, "_notified", asyncio.Semaphore(3))
    requests = [decode.request(bootstrap, room) for room in range(71, 171)]
    assert decode.settled({bootstrap: requests}, seconds=4) == set()
    assert holds(lambda: caplog.text.count("is not notified of a refused request") >= 97, 5)
    assert "others are being notified" in caplog.text


@pytest.mark.parametrize(
    "answer",
    [
        *({"attn_tp_size": size} for size in (10**14, 10**9, -1, 0, 2.5, "8", True, None)),
        *({"page_size": size} for size in (1e999, "x")),
        {"dp_size": 333, "pp_size": 333},
        {"dsv41_spec_layout": [1]},
        {"kv_layout": "\ud800\x1b[2J"},
        {"\x1b[2J": 1},
        {"kv_cache_dtype": f"{STRINGS['fp4']}\n[2026] all good \x1b[2J"},
        *({"kv_cache_dtype": "kv_cache_dtype=" * times} for times in (3000, 30000)),
        *({"body": body} for body in ("[" * 50000, "9" * 50000, "null", "\x1b[2J")),
    ],
    ids=lambda answer: ascii(answer)[:60],
)
def test_whatever_a_peer_answers_fails_its_own_requests(manager_of, peer, caplog, answer):
    """SGLang makes lists of its numbers, and asks values for their keys, in the scheduler's loop."""
    caplog.set_level(logging.INFO)
    prefill, decode = manager_of("prefill", pool_of("fp4")), Decode(manager_of("decode", pool_of("fp4")))
    bad, fit = peer(prefill, **answer)[0], peer(prefill)[0]
    request = decode.request(bad, 71)
    assert decode.settled({bad: [request], fit: [decode.request(fit, 72)]}) == {fit}
    texts = [failure(request), *logged(caplog)]
    assert all(text.isascii() and text.isprintable() and len(text) < 1000 for text in texts)
    assert bad not in decode.queue.kv_manager.prefill_info_table


def test_an_address_that_is_none_is_not_logged_as_it_is(pair, caplog):
    """A client may choose the host of a prefill server."""
    _, decode = pair
    address = "attacker/?x=\n[2026] sgl-kvpool: all good \x1b[2J" + "A" * 100000 + ":8998"
    request = decode.request(address, 71)
    assert decode.settled({address: [request]}) == set()
    assert all(text.isprintable() and len(text) < 1500 for text in [failure(request), *logged(caplog)])


@pytest.mark.parametrize(
    ("differs", "text"),
    [
        ("page_size", "prefill server has page_size=4, but decode server has page_size=3"),
        ("pp_size", "Decode pp size (3)"),
    ],
)
@pytest.mark.parametrize("layout", ["bf16", "fp4"])
def test_differences_cost_that_server_only(
    manager_of, bootstrap, monkeypatch, counted, layout, differs, text
):
    """SGLang raises RuntimeError for a page size, and an AssertionError for pipeline stages."""
    manager_of("prefill", pool_of(layout))
    decode = Decode(manager_of("decode", pool_of(layout)))
    manager = decode.queue.kv_manager
    fit = decode.request(bootstrap, 70)
    assert decode.settled({bootstrap: [fit]}) == {bootstrap}
    # The same server at another address, which SGLang takes for another server.
    other = bootstrap.replace("127.0.0.1", "localhost")
    monkeypatch.setattr(manager.kv_args if differs == "page_size" else manager, differs, 3)
    wrong = decode.request(other, 71)
    assert decode.settled({other: [wrong], bootstrap: [fit]}) == {bootstrap}
    ((kind, found),) = counted
    assert kind == "peer_mismatch"
    assert found.startswith(f"room 71: the prefill server at {other}: ")
    assert text in found


def test_a_prefill_server_is_asked_again_later(pair, bootstrap, monkeypatch, counted):
    """It may have been restarted with the right layout at the same address."""
    _, decode = pair
    monkeypatch.setattr(peer_mismatch, "_HELD_SECONDS", 0)
    assert decode.settled({bootstrap: [decode.request(bootstrap, 71)]}) == set()
    # Represents a restart: SGLang's bootstrap server keeps the first registration.
    monkeypatch.setattr(decode.queue.kv_manager, "kv_cache_dtype_str", STRINGS["fp8"])
    assert decode.settled({bootstrap: [decode.request(bootstrap, 72)]}) == set()
    peer_mismatch._peers[bootstrap].since -= peer_mismatch._REMEMBERED_SECONDS
    assert decode.settled({bootstrap: [decode.request(bootstrap, 73)]}) == {bootstrap}
    assert len(counted) == 2
