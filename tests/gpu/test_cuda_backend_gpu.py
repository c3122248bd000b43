"""kvpool_mla on a GPU below SGLang's server: its kernels, FlashInfer's call, CUDA graphs. Needs SGLang."""

import contextlib
import itertools
from types import SimpleNamespace

import codec_oracle as oracle
import numpy as np
import pytest
import torch
from engine_cases import quick
from pools import device_pool
from test_host_attention import oracle_attention

pytestmark = pytest.mark.gpu

RANK, ROPE, HEADS, LAYER = 512, 64, 16, 1
SCALE = 0.07  # of test_host_attention's oracle
DEVICE = "cuda"
PAGE = 64
PLACED = ["layer_major", "token_major", "page_major"]
PLACED_LAYOUTS = quick(
    itertools.product(oracle.LAYOUTS, PLACED), [("fp4", "page_major"), ("fp8_block_scale", "layer_major")]
)


def publish_alone(**options):
    """SGLang's runtime context of a server with one rank; returns the server's arguments."""
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(model_path="dummy", device=DEVICE, **options)
    publish(args, role="scheduler", ranks=SpawnRanks(0, None, 0))
    return args


@pytest.fixture(scope="module", autouse=True)
def published_on_cuda():
    pytest.importorskip("sglang")
    publish_alone()


@contextlib.contextmanager
def no_waits():
    """The host must not wait for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Case:
    """Requests over a real pool; `lengths` of whole sequences, of which `prefixes` are stored before.

    Their slots are among those of the first `used_pages`.
    """

    def __init__(
        self, layout, lengths, prefixes, arrangement="layer_major", most_queries=4, used_pages=16,
        page_size=PAGE, **options
    ):  # fmt: skip
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

        self.layout, self.lengths, self.prefixes = layout, lengths, prefixes
        self.pool = device_pool(
            layout, arrangement, page_size, layers=3, size=16 * PAGE, start_layer=0, device=DEVICE, **options
        )
        for tensor in self.pool.kv_buffer:
            tensor.view(torch.uint8).fill_(0xFF)
        self.layer = RadixAttention(HEADS, RANK + ROPE, SCALE, 1, LAYER, v_head_dim=RANK)
        self.table = ReqToTokenPool(8, 1024, DEVICE, False)
        self.generator = generator = torch.Generator().manual_seed(7)
        slots = torch.randperm(used_pages * PAGE, generator=generator)[: sum(lengths)] + 1
        self.slots = [part.to(DEVICE) for part in slots.split(lengths)]
        self.keys = [
            torch.randn(n, 1, RANK + ROPE, generator=generator).bfloat16().to(DEVICE) for n in lengths
        ]
        self.requests = [5, 2, 7, 1][: len(lengths)]
        for row, own, keys, prefix in zip(self.requests, self.slots, self.keys, prefixes, strict=True):
            self.table.req_to_token[row, : len(own)] = own.int()
            if prefix:
                nope, rope = keys[:prefix, :, :RANK], keys[:prefix, :, RANK:]
                self.pool.set_mla_kv_buffer(self.layer, own[:prefix], nope, rope)
        self._buffers = {}
        self.backend = self._backend(most_queries)

    def _buffer(self, name, make):
        """One buffer per name, as SGLang's, for this case alone."""
        if name not in self._buffers:
            self._buffers[name] = make()
        return self._buffers[name]

    def _backend(self, most_queries):
        """The backend from its constructor, given the attributes that it reads of SGLang's ModelRunner."""
        from sglang.srt.layers.attention import flashinfer_mla_backend
        from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator

        from sgl_kvpool.srt.attention import cuda as module
        from sgl_kvpool.srt.attention import decode_verify, prefill

        self.translator = KVIndexTranslator(
            req_to_token=self.table.req_to_token, token_to_kv_pool_allocator=None,
            token_to_kv_pool=self.pool, page_size=self.pool.page_size, device=DEVICE,
        )  # fmt: skip
        runner = SimpleNamespace(
            token_to_kv_pool=self.pool, req_to_token_pool=self.table, device=DEVICE, dtype=torch.bfloat16,
            model=torch.nn.ModuleList([self.layer]), page_size=self.pool.page_size, is_draft_worker=False,
            model_config=SimpleNamespace(
                num_attention_heads=HEADS, context_len=1024, kv_lora_rank=RANK, qk_rope_head_dim=ROPE,
                qk_nope_head_dim=128, v_head_dim=128, scaling=self.layer.scaling,
            ),
            kv_index_translator=self.translator,
        )  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            for owner in (flashinfer_mla_backend, decode_verify, prefill):
                patch.setattr(owner, "get_buffer", self._buffer)
            patch.setattr(module, "max_speculative_num_draft_tokens", lambda: most_queries)
            return module.KVPoolMLACudaBackend(runner)

    def batch(self, mode):
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        fresh = [s[p:] for s, p in zip(self.slots, self.prefixes, strict=True)]
        counted = self.prefixes if mode == "TARGET_VERIFY" else self.lengths
        requests, lengths = (torch.tensor(values, device=DEVICE) for values in (self.requests, counted))
        batch = ForwardBatch(
            forward_mode=ForwardMode[mode], batch_size=len(self.lengths), input_ids=None, seq_lens_sum=None,
            req_pool_indices=requests, seq_lens=lengths, out_cache_loc=torch.cat(fresh),
        )  # fmt: skip
        batch.spec_info = SimpleNamespace(draft_token_num=4, num_tokens_per_req=4)
        if mode == "EXTEND":
            batch.extend_prefix_lens = torch.tensor(self.prefixes, device=DEVICE)
            batch.kv_loc_plan = self.translator.own_plan(batch)
            batch.extend_prefix_lens_cpu = list(self.prefixes)
            batch.extend_seq_lens_cpu = list(map(len, fresh))
        return batch

    def inputs(self):
        keys = torch.cat([k[p:] for k, p in zip(self.keys, self.prefixes, strict=True)])
        self.q = torch.randn(len(keys), HEADS, RANK + ROPE, generator=self.generator).bfloat16().to(DEVICE)
        # As an absorbed core gives it: the result of a batched matrix product, transposed.
        q = self.q[..., :RANK].transpose(0, 1).contiguous().transpose(0, 1)
        ropes = {"q_rope": self.q[..., RANK:].contiguous(), "k_rope": keys[..., RANK:].contiguous()}
        return q, keys[..., :RANK].contiguous(), ropes

    def run(self, mode):
        batch = self.batch(mode)
        self.backend.init_forward_metadata(batch)
        q, k, ropes = self.given = self.inputs()
        return self.backend.forward(q, k, k, self.layer, batch, **ropes)

    def wanted(self, *, fresh_as_computed):
        out, start = [], 0
        for keys, prefix in zip(self.keys, self.prefixes, strict=True):
            keys = keys.cpu()
            row_bytes = self.pool.row_format.row_bytes
            parts, k_scale = (keys[:, 0, :RANK], keys[:, 0, RANK:]), self.pool.k_scale(LAYER)
            rows = oracle.encode(*parts, self.layout, RANK, ROPE, row_bytes, k_scale)
            values = oracle.decode(rows, self.layout, RANK, ROPE, k_scale)
            if len(keys) - prefix > 1:  # to more than 16 query heads, and to FlashInfer, rows are bfloat16
                values = torch.from_numpy(values).bfloat16().float().numpy()
            values = values.astype(np.float64)
            if fresh_as_computed:
                values[prefix:] = keys[prefix:, 0].double().numpy()
            q = self.q[start : start + len(keys) - prefix].float().cpu().numpy()
            start += len(q)
            out.append(oracle_attention(q, values, RANK, prefix)[0])
        return np.concatenate(out).reshape(start, -1)


