"""Attention over stored rows on a CPU against a float64 oracle that sees decoded rows one by one."""

import os

import codec_oracle as oracle
import numpy as np
import pytest
import torch

from sgl_kvpool.attention import cpu as host
from sgl_kvpool.attention.cpu import attend_lists

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
    """(lists, limits, row numbers, unused rows) of causal chunks whose last queries attend `lengths` rows."""
    free = np.random.default_rng(seed).permutation(np.arange(1, slots))
    starts, tokens = np.cumsum([0, *lengths]), np.cumsum([0, *queries])
    lists = torch.from_numpy(np.stack([starts[:-1], tokens[:-1], queries], axis=1))
    limits = [n - count + 1 + i for n, count in zip(lengths, queries, strict=True) for i in range(count)]
    rows = torch.from_numpy(free[: starts[-1]])
    return lists, torch.tensor(limits).clamp(min=0), rows, torch.from_numpy(free[starts[-1] :])


def attended(q, pool, rows, lists, limits, fmt, **options):
    """`attend_lists` into NaN."""
    out = torch.full((*q.shape[:2], fmt.kv_lora_rank), float("nan"))
    lse = torch.full(q.shape[:2], float("nan"))
    nope, rope = q.split([fmt.kv_lora_rank, fmt.qk_rope_head_dim], dim=-1)
    attend_lists(out, lse, nope, rope, pool, rows, lists, limits, fmt, SCALE, **options)
    return out, lse


def test_query_blocks_equal_one_block(monkeypatch):
    q, kv = torch.randn(11, 2, 192), torch.randn(20, 192)
    limits = torch.arange(11) - 1
    whole = host.attend(q, kv, 128, SCALE, kv_lens=limits)
    monkeypatch.setattr(host, "_SCORE_BYTES", 4 * 2 * 20 * 3)  # three queries at a time
    blocks = host.attend(q, kv, 128, SCALE, kv_lens=limits)
    for one, other in zip(whole, blocks, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert (whole[0][:2] == 0).all()  # limits -1 and 0
    assert (whole[1][:2] == float("-inf")).all()


@pytest.mark.parametrize("threads", [2, 3])
def test_the_bits_of_a_token_depend_on_its_own_rows_alone(threads, monkeypatch):
    """With the batch's size and the number of threads, lists are divided into other parts."""
    fmt, pool, _ = make_pool("fp4", 4000, 128, 64)
    lists, limits, ids, _ = batch([1500, 700, 900], [1, 1, 1], 4000)
    q = torch.randn(3, 5, 192, generator=torch.Generator().manual_seed(1)).bfloat16()

    def bits(count, threads, invariant):
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        some = lists[:count], limits[:count]
        out, lse = attended(q[:count], pool, ids, *some, fmt, batch_invariant=invariant)
        return torch.cat([out[0].flatten(), lse[0]]).view(torch.int32)

    assert torch.equal(bits(1, threads, True), bits(3, 1, True))
    assert torch.equal(bits(3, threads, True), bits(3, 1, True))
    if len(os.sched_getaffinity(0)) > 1:
        assert not torch.equal(bits(1, threads, False), bits(1, 1, False))
