"""SGLang's graph runners on one rank, around absorbed attention of `test_cuda_backend_gpu.Case` alone.

The runners, their graphs' backends, buffers, batches and attention layers are SGLang's. Only the model and
the attributes that the runners read of a ModelRunner are given here.
"""

from types import SimpleNamespace

import torch
from test_cuda_backend_gpu import DEVICE, HEADS, RANK, ROPE, SCALE, no_waits, publish_alone

VOCAB = 64
WIDTH = HEADS * RANK
DRAFT_TOKENS = 4


def publish_one_rank(*, speculative=False, requests=(4,), prefill_tokens=(160,), **more):
    """SGLang's runtime context and process groups of a server with one rank and graphs of these sizes."""
    import torch.distributed as dist
    from sglang.srt.distributed import parallel_state
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig

    if speculative:
        counts = {"speculative_num_steps": DRAFT_TOKENS - 1, "speculative_num_draft_tokens": DRAFT_TOKENS}
        more = {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1, **counts, **more}
    graphs = CudaGraphConfig(
        decode=PhaseConfig(backend="full", bs=list(requests), max_bs=max(requests)),
        prefill=PhaseConfig(backend="breakable", bs=list(prefill_tokens)),
    )
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()  # `publish` forgets the groups of an earlier test
    # Collecting and freezing the garbage of a process with SGLang's modules takes a second per runner.
    more |= {"enable_cudagraph_gc": True, "disable_flashinfer_autotune": True}
    args = publish_alone(cuda_graph_config=graphs, **more)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.init_distributed_environment(1, 0, local_rank=0, backend="gloo")
    parallel_state.initialize_model_parallel(backend="gloo")
    return args


class Body(torch.nn.Module):
    """Layers of absorbed attention, whose queries and keys follow from token ids and the layer before."""

    def __init__(self, layer_ids):
        from sglang.srt.layers.radix_attention import RadixAttention

        super().__init__()
        self.layers = torch.nn.ModuleList(
            [RadixAttention(HEADS, RANK + ROPE, SCALE, 1, number, v_head_dim=RANK) for number in layer_ids]
        )
        generator = torch.Generator().manual_seed(3)
        self.queries, self.keys = (
            torch.randn(VOCAB, width, generator=generator).bfloat16().to(DEVICE)
            for width in (HEADS * (RANK + ROPE), RANK + ROPE)
        )

    def forward(self, input_ids, positions, forward_batch):
        hidden = None
        for layer in self.layers:
            hidden = self.attend(layer, hidden, input_ids, forward_batch)
        return hidden

    def attend(self, layer, hidden, input_ids, forward_batch):
        """One layer's attention; `hidden` is that of the layer before, or None."""
        q = self.queries[input_ids].view(-1, HEADS, RANK + ROPE)
        k = self.keys[input_ids].unsqueeze(1)
        if hidden is not None:
            q = q + 0.1 * hidden.view(-1, HEADS, RANK).repeat(1, 1, 2)[..., : RANK + ROPE]
        # As an absorbed core gives it: the result of a batched matrix product, transposed.
        latent = q[..., :RANK].transpose(0, 1).contiguous().transpose(0, 1)
        ropes = {"q_rope": q[..., RANK:].contiguous(), "k_rope": k[..., RANK:]}
        return layer(latent, k[..., :RANK], k[..., :RANK], forward_batch, **ropes)


class Model(torch.nn.Module):
    shared_experts_config = None

    def __init__(self, layer_ids=(1,)):
        super().__init__()
        self.model = Body(layer_ids)
        generator = torch.Generator().manual_seed(4)
        self.head = torch.randn(WIDTH, VOCAB, generator=generator).bfloat16().to(DEVICE)

    def forward(self, input_ids, positions, forward_batch):
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput

        hidden = self.model.forward(input_ids, positions, forward_batch)
        selected = getattr(forward_batch.spec_info, "select_index", None)
        if selected is not None:  # a draft's extend: one row per request
            hidden = hidden[selected]
        logits = (hidden @ self.head).float()
        return LogitsProcessorOutput(next_token_logits=logits, hidden_states=hidden)


def model_runner(case, args, model, *, draft=False):
    """The attributes that SGLang's graph runners read of a ModelRunner."""
    from sglang.srt.distributed.parallel_state import get_pp_group
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    algorithm = SpeculativeAlgorithm.from_string(args.speculative_algorithm)
    config = SimpleNamespace(
        is_encoder_decoder=False, is_multimodal=False, model_is_mrope=False, dtype=torch.bfloat16,
        hf_config=SimpleNamespace(architectures=["Absorbed"], model_type="absorbed"),
        hf_text_config=SimpleNamespace(architectures=["Absorbed"]),
        hidden_size=WIDTH, spec_hidden_size=WIDTH, vocab_size=VOCAB, context_len=1024,
        num_attention_heads=HEADS, kv_lora_rank=RANK, qk_rope_head_dim=ROPE, qk_nope_head_dim=128,
        v_head_dim=128, scaling=SCALE,
    )  # fmt: skip
    logits = SimpleNamespace(
        max_rows=64, get_logits_buffer=lambda vocab, rows: torch.zeros(rows, vocab, device=DEVICE)
    )
    runner = SimpleNamespace(
        device=DEVICE, gpu_id=0, dtype=torch.bfloat16, page_size=case.pool.page_size, model=model,
        model_config=config, server_args=args, spec_algorithm=algorithm, is_draft_worker=draft,
        is_generation=True, use_mla_backend=True, req_to_token_pool=case.table,
        token_to_kv_pool=case.pool, kv_index_translator=case.translator, attn_backend=case.backend,
        ngram_embedding_manager=SimpleNamespace(enabled=False, table=None), lora_manager=None,
        hisparse_coordinator=None, canary_manager=None, device_timer=None, shared_read_done_event=None,
        capture_head_hooks=[], capture_tail_hooks=[], graph_shared_output=logits, _kernel_warmed_up=True,
        attention_layers=list(model.model.layers), mha_companion_layers=[], moe_layers=[], moe_fusions=[],
        pp_group=get_pp_group(), attn_tp_sequence_sharded=lambda tokens: False,
        decode_num_tokens_per_req=lambda num_draft_tokens=None: (
            1 if algorithm.is_none() else num_draft_tokens or DRAFT_TOKENS
        ),
        get_pp_proxy_topk_size=lambda: None, get_pp_proxy_residual_num_blocks=lambda: None,
        get_pp_proxy_dspark_hidden_size=lambda: None, get_aux_hidden_states_width=lambda: 0,
        prepare_dummy_forward_batch=lambda batch: batch,
    )  # fmt: skip
    runner.forward = lambda batch, **_: SimpleNamespace(
        logits_output=model(batch.input_ids, batch.positions, batch)
    )
    return runner


