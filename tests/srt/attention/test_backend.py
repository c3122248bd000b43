"""kvpool_mla as SGLang drives it: real pools, request table, batches and layers, without a server."""

from types import SimpleNamespace

import batches
import codec_oracle as oracle
import numpy as np
import pytest
import torch
from batches import forward_batch
from cases import crossed
from pools import device_pool, guard
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from test_host_attention import oracle_attention

from sgl_kvpool.srt.attention.cpu import KVPoolMLABackend

pytestmark = pytest.mark.usefixtures("published")

RANK, ROPE, HEADS, LAYER, SCALE = 128, 64, 3, 6, 0.07
SLOTS = 200
PLACED = [{}, {"arrangement": "token_major", "page_size": 8}, {"arrangement": "page_major", "page_size": 8}]


def radix_attention(**changes):
    return batches.radix_attention(HEADS, RANK, ROPE, **{"layer_id": LAYER, "scaling": SCALE, **changes})


def runner(pool, *layers, device="cpu"):
    """The attributes of SGLang's ModelRunner that a backend's constructor reads."""
    return SimpleNamespace(
        token_to_kv_pool=pool, req_to_token_pool=ReqToTokenPool(8, 128, "cpu", False), device=device,
        model=torch.nn.ModuleList(layers or [radix_attention()]),
    )  # fmt: skip


def make_pool(layout, k_scales=None, arrangement="layer_major", page_size=1):
    """A pool whose bytes are all 0xFF: NaN where an encoding has one."""
    pool = device_pool(
        layout, arrangement, page_size, layers=2, size=SLOTS, start_layer=LAYER - 1, kv_lora_rank=RANK,
        qk_rope_head_dim=ROPE, k_scales=k_scales,
    )  # fmt: skip
    guard(pool, byte=0xFF)
    return pool


class Case:
    """Requests with random keys at random slots; row `i` of a request is at position `i`."""

    def __init__(self, layout, lengths, prefixes, monkeypatch, *, reads_rows=False, k_scale=1.0, **placed):
        monkeypatch.setenv("KVPOOL_PREFILL_READS_ROWS", "1" if reads_rows else "0")
        self.layout, self.lengths, self.prefixes, self.k_scale = layout, lengths, prefixes, k_scale
        self.pool = make_pool(layout, {LAYER: k_scale}, **placed)
        self.runner = runner(self.pool)
        self.layer = self.runner.model[0]
        self.backend = KVPoolMLABackend(self.runner)
        generator = torch.Generator().manual_seed(7)
        slots = torch.randperm(SLOTS - 1, generator=generator)[: sum(lengths)] + 1
        self.slots = list(slots.split(lengths)) if lengths else []
        self.keys = [torch.randn(n, 1, RANK + ROPE, generator=generator).bfloat16() for n in lengths]
        self.rows = [5, 2, 7, 1][: len(lengths)]  # in the request table
        for row, own in zip(self.rows, self.slots, strict=True):
            self.runner.req_to_token_pool.req_to_token[row, : len(own)] = own.int()
        for own, keys, prefix in zip(self.slots, self.keys, prefixes, strict=True):
            if prefix:
                nope, rope = keys[:prefix, :, :RANK], keys[:prefix, :, RANK:]
                self.pool.set_mla_kv_buffer(self.layer, own[:prefix], nope, rope)

    def batch(self, mode):
        return forward_batch(mode, self.slots, self.prefixes, self.lengths, self.rows)

    def run(self, mode, *, split=False):
        batch = self.batch(mode)
        self.backend.init_forward_metadata(batch)
        keys = torch.cat([k[p:] for k, p in zip(self.keys, self.prefixes, strict=True)])
        tokens = len(keys)
        generator = torch.Generator().manual_seed(8)
        self.q = torch.randn(tokens, HEADS, RANK + ROPE, generator=generator).bfloat16()
        q, k, extra = self.q.reshape(tokens, -1), keys, {}
        if split:
            extra = {"q_rope": self.q[..., RANK:], "k_rope": keys[..., RANK:]}
            q, k = self.q[..., :RANK].reshape(tokens, -1), keys[..., :RANK]
        return self.backend.forward(q, k, k[..., :RANK], self.layer, batch, **extra)

    def stored(self, keys):
        """Values of keys after the oracle's encoding and decoding; float64 [tokens, R + P]."""
        row_bytes = self.pool.row_format.row_bytes
        nope, rope = keys[:, 0, :RANK], keys[:, 0, RANK:]
        rows = oracle.encode(nope, rope, self.layout, RANK, ROPE, row_bytes, self.k_scale)
        return oracle.decode(rows, self.layout, RANK, ROPE, self.k_scale).astype(np.float64)

    def wanted(self, *, fresh_as_computed):
        """Expected output in float64; `fresh_as_computed`: one bool for all requests, or one per request."""
        if isinstance(fresh_as_computed, bool):
            fresh_as_computed = [fresh_as_computed] * len(self.keys)
        out, start = [], 0
        for keys, prefix, as_computed in zip(self.keys, self.prefixes, fresh_as_computed, strict=True):
            values = self.stored(keys)
            if as_computed:
                values[prefix:] = keys[prefix:, 0].double().numpy()
            q = self.q[start : start + len(keys) - prefix].float().numpy()
            start += len(keys) - prefix
            out.append(oracle_attention(q, values, RANK, prefix)[0])
        return np.concatenate(out).reshape(start, -1)


