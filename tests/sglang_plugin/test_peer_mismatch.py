"""Requests of a prefill server with other rows, through SGLang's queue, receivers and sockets."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit
from weakref import WeakSet

import pytest
from managers import STRINGS, pool_of

from sgl_kvpool.sglang_plugin.hooks import peer_mismatch


class Decode:
    """A decode server's queue, with the attributes that `_ensure_prefill_info` reads."""

    def __init__(self, manager):
        from sglang.srt.disaggregation.decode import DecodePreallocQueue

        self.queue = object.__new__(DecodePreallocQueue)
        vars(self.queue).update(
            kv_manager=manager,
            _ensure_last_attempt_time={},
            _ensure_retry_count={},
            _ensure_retry_interval=0.0,
            _max_ensure_retries=3,
        )

    def request(self, address, room):
        from sglang.srt.disaggregation.common.conn import CommonKVReceiver

        class Receiver(CommonKVReceiver):
            """Without the methods that engines add, which are not called."""

            send_metadata = None

        Receiver.__abstractmethods__ = frozenset()
        return SimpleNamespace(kv_receiver=Receiver(self.queue.kv_manager, address, room))

    def ensure(self, **requests):
        return self.queue._ensure_prefill_info({address: list(some) for address, some in requests.items()})


def told(manager, *rooms, seconds=5):
    """Rooms that a prefill server's rank is told to abort, in order, until it was told all of `rooms`."""
    from sglang.srt.disaggregation.common.conn import AbortNotification

    found = []
    until = time.monotonic() + seconds
    while time.monotonic() < until and not (rooms and set(rooms) <= set(found)):
        if manager.server_socket.poll(50):
            found.append(AbortNotification.from_zmq(manager.server_socket.recv_multipart()).room)
    return found


@pytest.fixture(autouse=True)
def _no_other_notifiers(monkeypatch):
    """Threads of earlier tests run for ten seconds, and only some may run at a time."""
    monkeypatch.setattr(peer_mismatch, "_notifiers", WeakSet())


@pytest.fixture
def slow_peer():
    """`slow_peer(manager, seconds, **fields)`: address of a prefill server that answers lookups that slowly.

    Every rank has the address of `manager`. Returns the address and the list of ranks that were looked up.
    """
    servers = []

    def start(manager, seconds, **fields):
        asked = []
        sizes = {"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1, **fields}
        described = {
            **sizes, "page_size": manager.kv_args.page_size, "follow_bootstrap_room": True,
            "kv_cache_dtype": fields.get("kv_cache_dtype", manager.kv_cache_dtype_str),
        }  # fmt: skip

        here = {"rank_ip": manager.local_ip, "rank_port": manager.rank_port}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                query = parse_qs(urlsplit(self.path).query)
                rank = tuple(int(value) for (value,) in query.values())
                asked.append(rank)
                time.sleep(seconds)
                found = described if min(rank) < 0 else here
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(found).encode())

            def log_message(self, *_):
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"127.0.0.1:{servers[-1].server_port}", asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def counted(monkeypatch):
    """Failures that are counted: (kind, text)."""
    found = []
    monkeypatch.setattr(peer_mismatch.metrics, "failed", lambda kind, what: found.append((kind, what)))
    return found


def test_a_request_is_held_while_its_prefill_server_is_told_and_then_fails(
    manager_of, bootstrap, monkeypatch, counted
):
    from sglang.srt.disaggregation.base.conn import KVPoll
    from sglang.srt.disaggregation.common.conn import KVTransferError

    now = 1000.0
    clock = SimpleNamespace(monotonic=lambda: now, sleep=time.sleep)
    monkeypatch.setattr(peer_mismatch, "time", clock)
    prefill = manager_of("prefill", pool_of("fp8"))
    decode = Decode(manager_of("decode", pool_of("fp4")))
    one, two = (decode.request(bootstrap, room) for room in (71, 72))
    assert decode.ensure(**{bootstrap: [one]}) == ({}, [one])
    assert set(told(prefill, 71)) == {71}
    # A later request is announced too, and both again at every interval.
    assert decode.ensure(**{bootstrap: [one, two]}) == ({}, [one, two])
    assert set(told(prefill, 72)) <= {71, 72}
    assert told(prefill, 71, 72, seconds=1).count(71) == 1

    now = 1000.0 + peer_mismatch._HELD_SECONDS
    assert decode.ensure(**{bootstrap: [one, two]}) == ({}, [])
    told(prefill, seconds=2 * peer_mismatch._TOLD_EVERY_SECONDS)  # what is on its way
    assert told(prefill, seconds=3 * peer_mismatch._TOLD_EVERY_SECONDS) == []
    for request in (one, two):
        assert request.kv_receiver.conclude_state == KVPoll.Failed
        with pytest.raises(
            KVTransferError, match=r"KV cache layout mismatch: .* stores rows of layout fp8 \("
        ):
            request.kv_receiver.failure_exception()
    # Each request is counted once, however often its prefill server was told.
    assert [(kind, what.split(":")[0]) for kind, what in counted] == [
        ("peer_mismatch", "room 71"),
        ("peer_mismatch", "room 72"),
    ]


