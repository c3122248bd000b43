"""Absorbed prefill over stored rows: prefix chunks, merges, plans; SGLang's Triton kernels are interpreted.

FlashInfer's one call for a prefix that fits: tests/gpu/test_cuda_backend_gpu.py.

The oracle is float64 attention over rows decoded by `codec_oracle`. Values are float32: Triton's interpreter
stores bf16 results of SGLang's kernels wrongly, and float32 leaves no rounding for a wrong row to hide in.
"""

import itertools
from unittest import mock

import codec_oracle as oracle
import numpy as np
import pytest
import torch
from cases import crossed
from hypothesis import given, settings
from hypothesis import strategies as st
from test_host_attention import SCALE, make_pool, oracle_attention

from sgl_kvpool.srt.attention import extend

pytestmark = pytest.mark.usefixtures("published")

RANK, ROPE, HEADS = 128, 64, 3


class Batch:
    """Requests with stored prefixes at random slots and new tokens."""

    def __init__(self, layout, prefix_lens, query_lens, rank=RANK, rope=ROPE, slots=150):
        self.prefix_lens, self.query_lens, self.rank = prefix_lens, query_lens, rank
        self.fmt, self.pool, self.decoded = make_pool(layout, slots, rank, rope)
        free = np.random.default_rng(0).permutation(np.arange(1, slots))
        self.ids = torch.from_numpy(free[: sum(prefix_lens)].copy())
        self.pool[torch.from_numpy(free[sum(prefix_lens) :].copy())] = 0xFF  # NaN where an encoding has one
        tokens = sum(query_lens)
        self.q = torch.randn(tokens, HEADS, rank + rope)
        self.extend_kv = torch.randn(tokens, rank + rope)

    def list_rows(self, lengths, rows_bounds, total):
        assert lengths.tolist() == self.prefix_lens
        assert rows_bounds.tolist() == extend.bounds(self.prefix_lens).tolist()
        assert total == len(self.ids)
        return self.ids.int()

    def attend(self, reader, k_scale=1.0):
        reader.workspace.fill_(float("nan"))
        batch = extend.plan_extend(self.prefix_lens, self.query_lens, self.list_rows, reader, SCALE)
        q, q_rope = self.q.split([self.rank, self.q.shape[-1] - self.rank], dim=-1)
        return reader.attend(q, q_rope, self.extend_kv, self.pool, batch, SCALE, k_scale=k_scale)

    def wanted(self, k_scale=1.0):
        out = []
        queries = torch.arange(len(self.q)).split(self.query_lens)
        for rows, own in zip(self.ids.split(self.prefix_lens), queries, strict=True):
            kv = np.concatenate([self.decoded[rows.numpy()] * k_scale, self.extend_kv[own].float().numpy()])
            out.append(oracle_attention(self.q[own].float().numpy(), kv, self.rank, len(rows))[0])
        return np.concatenate(out)


def reader_of(batch, tokens, wrapper=None):
    workspace = extend.extend_workspace(batch.fmt, torch.float32, "cpu", tokens)
    return extend.ExtendReader(batch.fmt, HEADS, workspace, wrapper=wrapper)


def close(out, wanted):
    assert torch.isfinite(out).all()
    np.testing.assert_allclose(out.numpy(), wanted, rtol=2e-4, atol=2e-5)


#: Chunks of 7 rows: requests over several chunks, several requests per chunk, empty prefixes.
MANY = [0, 23, 2, 0, 3, 31, 0], [4, 3, 1, 2, 5, 9, 1]


@pytest.mark.parametrize(
    ("layout", "prefixes", "queries", "workspace_tokens"),
    [
        *((layout, *MANY, tokens) for layout, tokens in crossed(oracle.LAYOUTS, [7, 16, 100])),
        ("fp4", [0, 0], [5, 2], 4),  # no prefix at all
        ("bf16", [9, 0, 0], [5, 0, 0], 4),  # SGLang's padding under data-parallel attention
        ("bf16", [0, 23, 2, 0], [4, 3, 1, 2], 34),  # one row more than FlashInfer's one call takes
    ],
)
def test_prefix_chunks_and_the_new_tokens(layout, prefixes, queries, workspace_tokens):
    batch = Batch(layout, prefixes, queries)
    wrapper = None if prefixes is MANY[0] else object()  # FlashInfer takes a prefix that fits
    close(batch.attend(reader_of(batch, workspace_tokens, wrapper=wrapper)), batch.wanted())


