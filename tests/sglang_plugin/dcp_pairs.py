"""Requests of a prefill and a decode server, of which one or both share rows over ranks (`--dcp-size`).

SGLang's managers, senders and receivers for Mooncake, with their threads and sockets; only the copy between
machines is replaced, by `ctypes.memmove` between regions that both sides have registered.
"""

import ctypes
import itertools
import time

import numpy as np
import torch
from managers import pool_of
from pools import GUARD, LAYERS

_numbers, _engines = itertools.count(1), {}


class Engine:
    """Mooncake's transfer engine of one process, to peers in the same process."""

    def __init__(self):
        self.session, self.regions, self.sent = f"127.0.0.1:{next(_numbers)}", [], []
        _engines[self.session] = self

    def get_session_id(self):
        return self.session

    def batch_register(self, pointers, lengths):
        self.regions += zip(pointers, lengths, strict=True)

    def batch_deregister(self, pointers):
        self.regions.clear()

    def holds(self, pointer, length):
        return any(p <= pointer and pointer + length <= p + size for p, size in self.regions)

    def batch_transfer_sync(self, session, sources, targets, lengths):
        peer = _engines[session]
        for source, target, length in zip(sources, targets, lengths, strict=True):
            if not (length > 0 and self.holds(source, length) and peer.holds(target, length)):
                return -1
            ctypes.memmove(target, source, length)
            self.sent.append((source, length))
        return 0


def rank_of(manager_of, monkeypatch, mode, layout, page_size, pages, device, dcp_size, **more):
    """A rank's manager of Mooncake, and its pools, filled with other bytes on each side.

    They are a target's, and a draft's with all rows.
    """
    from sglang.srt.disaggregation.mooncake import conn

    monkeypatch.setattr(conn, "get_mooncake_transfer_engine", Engine)
    of_both = {"pages": pages, "device": device}
    pool = pool_of(layout, page_size=page_size, **of_both)
    draft = pool_of(layout, page_size=page_size * dcp_size, layers=1, dcp_replicated=dcp_size > 1, **of_both)
    for layer in (*pool.kv_buffer, *draft.kv_buffer):
        rows = layer.view(torch.uint8)
        random = torch.randint(0, 256, rows.shape, dtype=torch.uint8)
        rows.copy_(random if mode == "prefill" else torch.full_like(random, GUARD))
    # With roles that may change, a manager's threads end when it does.
    more |= {"manager": conn.MooncakeKVManager, "enable_pd_role_switch": True, "dcp_size": dcp_size}
    return manager_of(mode, pool, draft=draft, **more), (pool, draft)


def until(poll, wanted):
    from sglang.srt.disaggregation.base.conn import KVPoll

    ends = time.monotonic() + 30
    while (found := poll()) != getattr(KVPoll, wanted):
        assert found != KVPoll.Failed
        assert time.monotonic() < ends, (found, wanted)
        time.sleep(0.005)


def transferred(bootstrap, prefill, decode, room, chunks, targets, prefix):
    """One request: `chunks` of (pages, tokens) of each prefill rank, pages of each decode rank."""
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVReceiver, MooncakeKVSender

    receivers = []
    for manager in decode:
        assert manager.try_ensure_parallel_info(bootstrap)
        receivers.append(MooncakeKVReceiver(manager, bootstrap, room))
        receivers[-1].init(0)
        receivers[-1].send_metadata(targets, aux_index=1, decode_prefix_len=prefix)
    senders = [MooncakeKVSender(manager, bootstrap, room) for manager in prefill]
    for sender in senders:
        until(sender.poll, "WaitingForInput")
        sender.init(sum(len(pages) for pages, _ in chunks), aux_index=0)
        for pages, tokens in chunks:
            sender.send(pages, num_kv_tokens=tokens)
    for one in (*senders, *receivers):
        until(one.poll, "Success")


def rows_of(pools):
    """All rows of each layer, on the host, `[slots, row bytes]`."""
    return [layer.view(torch.uint8).flatten(1).cpu().numpy() for pool in pools for layer in pool.kv_buffer]


def check_relayout(
    manager_of, bootstrap, monkeypatch, device, layout, page, prefill_ranks, decode_ranks, dcp, prefix
):
    """Send a request behind `prefix` tokens that the decode server has, in two chunks; tokens that were sent.

    Its length is a multiple neither of `dcp` nor of a page.
    """
    tokens, wide = 2 * page * dcp + page + page // 2 + 1, page * dcp
    count = -(-tokens // page)
    order = np.random.default_rng(3)
    sources = order.permutation(np.arange(1, count + 2, dtype=np.int32))[:count]
    targets = order.permutation(np.arange(1, 5, dtype=np.int32))[: -(-tokens // wide)]
    prefill, decode = (
        [
            rank_of(
                manager_of, monkeypatch, mode, layout, page, pages, device,
                rank=rank, tp_size=ranks, dcp_size=size,
            )
            for rank in range(ranks)
        ]
        for mode, pages, ranks, size in (
            ("prefill", count + 2, prefill_ranks, 1), ("decode", 5, decode_ranks, dcp)
        )
    )  # fmt: skip
    for _, both in prefill[1:]:  # ranks of a server without --dcp-size have the same rows
        for pool, of_first in zip(both, prefill[0][1], strict=True):
            for layer, first in zip(pool.kv_buffer, of_first.kv_buffer, strict=True):
                layer.view(torch.uint8).copy_(first.view(torch.uint8))
    chunks = [(sources[: page + 1], (page + 1) * page)] if page < 4 else [(sources[:1], page)]
    sent = len(chunks[0][0])
    chunks.append((sources[sent:], tokens - sent * page))
    managers = ([manager for manager, _ in side] for side in (prefill, decode))
    transferred(bootstrap, *managers, 7, chunks, targets, prefix)
    positions = np.arange(tokens)
    there = sources[positions // page] * page + positions % page
    slots = targets[positions // wide] * wide + positions % wide
    for rank, (_, both) in enumerate(decode):
        for n, (stored, found) in enumerate(zip(rows_of(prefill[0][1]), rows_of(both), strict=True)):
            spread = dcp if n < LAYERS else 1
            own = slots % spread == rank % spread
            wanted = np.full_like(found, GUARD)
            wanted[slots[own] // spread] = stored[there[own]]
            assert np.array_equal(found, wanted), (rank, n)
    return tokens, [manager for manager, _ in prefill]
