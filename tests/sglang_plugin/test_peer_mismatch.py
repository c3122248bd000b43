"""Requests of a prefill server with other rows, through SGLang's queue, receivers and sockets."""

import time
from types import SimpleNamespace

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


def told(manager):
    """Rooms that a prefill server's rank is told to abort, in order."""
    from sglang.srt.disaggregation.common.conn import AbortNotification

    rooms = []
    while manager.server_socket.poll(200):
        notification = AbortNotification.from_zmq(manager.server_socket.recv_multipart())
        rooms.append(notification.room)
    return rooms


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

    prefill = manager_of("prefill", pool_of("fp8"))
    decode = Decode(manager_of("decode", pool_of("fp4")))
    one, two = (decode.request(bootstrap, room) for room in (71, 72))
    assert decode.ensure(**{bootstrap: [one]}) == ({}, [one])
    assert told(prefill) == [71]
    # One message per interval and request; a later request is announced separately.
    assert decode.ensure(**{bootstrap: [one, two]}) == ({}, [one, two])
    assert told(prefill) == [72]
    time.sleep(peer_mismatch._TOLD_EVERY_SECONDS)
    assert decode.ensure(**{bootstrap: [one, two]}) == ({}, [one, two])
    assert told(prefill) == [71, 72]

    monkeypatch.setattr(peer_mismatch, "_HELD_SECONDS", 0)
    assert decode.ensure(**{bootstrap: [one, two]}) == ({}, [])
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
    prefill = manager_of("prefill", pool_of("fp8"))
    decode = Decode(manager_of("decode", pool_of("fp4")))
    with monkeypatch.context() as patched:
        patched.setattr(peer_mismatch, "_ranks", lambda requests: [])
        assert decode.ensure(**{bootstrap: [decode.request(bootstrap, 71)]}) == ({}, [])
    request = decode.request(bootstrap, 72)
    assert decode.ensure(**{bootstrap: [request]}) == ({}, [request])
    assert told(prefill) == [72]


@pytest.mark.parametrize("layouts", [("bf16", "bf16"), ("fp4", "fp4")])
def test_other_differences_cost_the_requests_of_that_server_only(
    manager_of, bootstrap, monkeypatch, counted, layouts
):
    """SGLang raises RuntimeError for a page size, and an AssertionError for pipeline stages."""
    manager_of("prefill", pool_of(layouts[0]))
    manager = manager_of("decode", pool_of(layouts[1]))
    monkeypatch.setattr(peer_mismatch, "_HELD_SECONDS", 0)
    monkeypatch.setattr(manager, "pp_size", 3)
    assert Decode(manager).ensure(**{bootstrap: [Decode(manager).request(bootstrap, 71)]}) == ({}, [])
    ((kind, text),) = counted
    assert kind == "peer_mismatch"
    assert "Decode pp size (3)" in text


def test_a_prefill_server_that_fits_is_ready_beside_one_that_does_not(manager_of, bootstrap, counted):
    manager_of("prefill", pool_of("fp4"))
    decode = Decode(manager_of("decode", pool_of("fp4")))
    wrong, fit = decode.request("127.0.0.1:9", 71), decode.request(bootstrap, 72)
    until = time.monotonic() + 10
    mismatch = peer_mismatch._Mismatch("of another layout", [], until)
    peer_mismatch._mismatches[decode.queue.kv_manager] = {"127.0.0.1:9": mismatch}
    # No ranks have to be told, so the request is not held.
    assert decode.ensure(**{"127.0.0.1:9": [wrong], bootstrap: [fit]}) == ({bootstrap: [fit]}, [])
    assert len(counted) == 1


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


def test_a_request_that_sglang_has_dropped_is_not_counted(manager_of, bootstrap, counted):
    manager_of("prefill", pool_of("fp8"))
    decode = Decode(manager_of("decode", pool_of("fp4")))
    assert decode.ensure(**{bootstrap: [SimpleNamespace(kv_receiver=None)]}) == ({}, [])
    assert counted == []