def raising(error, monkeypatch):
    """In place of FlashInfer's MLA wrapper, which needs a GPU."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    return mock.Mock(plan=mock.Mock(side_effect=error))


def test_a_batch_that_flashinfer_refuses_is_attended_in_chunks(monkeypatch, caplog):
    from flashinfer.mla._batch_mla._backends._capabilities import _BackendPlanUnsupportedError

    batch = Batch("fp4", [0, 23, 2, 0], [4, 3, 1, 2])
    refusing = raising(_BackendPlanUnsupportedError("causal tile bound"), monkeypatch)
    reader = reader_of(batch, 35, wrapper=refusing)
    for _ in range(2):
        close(batch.attend(reader), batch.wanted())
    assert [record.message for record in caplog.records] == [
        "sgl-kvpool: FlashInfer refuses a prefill, which is attended in chunks: causal tile bound"
    ]


def test_metadata_that_flashinfer_rejects_is_an_error(monkeypatch):
    """Its ValueError for malformed arguments: a mistake of the caller, and not of the batch."""
    batch = Batch("fp4", [0, 23], [4, 3])
    checking = raising(ValueError("kv_len_arr must have dtype torch.int32"), monkeypatch)
    with pytest.raises(ValueError, match="kv_len_arr"):
        batch.attend(reader_of(batch, 35, wrapper=checking))


def test_batches_beyond_32_bit_offsets_are_refused():
    fmt = oracle.row_format("fp4", 512, 64)
    reader = extend.ExtendReader(fmt, 128, extend.extend_workspace(fmt, torch.float32, "cpu", 4))
    reader.require(29127)
    with pytest.raises(ValueError, match=r"up to 29128 tokens of 128 heads.*--chunked-prefill-size to 29127"):
        reader.require(29128)


lengths = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), min_size=1, max_size=9)


@settings(max_examples=300)
@given(lengths, st.integers(1, 50))
def test_prefix_chunks_cover_every_row_once(requests, chunk_tokens):
    prefix, query = zip(*requests, strict=True)
    chunks = extend.split_prefixes(extend.bounds(prefix), extend.bounds(query), chunk_tokens)
    seen = []
    for chunk in chunks:
        assert chunk.count <= chunk_tokens
        inside = chunk.kv_indptr.tolist()
        for request, (a, b) in enumerate(itertools.pairwise(inside), chunk.first_request):
            seen += [(request, chunk.start + row - sum(prefix[:request])) for row in range(a, b)]
        queries = [sum(query[:r]) for r in range(len(query) + 1)]
        assert chunk.first_query == queries[chunk.first_request]
        assert chunk.last_query == queries[chunk.last_request]
    assert seen == [(r, row) for r, count in enumerate(prefix) for row in range(count)]
    assert (chunks[-1].first_request, chunks[-1].last_request) == (0, len(prefix))
    # Queries of a chunk's first request are merged exactly if an earlier chunk has rows of that request.
    for earlier, chunk in enumerate(chunks[:-1]):
        first = chunk.first_request
        began = any(p.first_request <= first < p.last_request for p in chunks[:earlier])
        assert (chunk.continued_until > chunk.first_query) == (began and query[first] > 0)


@settings(max_examples=200)
@given(lengths)
def test_rows_of_requests_in_the_workspace(requests):
    prefix, query = zip(*requests, strict=True)
    wanted = []
    for r in range(len(prefix)):
        wanted += [sum(prefix[:r]) + i for i in range(prefix[r])]
        wanted += [sum(prefix) + sum(query[:r]) + i for i in range(query[r])]
    assert extend.rows_of_requests(prefix, query).tolist() == wanted


def test_a_workspace_has_rows():
    fmt = oracle.row_format("fp4", RANK, ROPE)
    with pytest.raises(ValueError, match="tokens=0"):
        extend.extend_workspace(fmt, torch.float32, "cpu", 0)
    made = extend.extend_workspace(fmt, torch.bfloat16, "cpu", 10)
    assert extend.extend_workspace_bytes(fmt, 10) == made.nbytes == 10 * 192 * 2
