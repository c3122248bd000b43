"""The CUDA backend of kvpool_mla, run on the CPU: real pools, request tables, batches and constructors.

`Wrapper` replaces FlashInfer's wrappers, which need a GPU, and memory is not pinned. All code that reads or
writes the pool runs: `mla_decode` in torch, SGLang's prefill kernels in Triton's interpreter. Queries are
float32, see test_cuda_extend.py.
"""

import functools
import inspect
from types import SimpleNamespace

import codec_oracle as oracle
import numpy as np
import pytest
import test_backend
import torch
from cases import crossed
from test_backend import HEADS, LAYER, PLACED, RANK, ROPE, SCALE, Case

pytestmark = pytest.mark.usefixtures("published")

CONTEXT = 128  # length of a row of the request table


class Wrapper:
    """Replaces a wrapper of FlashInfer: records the arguments of its methods by FlashInfer's signatures."""

    def __init__(self, kind, *args, **kwargs):
        inspect.signature(kind.__init__).bind(self, *args, **kwargs)
        self.kind, self.calls = kind, []

    def __getattr__(self, name):
        signature = inspect.signature(getattr(self.kind, name))

        def method(*args, **kwargs):
            self.calls.append((name, signature.bind(self, *args, **kwargs).arguments))

        return method


def cuda_backend(case, *, draft_step=0, most_queries=4, monkeypatch):
    """The backend from its own constructor, for the runner of a case."""
    import flashinfer
    from sglang.srt.layers.attention import flashinfer_mla_backend as base
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator

    from sgl_kvpool.srt.attention import cuda as module
    from sgl_kvpool.srt.attention import decode_verify, prefill

    for name in ("BatchMLAPagedAttentionWrapper", "BatchPrefillWithRaggedKVCacheWrapper"):
        make = functools.partial(Wrapper, getattr(flashinfer, name))
        monkeypatch.setattr(base, name, make, raising=False)  # absent from SGLang without a GPU
    for owner in (base, decode_verify, prefill):
        monkeypatch.setattr(owner, "get_buffer", lambda name, make: make())  # each test has its own
    monkeypatch.setattr(module, "max_speculative_num_draft_tokens", lambda: most_queries)
    vars(case.runner).update(
        model_config=SimpleNamespace(
            num_attention_heads=HEADS, context_len=CONTEXT, kv_lora_rank=RANK, qk_rope_head_dim=ROPE,
            qk_nope_head_dim=32, v_head_dim=32, scaling=SCALE,
        ),
        dtype=torch.float32, page_size=case.pool.page_size, is_draft_worker=False,
        kv_index_translator=KVIndexTranslator(
            req_to_token=case.runner.req_to_token_pool.req_to_token, token_to_kv_pool_allocator=None,
            token_to_kv_pool=case.pool, page_size=case.pool.page_size, device="cpu",
        ),
    )  # fmt: skip
    with monkeypatch.context() as patch:
        zeros = torch.zeros
        patch.setattr(torch, "zeros", lambda *size, pin_memory=False, **more: zeros(*size, **more))
        backend = module.KVPoolMLACudaBackend(case.runner, bool(draft_step), draft_step=draft_step)
    if backend.absorbed_prefill is not None:
        backend.absorbed_prefill.reader.wrapper = None  # FlashInfer's call is tested in test_cuda_extend.py
    return backend