def test_a_request_that_another_rank_fails_has_the_text(manager_of, bootstrap, counted):
    """Each rank times a held request by its own clock; the first to fail it makes SGLang fail it on all."""
    from sglang.srt.disaggregation.common.conn import KVTransferError

    manager_of("prefill", pool_of("fp8"))
    decode = Decode(manager_of("decode", pool_of("fp4")))
    request = decode.request(bootstrap, 71)
    assert decode.ensure(**{bootstrap: [request]}) == ({}, [request])
    with pytest.raises(KVTransferError, match="KV cache layout mismatch: ") as error:
        request.kv_receiver.failure_exception()
    assert not error.value.is_from_another_rank


def test_a_prefill_server_whose_ranks_do_not_answer_is_asked_again(
    manager_of, bootstrap, monkeypatch, counted
):
    """Otherwise requests of the next ten seconds would fail without a message to their prefill server."""
    from sglang.srt.disaggregation.common.conn import CommonKVReceiver

    prefill = manager_of("prefill", pool_of("fp8"))
    decode = Decode(manager_of("decode", pool_of("fp4")))
    with monkeypatch.context() as patched:
        patched.setattr(CommonKVReceiver, "_get_bootstrap_info_from_server", lambda *_: None)
        silent = decode.request(bootstrap, 71)
        decode.ensure(**{bootstrap: [silent]})
        (mismatch,) = peer_mismatch._mismatches[decode.queue.kv_manager].values()
        mismatch.notifier.join(5)
    request = decode.request(bootstrap, 72)
    assert decode.ensure(**{bootstrap: [silent, request]}) == ({}, [silent, request])
    assert set(told(prefill, 72)) == {72}


def test_a_slow_prefill_server_of_64_ranks_costs_the_scheduler_one_lookup(
    manager_of, bootstrap, slow_peer, counted
):
    """Its request fails after two seconds; all ranks are notified when their addresses are known."""
    prefill = manager_of("prefill", pool_of("fp8"))
    decode = Decode(manager_of("decode", pool_of("fp4")))
    address, asked = slow_peer(prefill, 0.03, attn_tp_size=8, dp_size=8)
    request, began = decode.request(address, 71), time.monotonic()
    assert decode.ensure(**{address: [request]}) == ({}, [request])
    assert len(asked) < 16  # 66 if the scheduler waited for the addresses of all ranks
    remaining = [request]
    while remaining:
        _, remaining = decode.ensure(**{address: remaining})
        time.sleep(0.05)
    assert 2 <= time.monotonic() - began < 4
    found = []
    while len(found) < 64 and time.monotonic() < began + 30:
        found += told(prefill, 71)
    assert found == [71] * 64
    assert len(asked) == len({*asked}) + 1 == 66  # SGLang and we ask for the sizes


@pytest.mark.parametrize("seconds", [0.0, 3.0])
def test_a_prefill_server_whose_ranks_do_not_exist_is_bounded(
    manager_of, bootstrap, slow_peer, counted, monkeypatch, seconds
):
    """Nobody receives at its ranks' addresses: ZeroMQ keeps 1000 messages; then each waits for a second."""
    from sglang.srt.disaggregation.common.conn import CommonKVReceiver

    prefill = manager_of("prefill", pool_of("fp8"))
    decode = Decode(manager_of("decode", pool_of("fp4")))
    address, _ = slow_peer(prefill, 0.0)
    sent = []

    def send(receiver):
        sent.append(receiver.bootstrap_room)
        time.sleep(seconds)

    monkeypatch.setattr(CommonKVReceiver, "_send_abort_notification", send)
    requests = [decode.request(address, room) for room in range(71, 171)]
    began = time.monotonic()
    _, remaining = decode.ensure(**{address: requests})
    while remaining:
        _, remaining = decode.ensure(**{address: remaining})
        time.sleep(0.05)
    assert time.monotonic() - began < 4
    assert sent


