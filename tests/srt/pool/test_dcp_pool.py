"""Decode context parallelism: SGLang's slots are spread over ranks, and a rank's pool holds its own rows."""

from contextlib import contextmanager

import codec_oracle as oracle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import ARRANGEMENTS, START, assert_holds, at, copied, device_pool, guard, layer, rows, values

pytestmark = pytest.mark.usefixtures("published")

PAGE = 4


@contextmanager
def as_rank(rank, ranks):
    from sglang.srt.runtime_context import get_parallel

    with get_parallel().override(attn_dcp_rank=rank, attn_dcp_size=ranks, dcp_enabled=True):
        yield


def pools_of(ranks, layout, arrangement, page_size=PAGE):
    pools = [device_pool(layout, arrangement, page_size=page_size) for _ in range(ranks)]
    guard(*pools)
    return pools


def write(pool, slots, nope, rope, *, per_step):
    """As a model's MHA form does, with SGLang's slots, or as our backend does, with a step's row numbers."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    from sgl_kvpool.srt.pool.row_pool import RowWriteLoc

    loc = RowWriteLoc(pool.rows_to_write(slots)) if per_step else KVWriteLoc(slots)
    pool.set_mla_kv_buffer(layer(START + 1), loc, nope, rope)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_slot_is_stored_once_and_read_where_it_is_stored(data):
    ranks = data.draw(st.integers(2, 5), label="ranks")
    layout = data.draw(st.sampled_from(oracle.LAYOUTS), label="layout")
    arrangement = data.draw(st.sampled_from(ARRANGEMENTS), label="arrangement")
    page = data.draw(st.sampled_from([1, 3, PAGE]), label="page")
    pools = pools_of(ranks, layout, arrangement, page)
    most = len(rows(pools[0])[0]) * page * ranks
    slots = data.draw(st.lists(st.integers(1, most - 1), min_size=1, max_size=9, unique=True), label="slots")
    nope, rope = values(len(slots))
    wanted = [copied(pool) for pool in pools]
    size = oracle.row_bytes(layout, 512, 64)
    expected = oracle.encode(nope.squeeze(1), rope.squeeze(1), layout, 512, 64, size)
    for slot, row in zip(slots, expected, strict=True):
        wanted[slot % ranks]["rows", START + 1][at(pools[0], slot // ranks)] = row
    per_step = data.draw(st.booleans(), label="per step")
    for rank, pool in enumerate(pools):
        with as_rank(rank, ranks):
            write(pool, torch.tensor([*slots, -1]), *(torch.cat([x, x[:1]]) for x in (nope, rope)),
                  per_step=per_step)  # fmt: skip
    for pool, bytes_of_pool in zip(pools, wanted, strict=True):
        assert_holds(pool, bytes_of_pool)
    for rank, pool in enumerate(pools):
        own = [number for number, slot in enumerate(slots) if slot % ranks == rank]
        with as_rank(rank, ranks):
            # SGLang translates slots into the rank's own before it reads them.
            found = pool.get_mla_kv_buffer(
                layer(START + 1), torch.tensor(slots, dtype=torch.int64)[own] // ranks, torch.float32
            )
            assert pool.page_stride.slots_per_row == ranks
        decoded = oracle.decode(expected[own], layout, 512, 64) if own else np.empty((0, 576))
        assert np.array_equal(torch.cat(found, -1).squeeze(1).numpy(), decoded)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("layout", oracle.LAYOUTS)
def test_retracted_tokens_come_back_on_every_rank(layout, arrangement, monkeypatch):
    """A request's tokens lie in pages of all ranks, in the order of their positions; here 11 of 12."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    ranks = 3
    slots = torch.cat([torch.arange(2, 3), torch.arange(1, 2)]).repeat_interleave(PAGE * ranks)
    slots = slots * PAGE * ranks + torch.arange(PAGE * ranks).repeat(2)
    slots, other = slots[:-1], (slots + PAGE * ranks)[:-1]
    nope, rope = values(len(slots))
    for rank in range(ranks):
        (pool,) = pools_of(1, layout, arrangement)
        with as_rank(rank, ranks):
            for number in range(3):
                pool.set_mla_kv_buffer(layer(START + number), slots, nope * (number + 1), rope)
            before = copied(pool)
            kept = pool.get_cpu_copy(slots)
            guard(pool)
            pool.load_cpu_copy(kept, other)
        own = slots[rank::ranks] // ranks
        for number in range(3):
            name = ("rows", START + number)
            found = copied(pool)[name][at(pool, other[rank::ranks] // ranks)]
            assert np.array_equal(found, before[name][at(pool, own)])
        changed = sum(int((part != 0xEE).any(-1).sum()) for part in copied(pool).values())
        assert changed == 3 * len(own)


def test_rows_are_not_moved_between_ranks():
    (pool,) = pools_of(1, "fp4", "layer_major")
    with as_rank(1, 2), pytest.raises(NotImplementedError, match="--dcp-size 2: .* different ranks"):
        pool.move_kv_cache(torch.tensor([4]), torch.tensor([7]))


@pytest.mark.parametrize("layout", ["bf16", "fp4"])
def test_combined_rows_are_refused_as_sglang_refuses_them(layout):
    (pool,) = pools_of(1, layout, "layer_major")
    combined = torch.cat(values(1), -1)
    with as_rank(1, 2), pytest.raises(AssertionError, match="no DCP-aware write path"):
        pool.set_kv_buffer(layer(START), torch.tensor([5]), combined, combined)


def test_kv_lens_count_a_ranks_own_positions():
    from types import SimpleNamespace

    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from sgl_kvpool.srt.attention.decode_verify import KVLens

    lengths, ranks, queries = [0, 1, 7, 8, 9, 301], 4, 3
    for mode, each in (("DECODE", 1), ("TARGET_VERIFY", queries)):
        total = torch.zeros(len(lengths) * each, dtype=torch.int64)
        for rank in range(ranks):
            lens = KVLens(len(lengths), queries, "cpu", rank=rank, ranks=ranks)
            batch = SimpleNamespace(
                batch_size=len(lengths), forward_mode=ForwardMode[mode], seq_lens=torch.tensor(lengths),
                req_pool_indices=torch.arange(6), spec_info=SimpleNamespace(draft_token_num=queries),
            )  # fmt: skip
            found = lens.of(batch)
            lens.fill(found, batch)
            ends = [length + (i + 1 if each > 1 else 0) for length in lengths for i in range(each)]
            assert found.kv_lens.tolist() == [len(range(rank, end, ranks)) for end in ends]
            total += found.kv_lens
        assert total.tolist() == ends
    assert batch.seq_lens.tolist() == lengths