class CudaCase(Case):
    """`lengths` are those of whole sequences; `run` stores the tokens beyond `prefixes`."""

    def __init__(self, layout, lengths, prefixes, monkeypatch, *, draft_step=0, **more):
        super().__init__(layout, lengths, prefixes, monkeypatch, **more)
        self.backend = cuda_backend(self, draft_step=draft_step, monkeypatch=monkeypatch)

    def batch(self, mode):
        batch = super().batch(mode)
        batch.extend_prefix_lens = torch.tensor(self.prefixes)
        if mode == "EXTEND":
            batch.kv_loc_plan = self.runner.kv_index_translator.own_plan(batch)
        if mode == "TARGET_VERIFY":
            # In a verification SGLang sets seq_lens without the verified tokens, and no other lengths.
            batch.seq_lens = torch.tensor(self.prefixes)
            batch.extend_prefix_lens_cpu = batch.extend_seq_lens_cpu = batch.extend_prefix_lens = None
            batch.spec_info = SimpleNamespace(draft_token_num=4, num_tokens_per_req=4)
        batch.seq_lens_cpu = None if mode in ("DECODE", "TARGET_VERIFY") else batch.seq_lens
        return batch

    def run(self, mode, *, split=False):
        batch = self.batch(mode)
        self.backend.init_forward_metadata(batch)
        keys = torch.cat([k[p:] for k, p in zip(self.keys, self.prefixes, strict=True)])
        tokens, rank = len(keys), RANK
        self.q = torch.randn(tokens, HEADS, RANK + ROPE, generator=torch.Generator().manual_seed(8))
        q, k, extra = self.q.reshape(tokens, -1), keys, {}
        if split:
            # As absorbed cores pass them: the latent part is a transposed batched matrix product.
            q = self.q[..., :rank].transpose(0, 1).contiguous().transpose(0, 1)
            extra = {"q_rope": self.q[..., rank:], "k_rope": keys[..., rank:]}
            k = keys[..., :rank]
        return self.backend.forward(q, k, k[..., :rank], self.layer, batch, **extra)


