"""Decode context parallelism: SGLang's slots are spread over ranks, and a rank's pool holds its own rows."""

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from unittest import mock

import codec_oracle as oracle
import numpy as np
import pools
import pytest
import torch
from host_tier import backup, host_pool, load
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import ARRANGEMENTS, START, assert_holds, at, copied, device_pool, guard, layer, rows, values
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel

from sgl_kvpool.memory.arrangement import rows_of_slots
from sgl_kvpool.srt.attention.decode_verify import KVLens, ListReader
from sgl_kvpool.srt.pool.row_pool import RowWriteLoc
from sgl_kvpool.srt.self_check.rows import check_rows

pytestmark = pytest.mark.usefixtures("published")

PAGE = 4


@contextmanager
def as_rank(rank, ranks):
    with get_parallel().override(attn_dcp_rank=rank, attn_dcp_size=ranks, dcp_enabled=True):
        yield


def pools_of(ranks, layout, arrangement, page_size=PAGE):
    made = [device_pool(layout, arrangement, page_size=page_size) for _ in range(ranks)]
    guard(*made)
    return made


def write(pool, slots, nope, rope, *, per_step):
    """As a model's MHA form does, with SGLang's slots, or as our backend does, with a step's row numbers."""
    loc = RowWriteLoc(pool.rows_to_write(slots)) if per_step else KVWriteLoc(slots)
    pool.set_mla_kv_buffer(layer(START + 1), loc, nope, rope)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_slot_is_stored_once_and_read_where_it_is_stored(data):
    ranks = data.draw(st.integers(2, 5), label="ranks")
    layout = data.draw(st.sampled_from(oracle.LAYOUTS), label="layout")
    arrangement = data.draw(st.sampled_from(ARRANGEMENTS), label="arrangement")
    page = data.draw(st.sampled_from([1, 3, PAGE]), label="page")
    made = pools_of(ranks, layout, arrangement, page)
    most = len(rows(made[0])[0]) * page * ranks
    slots = data.draw(st.lists(st.integers(1, most - 1), min_size=1, max_size=9, unique=True), label="slots")
    nope, rope = values(len(slots))
    wanted = [copied(pool) for pool in made]
    size = oracle.row_bytes(layout, 512, 64)
    expected = oracle.encode(nope.squeeze(1), rope.squeeze(1), layout, 512, 64, size)
    for slot, row in zip(slots, expected, strict=True):
        wanted[slot % ranks]["rows", START + 1][at(made[0], slot // ranks)] = row
    per_step = data.draw(st.booleans(), label="per step")
    for rank, pool in enumerate(made):
        with as_rank(rank, ranks):
            write(pool, torch.tensor([*slots, -1]), *(torch.cat([x, x[:1]]) for x in (nope, rope)),
                  per_step=per_step)  # fmt: skip
    for pool, bytes_of_pool in zip(made, wanted, strict=True):
        assert_holds(pool, bytes_of_pool)
    for rank, pool in enumerate(made):
        own = [number for number, slot in enumerate(slots) if slot % ranks == rank]
        with as_rank(rank, ranks):
            # SGLang translates slots into the rank's own before it reads them.
            places = torch.tensor(slots, dtype=torch.int64)[own] // ranks
            found = pool.get_mla_kv_buffer(layer(START + 1), places, torch.float32)
            assert pool.page_stride.dcp_size == ranks
        decoded = oracle.decode(expected[own], layout, 512, 64) if own else np.empty((0, 576))
        assert np.array_equal(torch.cat(found, -1).squeeze(1).numpy(), decoded)


def attended(pool, table, length, mode):
    """Slots' rows that a rank attends for the last token of a request, by the lists of our backend."""
    lists = ListReader(pool, table, 2, 1, 1, draft_step=int(mode == "DECODE"))
    batch = SimpleNamespace(
        batch_size=1, forward_mode=ForwardMode[mode], req_pool_indices=torch.zeros(1, dtype=torch.long),
        seq_lens=torch.tensor([length - (mode != "DRAFT_EXTEND_V2")]),
        spec_info=SimpleNamespace(draft_token_num=1, num_tokens_per_req=1),
    )  # fmt: skip
    found = lists.kv_lens.of(batch)
    lists.kv_lens.fill(found, batch)
    return rows_of_slots(lists._local_indices[0, : int(found.kv_lens)].long(), pool.page_stride)


@pytest.mark.parametrize("planted", [None, "a sharded draft", "a whole target"])
def test_a_draft_has_all_rows_beside_a_target_that_has_its_own(planted):
    """A request of any length, in pages anywhere: what each rank stores and attends of it, in both pools."""

    @settings(max_examples=40 if planted is None else 15, deadline=None)
    @given(data=st.data())
    def check(data):
        ranks, page = data.draw(st.integers(2, 5)), data.draw(st.sampled_from([1, 3, PAGE]))
        arrangement = data.draw(st.sampled_from(ARRANGEMENTS))
        layout = data.draw(st.sampled_from(["bf16", "fp4"]))
        wide = page * ranks
        pages = data.draw(st.permutations([1, 2, 3]))
        slots = torch.cat([torch.arange(p * wide, (p + 1) * wide) for p in pages])
        length = data.draw(st.integers(ranks, len(slots)), label="length")
        nope, rope = values(length)
        replicated = {"target": planted == "a whole target", "draft": planted != "a sharded draft"}
        for rank in range(ranks):
            for name, whole in replicated.items():
                size = wide if whole else page
                with as_rank(rank, ranks):
                    pool = device_pool(layout, arrangement, page_size=size, dcp_replicated=whole)
                    write(pool, slots[:length], nope, rope, per_step=data.draw(st.booleans()))
                    own = slice(None) if name == "draft" else slice(rank, None, ranks)
                    modes = ["DECODE"] if name == "target" else ["DECODE", "DRAFT_EXTEND_V2"]
                    mode = data.draw(st.sampled_from(modes))
                    found = attended(pool, slots[None].int(), length, mode)
                stored = pool.get_row_buffer(START + 1).squeeze(1)[found].view(torch.uint8).numpy()
                parts = nope[own].squeeze(1), rope[own].squeeze(1)
                wanted = oracle.encode(*parts, layout, 512, 64, stored.shape[-1])
                assert np.array_equal(stored, wanted), name

    if planted is None:
        check()
    else:
        with pytest.raises(AssertionError, match=planted.split()[-1]):
            check()


def assert_as_sglangs(pool, stock, layout, size):
    """The rows of a pool are those of SGLang's bf16 pool, in a layout."""
    for ours, theirs in zip(rows(pool), rows(stock), strict=True):
        wanted = np.full_like(ours, pools.GUARD)
        stored = (theirs != pools.GUARD).any(axis=-1)
        if stored.any():
            parts = torch.from_numpy(theirs[stored]).view(torch.bfloat16).split([512, 64], dim=1)
            wanted[stored] = oracle.encode(*parts, layout, 512, 64, size)
        assert np.array_equal(ours, wanted)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_pool_decides_whether_its_slots_are_spread_as_sglangs_does(data):
    """SGLang's own pool, with the same arguments and calls, says which rows of which tokens a rank stores."""
    ranks = data.draw(st.integers(2, 5), label="ranks")
    rank = data.draw(st.integers(0, ranks - 1), label="rank")
    layout = data.draw(st.sampled_from(oracle.LAYOUTS), label="layout")
    sparse = data.draw(st.booleans(), label="sparse")
    # SGLang's writers of sparse attention refuse resolved numbers.
    spread = data.draw(st.sampled_from(["sharded", "replicated", "resolved"][: 3 - sparse]), label="spread")
    span = ranks if spread == "sharded" else 1
    size, page, own = oracle.row_bytes(layout, 512, 64, 1 if sparse else 16), 64 * (ranks // span), {}
    if not sparse:
        page = data.draw(st.sampled_from([1, PAGE]), label="page")
        own["arrangement"] = data.draw(st.sampled_from(ARRANGEMENTS), label="arrangement")
    make = partial(
        pools.dsa_pool if sparse else device_pool, page_size=page, size=2 * page, start_layer=START,
        dcp_replicated=spread == "replicated",
    )  # fmt: skip
    with as_rank(rank, ranks):
        both = make(layout, **own), make("bf16", stock=True)
    guard(*both)
    tokens = st.lists(st.integers(page * span, 3 * page * span - 1), min_size=1, max_size=6, unique=True)
    slots = torch.tensor(data.draw(tokens, label="slots"))
    parts, pages = values(len(slots)), torch.arange(page * span, 3 * page * span)
    method = "set_mla_kv_buffer"
    if span == 1 and data.draw(st.booleans(), label="combined"):
        method, parts = "set_kv_buffer", (torch.cat(parts, -1),) * 2
    with as_rank(rank, ranks), mock.patch.object(torch.cuda, "synchronize"):
        for each in both:
            each.write_loc_is_dcp_resolved = spread == "resolved"
            getattr(each, method)(layer(START + 1), slots, *parts)
            if span == 1:
                each.move_kv_cache(pages[-1:], slots[:1])
        assert (both[0].dcp_size, both[0].dcp_rank) == (span, rank % span)
        assert_as_sglangs(*both, layout, size)
        # A request's tokens lie in pages of all ranks, in the order of their positions.
        kept = [each.get_cpu_copy(pages) for each in both]
        guard(*both)
        for each, copy in zip(both, kept, strict=True):
            each.load_cpu_copy(copy, pages.view(2, -1).flip(0).flatten())
        assert_as_sglangs(*both, layout, size)


@pytest.mark.parametrize("method", ["set_mla_kv_buffer", "set_kv_buffer"])
@pytest.mark.parametrize("layout", oracle.LAYOUTS)
def test_slots_of_the_full_layers_are_those_of_sglangs_hybrid_pool(layout, method):
    """Only the writer of combined rows takes `full_loc`, which may be longer than `loc`."""
    both = pools.hybrid_pool(layout), pools.hybrid_pool("bf16", stock=True)
    guard(*both)
    parts = values(2) if method == "set_mla_kv_buffer" else (torch.cat(values(2), -1),) * 2
    for each in both:
        for full_loc in (None, torch.tensor([13, 9, 5])):
            getattr(each, method)(layer(1), KVWriteLoc(torch.tensor([4, 7]), full_loc=full_loc), *parts)
    assert_as_sglangs(*both, layout, oracle.row_bytes(layout, 512, 64))


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_every_rank_reads_and_backs_up_all_of_a_replicated_pool(arrangement, no_reserve):
    """As a draft's beside a target with spread rows: attention, self-check and host tier ask the pool."""
    table = torch.arange(40).view(4, 10).int()
    with as_rank(2, 3):
        pool = device_pool("fp4", arrangement, page_size=6, dcp_replicated=True)
        assert check_rows(pool) == "rows of 3 of 3 layers"
        lists = ListReader(pool, table, 2, 4, 1)
        assert torch.equal(lists._local_indices, table)
        assert lists.kv_lens.dcp_size == 1
        tier = host_pool(pool)
        assert (tier.dcp_size, tier.dcp_rank, tier.page_size) == (1, 0, 6)
        pool.set_mla_kv_buffer(layer(START), torch.arange(6, 12), *values(6))
        backup(tier, [3], [1])
        load(tier, [3], [4])
    assert rows(pool)[0][1].any(-1).all()
    assert all(np.array_equal(layer_rows[4], layer_rows[1]) for layer_rows in rows(pool))


def test_rows_are_not_moved_between_ranks():
    (pool,) = pools_of(1, "fp4", "layer_major")
    with as_rank(1, 2), pytest.raises(NotImplementedError, match="--dcp-size 2: .* different ranks"):
        pool.move_kv_cache(torch.tensor([4]), torch.tensor([7]))


@pytest.mark.parametrize("layout", ["bf16", "fp4"])
def test_combined_rows_are_refused_as_sglang_refuses_them(layout):
    (pool,) = pools_of(1, layout, "layer_major")
    before = copied(pool)
    combined = torch.cat(values(1), -1)
    with as_rank(1, 2), pytest.raises(AssertionError, match="no DCP-aware write path"):
        pool.set_kv_buffer(layer(START), torch.tensor([5]), combined, combined)
    assert_holds(pool, before)


def test_kv_lens_count_a_ranks_own_positions():
    lengths, ranks, queries = [0, 1, 7, 8, 9, 301], 4, 3
    for mode, each in (("DECODE", 1), ("TARGET_VERIFY", queries)):
        total = torch.zeros(len(lengths) * each, dtype=torch.int64)
        for rank in range(ranks):
            lens = KVLens(len(lengths), queries, "cpu", dcp_rank=rank, dcp_size=ranks)
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
