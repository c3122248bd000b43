"""Attention over stored rows on a CPU against a float64 oracle that sees decoded rows one by one."""

import codec_oracle as oracle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_kvpool.attention.cpu import Request, RowReader, attend, causal_limits, merge

SCALE = 0.07


def make_pool(layout, slots, rank, rope, seed=0):
    """(format, pool of random rows with garbage between them, decoded values [slots, rank + rope])."""
    generator = torch.Generator().manual_seed(seed)
    fmt = oracle.row_format(layout, rank, rope)
    nope = torch.randn(slots, rank, generator=generator, dtype=torch.bfloat16)
    roped = torch.randn(slots, rope, generator=generator, dtype=torch.bfloat16)
    rows = oracle.encode(nope, roped if rope else None, layout, rank, rope, fmt.row_bytes)
    wide = torch.full((slots, fmt.row_bytes + 48), 0xEE, dtype=torch.uint8)
    wide[:, : fmt.row_bytes] = torch.from_numpy(rows)
    return fmt, wide[:, : fmt.row_bytes], oracle.decode(rows, layout, rank, rope)


def oracle_attention(q, kv, rank, first_position):
    """float64, one query and one head at a time; row j is position j."""
    out = np.zeros((*q.shape[:2], rank))
    lse = np.full(q.shape[:2], -np.inf)
    for i in range(q.shape[0]):
        seen = kv[: first_position + i + 1].astype(np.float64)
        for head in range(q.shape[1]):
            if not len(seen):
                continue
            scores = seen @ q[i, head].astype(np.float64) * SCALE
            top = scores.max()
            weights = np.exp(scores - top)
            lse[i, head] = top + np.log(weights.sum())
            out[i, head] = weights @ seen[:, :rank] / weights.sum()
    return out, lse


def batch(lengths, queries, slots, seed=0):
    """Requests of given stored lengths and query counts over disjoint random slots."""
    free = np.random.default_rng(seed).permutation(np.arange(1, slots))
    requests, ids = [], []
    query_start = rows_start = 0
    for stored, count in zip(lengths, queries, strict=True):
        requests.append(Request(query_start, count, stored - count, rows_start, stored))
        ids.append(free[rows_start : rows_start + stored])
        query_start += count
        rows_start += stored
    return requests, torch.from_numpy(np.concatenate(ids)), free[rows_start:]


@pytest.mark.usefixtures("each_attention")
@pytest.mark.parametrize("layout", oracle.LAYOUTS)
@pytest.mark.parametrize("workspace_tokens", [1, 7, 64, 1000])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_decode_and_prefill_of_unequal_lengths(layout, workspace_tokens, index_dtype):
    rank, rope, heads, slots = 128, 64, 3, 150
    fmt, pool, decoded = make_pool(layout, slots, rank, rope)
    lengths, queries = [1, 23, 70, 5], [1, 1, 9, 5]
    requests, ids, unused = batch(lengths, queries, slots)
    pool[torch.from_numpy(unused)] = 0xFF  # NaN in every encoding that has one; these slots must not be read
    q = torch.randn(sum(queries), heads, rank + rope)
    reader = RowReader(fmt, workspace_tokens)
    out, lse = reader.attend(q, pool, ids.to(index_dtype), reader.plan(requests), SCALE)
    assert torch.isfinite(out).all()
    for request in requests:
        own = slice(request.query_start, request.query_start + request.query_count)
        rows = ids[request.rows_start : request.rows_start + request.rows_count].numpy()
        wanted, wanted_lse = oracle_attention(q[own].numpy(), decoded[rows], rank, request.first_position)
        np.testing.assert_allclose(out[own].numpy(), wanted, rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(lse[own].numpy(), wanted_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("each_attention")
def test_no_rope_and_k_scale():
    rank, heads = 256, 2
    fmt, pool, decoded = make_pool("fp8", 40, rank, 0)
    requests, ids, _ = batch([30], [1], 40)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        q = torch.randn(1, heads, rank).to(dtype)
        reader = RowReader(fmt)
        out, _ = reader.attend(q, pool, ids, reader.plan(requests), SCALE, k_scale=0.5)
        wanted, _ = oracle_attention(q.float().numpy(), decoded[ids.numpy()] * 0.5, rank, 29)
        np.testing.assert_allclose(out.numpy(), wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.usefixtures("each_attention")
def test_a_request_without_rows_gives_zero_and_minus_infinity():
    fmt, pool, _ = make_pool("fp4", 8, 128, 64)
    reader = RowReader(fmt, 4)
    requests = [Request(0, 2, 0, 0, 0)]
    out, lse = reader.attend(
        torch.randn(2, 1, 192), pool, torch.empty(0, dtype=torch.int64), reader.plan(requests), 1.0
    )
    assert (out == 0).all()
    assert (lse == float("-inf")).all()


@pytest.mark.usefixtures("each_attention")
def test_prefix_and_fresh_chunk_merge_to_the_whole():
    """A stored prefix and the keys of the chunk, attended apart and merged, as a prefill does."""
    rank, rope, heads, prefix, chunk = 128, 64, 2, 33, 10
    fmt, pool, decoded = make_pool("bf16", 100, rank, rope)
    _, ids, _ = batch([prefix + chunk], [chunk], 100)
    q = torch.randn(chunk, heads, rank + rope)
    stored_only = [Request(0, chunk, prefix, 0, prefix)]
    reader = RowReader(fmt, 16)
    out, lse = reader.attend(q, pool, ids[:prefix], reader.plan(stored_only), SCALE)
    fresh = torch.from_numpy(decoded[ids[prefix:].numpy()]).float()
    piece, piece_lse = attend(q, fresh, rank, SCALE, limits=causal_limits(0, chunk))
    merge(out, lse, piece, piece_lse)
    wanted, wanted_lse = oracle_attention(q.numpy(), decoded[ids.numpy()], rank, prefix)
    np.testing.assert_allclose(out.numpy(), wanted, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(lse.numpy(), wanted_lse, rtol=1e-5, atol=1e-5)


def test_query_blocks_equal_one_block(monkeypatch):
    from sgl_kvpool.attention import cpu as host

    q, kv = torch.randn(11, 2, 192), torch.randn(20, 192)
    whole = attend(q, kv, 128, SCALE, limits=causal_limits(3 - 5, 11))
    monkeypatch.setattr(host, "_SCORE_BYTES", 4 * 2 * 20 * 3)  # three queries at a time
    blocks = attend(q, kv, 128, SCALE, limits=causal_limits(3 - 5, 11))
    for one, other in zip(whole, blocks, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert (whole[0][:2] == 0).all()  # positions 3 and 4 see no row from 5 on
    assert (whole[1][:2] == float("-inf")).all()


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    piece=st.integers(1, 50),
)
def test_plan_covers_every_row_once(lengths, piece):
    requests = []
    start = 0
    for number, length in enumerate(lengths):
        requests.append(Request(number, 1, length - 1, start, length))
        start += length
    reader = RowReader(oracle.row_format("fp4", 128, 0), piece)
    covered = []
    for begin, count, parts in reader.plan(requests):
        assert 0 < count <= piece
        assert begin == len(covered)
        for part in parts:
            assert begin + part.offset == part.request.rows_start + part.position
            covered += range(begin + part.offset, begin + part.offset + part.count)
    assert covered == list(range(start))