def close(found, wanted):
    assert torch.isfinite(found).all()
    np.testing.assert_allclose(found.numpy(), wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(("layout", "placed"), crossed(oracle.LAYOUTS, PLACED))
@pytest.mark.parametrize("reads_rows", [False, True])
def test_absorbed_prefill(layout, reads_rows, placed, monkeypatch):
    case = CudaCase(layout, [9, 40, 5, 33], [0, 30, 4, 0], monkeypatch, reads_rows=reads_rows, **placed)
    close(case.run("EXTEND"), case.wanted(fresh_as_computed=not reads_rows))


@pytest.mark.parametrize("mode", ["MIXED", "SPLIT_PREFILL"])
@pytest.mark.parametrize("split", [False, True])
def test_prefill_in_other_modes_and_chunks(mode, split, monkeypatch):
    case = CudaCase("fp4", [50, 61, 3], [43, 20, 2], monkeypatch)
    case.backend.absorbed_prefill.reader.workspace_tokens = 16
    # The last request has one new token, so the decode kernel attends it, over the row just stored.
    close(case.run(mode, split=split), case.wanted(fresh_as_computed=[True, True, False]))


@pytest.mark.parametrize("mode", ["DECODE", "EXTEND", "TARGET_VERIFY"])
def test_k_scale(mode, monkeypatch):
    case = CudaCase("fp8", [20, 14], [16, 10], monkeypatch, reads_rows=True, k_scale=0.25)
    if mode == "DECODE":
        case = CudaCase("fp8", [20, 14], [19, 13], monkeypatch, k_scale=0.25)
    close(case.run(mode), case.wanted(fresh_as_computed=False))


@pytest.mark.parametrize(("layout", "placed", "split"), crossed(oracle.LAYOUTS, PLACED, [False, True]))
def test_an_extend_of_one_token_each_is_a_decode(layout, placed, split, monkeypatch):
    """SGLang turns a decode into this extend while another DP rank prefills; no prefix is gathered."""
    from sgl_kvpool.srt.attention.extend import ExtendReader

    lengths, prefixes = [1, 40, 7, 65], [0, 39, 6, 64]
    decoded = CudaCase(layout, lengths, prefixes, monkeypatch, **placed).run("DECODE", split=split)
    monkeypatch.setattr(ExtendReader, "attend", None)
    extended = CudaCase(layout, lengths, prefixes, monkeypatch, **placed)
    assert torch.equal(extended.run("EXTEND", split=split), decoded)
    assert extended.backend._extend.prefix_tokens == 0


@pytest.mark.parametrize(("layout", "split"), crossed(oracle.LAYOUTS, [False, True]))
@pytest.mark.parametrize("reads_rows", [False, True])
@pytest.mark.parametrize("chunks", [16, None])
def test_running_requests_behind_a_prefill_are_decoded(layout, reads_rows, split, chunks, monkeypatch):
    """MIXED: two prefill requests, one of them with a single new token, then two decode requests."""
    case = CudaCase(layout, [40, 33, 70, 5], [39, 20, 69, 4], monkeypatch, reads_rows=reads_rows)
    if chunks:
        case.backend.absorbed_prefill.reader.workspace_tokens = chunks
    fresh = [not reads_rows] * 2 + [False] * 2
    close(case.run("MIXED", split=split), case.wanted(fresh_as_computed=fresh))
    assert (case.backend._extend.prefix_tokens, case.backend._extend.query_tokens) == (39 + 20, 1 + 13)


def test_more_single_tokens_than_there_is_room_for(monkeypatch):
    """Only the last two of the single-token requests fit; the first goes through prefill."""
    case = CudaCase("fp4", [9, 40, 7, 65], [3, 39, 6, 64], monkeypatch)
    case.backend._lists.lse = case.backend._lists.lse[:2]
    close(case.run("EXTEND"), case.wanted(fresh_as_computed=[True, True, False, False]))
    assert case.backend._extend.query_tokens == 7


def test_without_a_prefix_the_mha_form_is_planned_and_absorbed_layers_work(monkeypatch):
    """SGLang picks the form per batch, after metadata; its graphs run the absorbed form without a prefix."""
    case = CudaCase("fp4", [9, 5], [0, 0], monkeypatch)
    close(case.run("EXTEND"), case.wanted(fresh_as_computed=True))
    planned = case.backend.prefill_wrapper_ragged.calls
    ((name, arguments),) = planned
    assert name == "begin_forward"
    assert arguments["qo_indptr"].tolist() == arguments["kv_indptr"].tolist() == [0, 9, 14]
    assert (arguments["num_qo_heads"], arguments["head_dim_qk"]) == (HEADS, 32 + ROPE)
    assert case.backend.forward_metadata.use_ragged is True
    from sgl_kvpool.srt.attention import cuda as module

    monkeypatch.setattr(module, "is_in_breakable_cuda_graph", lambda: True)
    close(case.run("EXTEND"), case.wanted(fresh_as_computed=True))
    assert len(planned) == 1
    assert case.backend.forward_metadata.use_ragged is False


@pytest.mark.parametrize("one_shot", [False, True])
def test_chunks_of_the_mha_form_are_planned_from_lengths_on_the_host(one_shot, monkeypatch):
    """Two chunks of 32 tokens; in one shot the keys are whole sequences."""
    case = CudaCase("fp4", [50, 61, 3], [43, 20, 0], monkeypatch)
    runner, batch = case.backend.mha_chunk_kv_cache, case.batch("EXTEND")
    for name in ("extend_prefix_lens", "seq_lens"):
        setattr(batch, name, None)  # on a GPU, reading them would wait
    batch.num_prefix_chunks, batch.mha_one_shot = 2, one_shot
    batch.prefix_chunk_seq_lens_cpu = torch.tensor([[32, 20, 0], [11, 0, 0]])
    runner.update_wrapper(batch)
    wrappers = [*runner.chunk_ragged_wrappers, runner.ragged_wrapper]
    planned = [
        arguments for wrapper in wrappers for name, arguments in wrapper.calls if name == "begin_forward"
    ]
    assert [call["qo_indptr"].tolist() for call in planned] == [[0, 7, 48, 51]] * 3
    whole = [0, 50, 111, 114] if one_shot else [0, 7, 48, 51]
    assert [call["kv_indptr"].tolist() for call in planned] == [[0, 32, 52, 52], [0, 11, 11, 11], whole]
    assert [call["causal"] for call in planned] == [False, False, True]
    assert all(call["kv_indptr"].dtype == torch.int32 for call in planned)


def test_the_mha_form_is_sglangs(monkeypatch):
    """A layer with multi-head keys is passed to the base class with all arguments, and nothing is stored."""
    from sglang.srt.layers.attention.flashinfer_mla_backend import FlashInferMLAAttnBackend

    case = CudaCase("fp4", [9], [3], monkeypatch)
    seen = []
    monkeypatch.setattr(FlashInferMLAAttnBackend, "forward_extend", lambda self, *a: seen.append(a))
    layer = test_backend.radix_attention(head_dim=48, v_head_dim=32)
    batch = case.batch("EXTEND")
    case.backend.init_forward_metadata(batch)
    before = [tensor.clone() for tensor in case.pool.kv_buffer]
    case.backend.forward("q", "k", "v", layer, batch, save_kv_cache=False)
    assert seen == [("q", "k", "v", layer, batch, False, None, None)]
    assert all(map(torch.equal, before, case.pool.kv_buffer))


def test_lse_of_the_mha_form_is_natural(monkeypatch):
    from sglang.srt.layers.attention.flashinfer_mla_backend import FlashInferMhaChunkKVRunner

    from sgl_kvpool.srt.attention.prefill import ChunkRunner

    runner = CudaCase("fp4", [9], [3], monkeypatch).backend.mha_chunk_kv_cache
    assert type(runner) is ChunkRunner
    base2 = torch.tensor([[3.0, float("-inf")]])  # log2(8); a request without rows
    for given in ("out", ("out", base2)):
        monkeypatch.setattr(FlashInferMhaChunkKVRunner, "forward", lambda self, *a, given=given: given)
        found = runner.forward("q", "k", "v", None, None)
        if isinstance(given, str):
            assert found == "out"
        else:
            assert found[0] == "out"
            torch.testing.assert_close(found[1], torch.tensor([[8.0, 0.0]]).log())


def test_row_numbers_are_those_of_the_slots_in_a_step(monkeypatch):
    """In breakable prefill graphs, every layer sees a different view of the same slots."""
    case = CudaCase("fp4", [4, 40, 7], [0, 36, 3], monkeypatch, arrangement="page_major", page_size=8)
    batch, rows_to_write = case.batch("TARGET_VERIFY"), case.backend._rows_to_write
    case.backend.init_forward_metadata_out_graph(batch, in_capture=True)
    first = rows_to_write.of(batch)
    batch.out_cache_loc = batch.out_cache_loc.view(-1)
    assert rows_to_write.of(batch) is first
    batch.out_cache_loc = batch.out_cache_loc[:3]
    assert rows_to_write.of(batch) is not first
    case.backend.init_forward_metadata_in_graph(batch)
    assert rows_to_write._rows is None


def test_unsupported_batches_are_refused(monkeypatch):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    case = CudaCase("bf16", [4, 7], [0, 3], monkeypatch)
    batch = case.batch("EXTEND")
    with pytest.raises(NotImplementedError, match="does not run prefill inside a CUDA graph"):
        case.backend.init_forward_metadata_out_graph(batch, in_capture=True)
    batch.forward_mode = ForwardMode.DLLM_EXTEND
    with pytest.raises(NotImplementedError, match="attends causally"):
        case.backend.init_forward_metadata(batch)
    batch = case.batch("TARGET_VERIFY")
    batch.spec_info.draft_token_num = 5
    with pytest.raises(
        ValueError, match="2 requests of 5 queries in TARGET_VERIFY.* sized for 4 per request"
    ):
        case.backend.init_forward_metadata(batch)
    with pytest.raises(ValueError, match="CUDA graphs of 1000 tokens requested.* sized for 32"):
        case.backend.init_cuda_graph_state(250, 1000)


def test_load_fence(monkeypatch):
    waited = []
    case = CudaCase("fp4", [6, 9], [5, 8], monkeypatch)
    case.pool.layer_transfer_counter = SimpleNamespace(wait_until=waited.append)
    case.run("DECODE")
    assert waited == [1]
    case.run("EXTEND")
    assert waited == [1, 1]
    assert case.layer.layer_id == LAYER