def batch_of(case, mode, queries=DRAFT_TOKENS):
    """A batch as a scheduler gives it, with tokens and positions; `queries` per request if it verifies."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.speculative.eagle_info import EagleDraftExtendInput, EagleVerifyInput

    batch = case.batch(mode)
    tokens, requests = len(batch.out_cache_loc), len(case.lengths)
    generator = torch.Generator().manual_seed(9)
    batch.input_ids = torch.randint(0, VOCAB, (tokens,), generator=generator).to(DEVICE)
    fresh = zip(case.prefixes, case.lengths, strict=True)
    batch.positions = torch.cat([torch.arange(first, last) for first, last in fresh]).to(DEVICE)
    batch.spec_info = None
    batch.capture_hidden_mode = CaptureHiddenMode.NULL
    batch.seq_lens_cpu = batch.seq_lens_sum = None
    batch.can_run_decode_cuda_graph = True
    if mode == "TARGET_VERIFY":
        unused = "custom_mask positions retrieve_index retrieve_next_token retrieve_next_sibling"
        nothing = dict.fromkeys([*unused.split(), "retrieve_cum_len", "seq_lens_sum", "seq_lens_cpu"])
        batch.spec_info = EagleVerifyInput(
            draft_token=batch.input_ids, spec_steps=queries - 1, topk=1, draft_token_num=queries,
            capture_hidden_mode=CaptureHiddenMode.FULL, **nothing,
        )  # fmt: skip
    if mode == "DRAFT_EXTEND_V2":
        accepted = torch.tensor([2, 4, 1][:requests], dtype=torch.int32, device=DEVICE).clamp(max=queries)
        batch.spec_info = EagleDraftExtendInput(
            hidden_states=torch.zeros(tokens, WIDTH, dtype=torch.bfloat16, device=DEVICE),
            num_accept_tokens=accepted, num_correct_drafts=accepted - 1, num_tokens_per_req=queries,
            select_index=torch.arange(requests, device=DEVICE) * queries + accepted - 1,
        )  # fmt: skip
    if mode == "EXTEND":
        batch.global_num_token_non_padded_cpu = batch.extend_num_tokens = tokens
        batch.extend_seq_lens = torch.tensor(batch.extend_seq_lens_cpu, device=DEVICE)
        batch.extend_start_loc = batch.extend_seq_lens.cumsum(0) - batch.extend_seq_lens
        batch.extend_logprob_start_lens_cpu = list(batch.extend_seq_lens_cpu)
        batch.orig_seq_lens = batch.seq_lens.clone()
    return batch


def computed(case, model, batch):
    """Results of the backend without a graph."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    case.backend.init_forward_metadata(batch)
    with forward_context(ForwardContext(attn_backend=case.backend), forward_batch=batch):
        return model(batch.input_ids, batch.positions, batch)


def eager(case, model, batch):
    """Results without a graph, and the pool's rows then; the pool is as before afterwards."""
    torch.cuda.synchronize()  # runners capture on another stream, which nothing orders before this one
    before = stored_rows(case)
    found = computed(case, model, batch)
    after = stored_rows(case)
    for buffer, values in zip(case.pool.kv_buffer, before, strict=True):
        buffer.view(torch.uint8)[_rows(case)] = values
    return found, after


def as_eager(case, found, wanted):
    """Logits and attention, and every row of the pool but slot 0, bit for bit."""
    results, rows = wanted
    assert torch.isfinite(results.next_token_logits).all()
    assert torch.equal(found.next_token_logits, results.next_token_logits), (
        "logits differ from the eager run's"
    )
    assert torch.equal(found.hidden_states, results.hidden_states)
    assert all(map(torch.equal, stored_rows(case), rows))


def replayed(runner, batch, *more):
    """What a graph gives, for whose replay the host does not wait."""
    with no_waits():
        assert runner.can_run_graph(batch)
        return runner.execute(batch, *more)


def stored_rows(case):
    """Bytes of all layers, but for slot 0, to which SGLang writes the keys of padding tokens."""
    return [buffer.view(torch.uint8)[_rows(case)] for buffer in case.pool.kv_buffer]


def _rows(case):
    return case.pool.slot_to_row(torch.arange(1, case.pool.size + case.pool.page_size, device=DEVICE))


def store_prefixes(case, layer):
    """Rows of the prefixes in another layer."""
    for own, keys, prefix in zip(case.slots, case.keys, case.prefixes, strict=True):
        if prefix:
            case.pool.set_mla_kv_buffer(layer, own[:prefix], keys[:prefix, :, :RANK], keys[:prefix, :, RANK:])