@pytest.mark.parametrize(
    "sizes", [{"attn_tp_size": 10**9}, {"dp_size": 33, "pp_size": 16}, {"pp_size": -1}, {"dp_size": 2.5}]
)
def test_sizes_of_a_peer_decide_no_work(manager_of, bootstrap, slow_peer, counted, caplog, sizes):
    prefill = manager_of("prefill", pool_of("fp8"))
    decode = Decode(manager_of("decode", pool_of("fp4")))
    address, asked = slow_peer(prefill, 0.0, **sizes)
    request = decode.request(address, 71)
    decode.ensure(**{address: [request]})
    (mismatch,) = peer_mismatch._mismatches[decode.queue.kv_manager].values()
    mismatch.notifier.join(5)
    assert decode.ensure(**{address: [request]}) == ({}, [])
    assert asked == [(-1, -1, -1, -1)] * 2
    ((name, size), *_) = sizes.items()
    assert "it reports dp_size=" in caplog.text
    assert f"{name}={size}" in caplog.text
    # It is remembered, though there is no rank to notify.
    assert decode.ensure(**{address: [decode.request(address, 72)]}) == ({}, [])
    assert len(asked) == 2


@pytest.mark.parametrize(
    "fields",
    [{"attn_tp_size": 0}, {"dp_size": 0}, {"dsv41_spec_layout": [1]}, {"kv_layout": "\ud800"}],
    ids=str,
)
def test_a_matching_peer_with_a_wrong_field_fails_its_own_requests(
    manager_of, bootstrap, slow_peer, counted, fields
):
    """SGLang divides by the sizes and asks the layout for its keys, in the scheduler's loop."""
    prefill = manager_of("prefill", pool_of("fp4"))
    decode = Decode(manager_of("decode", pool_of("fp4")))
    address, _ = slow_peer(prefill, 0.0, **fields)
    request = decode.request(address, 71)
    decode.ensure(**{address: [request]})
    (mismatch,) = peer_mismatch._mismatches[decode.queue.kv_manager].values()
    mismatch.notifier.join(5)
    assert decode.ensure(**{address: [request]}) == ({}, [])
    assert counted[0][0] == "peer_mismatch"
    assert counted[0][1].isascii()
    assert address not in decode.queue.kv_manager.prefill_info_table


@pytest.mark.parametrize(
    ("differs", "text"),
    [
        ("page_size", "prefill server has page_size=4, but decode server has page_size=3"),
        ("pp_size", "Decode pp size (3)"),
    ],
)
@pytest.mark.parametrize("layout", ["bf16", "fp4"])
def test_other_differences_cost_the_requests_of_that_server_only(
    manager_of, bootstrap, monkeypatch, counted, layout, differs, text
):
    """SGLang raises RuntimeError for a page size, and an AssertionError for pipeline stages."""
    manager_of("prefill", pool_of(layout))
    decode = Decode(manager_of("decode", pool_of(layout)))
    manager = decode.queue.kv_manager
    fit = decode.request(bootstrap, 70)
    assert decode.ensure(**{bootstrap: [fit]}) == ({bootstrap: [fit]}, [])
    # The same server at another address, which SGLang takes for another server.
    other = bootstrap.replace("127.0.0.1", "localhost")
    monkeypatch.setattr(manager.kv_args if differs == "page_size" else manager, differs, 3)
    monkeypatch.setattr(peer_mismatch, "_HELD_SECONDS", 0)
    wrong = decode.request(other, 71)
    assert decode.ensure(**{other: [wrong], bootstrap: [fit]}) == ({bootstrap: [fit]}, [])
    ((kind, found),) = counted
    assert kind == "peer_mismatch"
    # SGLang's text about rows without a layout has no address.
    assert found.startswith("room 71: " + ("" if layout == "bf16" else f"the prefill server at {other}: "))
    assert text in found


def test_a_prefill_server_is_asked_again_later(manager_of, bootstrap, monkeypatch, counted):
    """It may have been restarted with the right layout at the same address."""
    manager_of("prefill", pool_of("fp8"))
    decode = Decode(manager_of("decode", pool_of("fp4")))
    monkeypatch.setattr(peer_mismatch, "_HELD_SECONDS", 0)
    assert decode.ensure(**{bootstrap: [decode.request(bootstrap, 71)]}) == ({}, [])
    # Represents a restart: SGLang's bootstrap server keeps the first registration.
    monkeypatch.setattr(decode.queue.kv_manager, "kv_cache_dtype_str", STRINGS["fp8"])
    assert decode.ensure(**{bootstrap: [decode.request(bootstrap, 72)]}) == ({}, [])
    (mismatch,) = peer_mismatch._mismatches[decode.queue.kv_manager].values()
    monkeypatch.setattr(peer_mismatch.time, "monotonic", lambda: mismatch.until)
    request = decode.request(bootstrap, 73)
    assert decode.ensure(**{bootstrap: [request]}) == ({bootstrap: [request]}, [])
    assert len(counted) == 2