def assert_attends(found, wanted):
    assert found.dtype == torch.bfloat16
    np.testing.assert_allclose(found.float().numpy(), wanted, rtol=1e-2, atol=4e-3)


@pytest.mark.parametrize(("layout", "placed"), crossed(oracle.LAYOUTS, PLACED))
@pytest.mark.parametrize("split", [False, True])
def test_decode_of_unequal_lengths(layout, placed, split, monkeypatch):
    """A4, B5 of the vLLM checklist of tests/connectors: slots are scattered, and all other bytes are NaN."""
    case = Case(layout, [1, 40, 7, 65], [0, 39, 6, 64], monkeypatch, **placed)
    assert_attends(case.run("DECODE", split=split), case.wanted(fresh_as_computed=False))


@pytest.mark.parametrize(("layout", "placed"), crossed(oracle.LAYOUTS, PLACED))
@pytest.mark.parametrize("reads_rows", [False, True])
@pytest.mark.parametrize("mode", ["EXTEND", "MIXED"])
def test_prefill_with_and_without_prefix(layout, placed, reads_rows, mode, monkeypatch):
    case = Case(layout, [9, 40, 5, 33], [0, 30, 4, 0], monkeypatch, reads_rows=reads_rows, **placed)
    assert_attends(case.run(mode), case.wanted(fresh_as_computed=not reads_rows))


@pytest.mark.usefixtures("each_attention")
@pytest.mark.parametrize("split", [False, True])
def test_prefill_over_a_prefix_of_several_chunks(split, monkeypatch):
    monkeypatch.setattr("sgl_kvpool.attention.cpu._CHUNK_ROWS", 16)
    case = Case("fp4", [50, 61], [43, 20], monkeypatch)
    assert_attends(case.run("EXTEND", split=split), case.wanted(fresh_as_computed=True))


def test_k_scale_of_the_layer_is_applied_on_the_way_back(monkeypatch):
    case = Case("fp8", [20, 3], [12, 2], monkeypatch, reads_rows=True, k_scale=0.25)
    assert_attends(case.run("EXTEND"), case.wanted(fresh_as_computed=False))


@pytest.mark.parametrize("mode", ["DECODE", "EXTEND", "MIXED"])
def test_batches_without_tokens(mode, monkeypatch):
    case = Case("fp4", [], [], monkeypatch)
    none = torch.empty(0, dtype=torch.int64)
    batch = ForwardBatch(ForwardMode[mode], 0, none, none, none, none, 0, seq_lens_cpu=none)
    batch.extend_prefix_lens_cpu = batch.extend_seq_lens_cpu = []
    case.backend.init_forward_metadata(batch)
    q = torch.empty(0, HEADS * (RANK + ROPE), dtype=torch.bfloat16)
    k = torch.empty(0, 1, RANK + ROPE, dtype=torch.bfloat16)
    assert case.backend.forward(q, k, k, case.layer, batch).shape == (0, HEADS * RANK)


def test_nothing_is_written_without_save_kv_cache(monkeypatch):
    case = Case("fp4", [6], [5], monkeypatch)
    before = [tensor.clone() for tensor in case.pool.kv_buffer]
    batch = case.batch("EXTEND")
    case.backend.init_forward_metadata(batch)
    q = torch.randn(1, HEADS * (RANK + ROPE)).bfloat16()
    case.backend.forward(q, case.keys[0][5:], None, case.layer, batch, save_kv_cache=False)
    assert all(map(torch.equal, before, case.pool.kv_buffer))


def test_the_load_fence_of_the_host_tier_is_waited_for(monkeypatch):
    waited = []
    case = Case("fp4", [6, 9], [5, 8], monkeypatch)
    case.pool.layer_transfer_counter = SimpleNamespace(wait_until=waited.append)
    case.run("DECODE")
    assert waited == [1]  # the layer's index in the pool


def test_servers_it_cannot_serve_are_refused():
    stock = device_pool("bf16", stock=True)
    with pytest.raises(ValueError, match="pool is MLATokenToKVPool; start it with --kv-cache-layout"):
        KVPoolMLABackend(runner(stock))
    pool = make_pool("fp4")
    with pytest.raises(ValueError, match="the device is cuda; build KVPoolMLACudaBackend"):
        KVPoolMLABackend(runner(pool, device="cuda"))
    # As in SGLang's own DeepSeek classes, which hold attn_mha and attn_mqa.
    with pytest.raises(ValueError, match="layer 1 of ModuleList attends keys 128 wide and not rows of 192"):
        KVPoolMLABackend(runner(pool, radix_attention(), radix_attention(head_dim=128)))