def close(found, wanted):
    """bf16 queries, weights and results: 2**-8 of values around 1."""
    assert torch.isfinite(found).all()
    np.testing.assert_allclose(found.float().cpu().numpy(), wanted, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize(("layout", "arrangement"), PLACED_LAYOUTS)
def test_decode(layout, arrangement):
    case = Case(layout, [1, 300, 7, 65], [0, 299, 6, 64], arrangement)
    close(case.run("DECODE"), case.wanted(fresh_as_computed=False))


@pytest.mark.parametrize(
    ("layout", "mode"),
    quick(
        itertools.product(oracle.LAYOUTS, ["TARGET_VERIFY", "DRAFT_EXTEND_V2"]),
        [("fp4", "TARGET_VERIFY"), ("fp4", "DRAFT_EXTEND_V2")],
    ),
)
def test_verify_and_draft_extend(layout, mode):
    case = Case(layout, [4, 300, 7], [0, 296, 3])
    close(case.run(mode), case.wanted(fresh_as_computed=False))


@pytest.mark.parametrize(
    ("layout", "arrangement", "workspace_tokens"),
    quick(
        itertools.product(oracle.LAYOUTS, PLACED, [65536, 64, 100]),
        [("fp4", "page_major", 65536), ("fp8_block_scale", "token_major", 100)],
    ),
)
def test_absorbed_prefill_in_one_call_and_in_chunks(layout, arrangement, workspace_tokens):
    case = Case(layout, [9, 300, 5, 73], [0, 230, 4, 0], arrangement)
    case.backend.absorbed_prefill.reader.workspace_tokens = workspace_tokens
    found = case.run("EXTEND")
    assert case.backend._extend.one_call == (workspace_tokens == 65536)
    close(found, case.wanted(fresh_as_computed=True))


@pytest.mark.parametrize(("layout", "arrangement"), PLACED_LAYOUTS)
def test_requests_of_one_token_at_the_end_are_decoded(layout, arrangement):
    """A batch of these alone (as beside another rank's prefill), and behind a prefill (MIXED)."""
    case = Case(layout, [1, 300, 7, 65], [0, 299, 6, 64], arrangement)
    close(case.run("EXTEND"), case.wanted(fresh_as_computed=False))
    case = Case(layout, [340, 300, 65], [230, 299, 64], arrangement)
    found, new = case.run("EXTEND"), 110
    close(found[:new], case.wanted(fresh_as_computed=True)[:new])
    close(found[new:], case.wanted(fresh_as_computed=False)[new:])


@pytest.mark.quick
def test_prefill_that_reads_scaled_rows():
    case = Case("fp8", [20, 14], [16, 10], k_scales={LAYER: 0.25})
    case.backend.absorbed_prefill.reads_rows = True
    close(case.run("EXTEND"), case.wanted(fresh_as_computed=False))


@pytest.mark.quick
def test_more_single_tokens_than_there_is_room_for():
    """The last two of the requests with one new token fit; the first goes through prefill."""
    case = Case("fp4", [9, 40, 7, 65], [3, 39, 6, 64])
    case.backend._lists.lse = case.backend._lists.lse[:2]
    found = case.run("EXTEND")
    assert case.backend._extend.query_tokens == 7
    close(found[:7], case.wanted(fresh_as_computed=True)[:7])
    close(found[7:], case.wanted(fresh_as_computed=False)[7:])


@pytest.mark.quick
def test_unsupported_batches_are_refused():
    case = Case("bf16", [4, 7], [0, 3])
    with pytest.raises(NotImplementedError, match="does not run prefill inside a CUDA graph"):
        case.backend.init_forward_metadata_out_graph(case.batch("EXTEND"), in_capture=True)
    batch = case.batch("TARGET_VERIFY")
    batch.spec_info.draft_token_num = 5
    with pytest.raises(ValueError, match="2 requests of 5 queries in TARGET_VERIFY.* sized for 4 per"):
        case.backend.init_forward_metadata(batch)
    with pytest.raises(ValueError, match="CUDA graphs of 1000 tokens requested.* sized for 32"):
        case.backend.init_cuda_graph_state(250, 1000)


@pytest.mark.parametrize(
    ("layout", "arrangement", "mode"),
    quick(
        itertools.product(oracle.LAYOUTS, PLACED, ["DECODE", "TARGET_VERIFY"]),
        [("fp4", "page_major", "DECODE"), ("fp4", "token_major", "TARGET_VERIFY")],
    ),
)
def test_a_graph_gives_what_eager_gives(layout, arrangement, mode):
    """Captured with lengths of 1, as SGLang does, then replayed for the real batch: bit for bit."""
    lengths = ([30, 300, 7], [29, 299, 6]) if mode == "DECODE" else ([30, 300, 7], [26, 296, 3])
    case = Case(layout, *lengths, arrangement)
    batch = case.batch(mode)
    real = {name: getattr(batch, name).clone() for name in ("seq_lens", "req_pool_indices", "out_cache_loc")}
    q, k, ropes = case.inputs()
    inputs = case.q.clone()
    batch.seq_lens.fill_(1), batch.req_pool_indices.zero_(), batch.out_cache_loc.zero_()
    case.backend.init_cuda_graph_state(3, len(q))
    case.backend.init_forward_metadata_out_graph(batch, in_capture=True)

    def step():
        case.backend.init_forward_metadata_in_graph(batch)
        return case.backend.forward(q, k, k, case.layer, batch, **ropes)

    step()  # kernels are compiled outside of the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for name, values in real.items():
        getattr(batch, name).copy_(values)
    case.backend.init_forward_metadata_out_graph(batch)
    found.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    eager_batch = case.batch(mode)
    case.backend.init_forward_metadata(eager_batch)
    wanted = case.backend.forward(q, k, k, case.layer, eager_batch, **ropes)
    assert torch.equal(case.q, inputs)
    assert torch.equal(found, wanted)
    close(found, case.wanted(fresh_as_computed=False))


@pytest.mark.quick
def test_decode_does_not_wait_for_the_gpu():
    """A busy GPU must not hold up the host: no call of a step may synchronise."""
    case = Case("fp4", [30, 300, 7], [29, 299, 6])
    case.run("DECODE")
    batch = case.batch("DECODE")
    q, k, ropes = case.inputs()
    with no_waits():
        case.backend.init_forward_metadata(batch)
        case.backend.forward(q, k, k, case.layer, batch, **ropes)


def padded(tensors, rows):
    """Tensors with further rows of ones, as data-parallel attention pads a rank's batch."""
    return [torch.cat([x, x.new_ones(rows, *x.shape[1:])]) for x in tensors]


@pytest.mark.quick
@pytest.mark.parametrize("padding", [0, 4])
def test_an_idle_batch(padding):
    """A rank without requests, alone and beside ranks with four tokens."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    case = Case("fp8_block_scale", [30, 300, 7], [29, 299, 6])
    batch = case.batch("DECODE")
    batch.forward_mode, batch.batch_size = ForwardMode.IDLE, 0
    batch.req_pool_indices, batch.seq_lens = batch.req_pool_indices[:0], batch.seq_lens[:0]
    case.backend.init_forward_metadata(batch)
    batch.out_cache_loc = torch.zeros(padding, dtype=torch.int64, device=DEVICE)
    q, k, ropes = case.inputs()
    q, k, q_rope, k_rope = padded([x[:0] for x in (q, k, ropes["q_rope"], ropes["k_rope"])], padding)
    before = [buffer.view(torch.uint8)[1:].clone() for buffer in case.pool.kv_buffer]
    found = case.backend.forward_decode(q, k, k, case.layer, batch, q_rope=q_rope, k_rope=k_rope)
    assert found.shape == (padding, HEADS * RANK)
    assert not found.any()
    after = [buffer.view(torch.uint8)[1:] for buffer in case.pool.kv_buffer]
    assert all(map(torch.equal, after, before))  # all slots but that of padding tokens


@pytest.mark.quick
def test_padding_tokens_of_a_decode_batch():
    case = Case("fp4", [30, 300, 7], [29, 299, 6])
    batch = case.batch("DECODE")
    case.backend.init_forward_metadata(batch)
    q, k, ropes = case.inputs()
    q, k, q_rope, k_rope = padded([q, k, ropes["q_rope"], ropes["k_rope"]], 2)
    batch.out_cache_loc = torch.cat([batch.out_cache_loc, batch.out_cache_loc.new_zeros(2)])
    found = case.backend.forward_decode(q, k, k, case.layer, batch, q_rope=q_rope, k_rope=k_rope)
    close(found[:3], case.wanted(fresh_as_computed=False))
    assert not found[3:].any()


@pytest.mark.parametrize(("layout", "arrangement"), PLACED_LAYOUTS)
def test_a_deterministic_server_gives_a_token_the_same_bits(layout, arrangement, monkeypatch):
    """Alone and beside others, in one chunk and in several, after a prefix and as a decode."""
    from sglang.srt.runtime_context import get_exec

    monkeypatch.setattr("sgl_kvpool.srt.attention.decode_verify.DETERMINISTIC_LISTS", 100)
    lengths = [150, 9, 33]  # 150 rows are two splits
    with get_exec().deterministic.override(enable_deterministic_inference=True):
        case = Case(layout, lengths, [0, 0, 0], arrangement)
    queries = [torch.randn(n, HEADS, RANK + ROPE, device=DEVICE).bfloat16() for n in lengths]
    every = [case.requests, case.slots, case.keys, queries]

    def run(which, prefixes, ends, mode="EXTEND"):
        """Results of the tokens from `prefixes` to `ends`, by request."""
        case.requests = [every[0][one] for one in which]
        case.slots, case.keys, queries = (
            [part[one][:end] for one, end in zip(which, ends, strict=True)] for part in every[1:]
        )
        case.prefixes, case.lengths = prefixes, ends
        case.inputs = lambda: (
            torch.cat([q[p:] for q, p in zip(queries, prefixes, strict=True)]),
            torch.cat([k[p:] for k, p in zip(case.keys, prefixes, strict=True)]),
            {},
        )
        out = case.run(mode).view(-1, HEADS, RANK)
        return out.split([end - p for end, p in zip(ends, prefixes, strict=True)])

    whole, small, other = run([0, 1, 2], [0, 0, 0], lengths)
    assert torch.isfinite(whole).all()
    assert torch.equal(run([0], [0], [150])[0], whole)
    *_, beside = run([2, 1, 0], [0, 4, 0], [33, 9, 131])
    assert torch.equal(beside, whole[:131])
    rest, last = run([0, 2], [131, 32], [150, 33])
    assert torch.equal(rest, whole[131:])
    assert torch.equal(last, other[32:])
    decoded = run([1, 0], [8, 149], [9, 150], "DECODE")
    assert torch.equal(torch.cat(decoded), torch.stack([small[-1], whole[-1]]))
    # Otherwise the number of splits follows the batch, and prefill is another kernel.
    case.backend._lists.deterministic = False
    assert not torch.equal(run([0], [149], [150], "DECODE")[0], run([0], [120], [150])[0][-1:])
