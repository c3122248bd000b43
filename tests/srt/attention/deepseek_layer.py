"""A small real `DeepseekV2AttentionMLA` of SGLang on the CPU, with our pool and real batches.

Real: the attention module with its projections, norms and rotary embedding, its method handlers and cores,
RadixAttention, ForwardBatch with its plan of KV locations, the graph contexts, our pool. Replaced, because
they need a GPU: tests set `_is_cuda` of forward_mha, so that it writes and reads the pool as on CUDA; a
recorder is called instead of the kernels, whose results are in tests/gpu/test_deepseek_layer_gpu.py;
`merge_state` and the index kernels run in Triton's interpreter. There is no model around the layer:
`Server.run` sets the layer's inputs as a decoder layer does.
"""

from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import torch
from pools import device_pool, guard

HIDDEN, HEADS, NOPE, ROPE, V_DIM, RANK, Q_RANK, LAYER = 64, 2, 32, 64, 32, 128, 48, 3
#: Slots of the pool, and the slots reserved for each request.
SLOTS, LONGEST = 64, 21
BACKEND = "kvpool_mla"


def build_layer(q_lora_rank=Q_RANK, layer_id=LAYER):
    """The attention layer of a DeepSeek-V3 model with random weights, absorbed as SGLang's loader does it."""
    from sglang.srt.layers.rotary_embedding import base as rotary
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA
    from transformers import PretrainedConfig

    config = PretrainedConfig(architectures=["DeepseekV3ForCausalLM"])
    config.rms_norm_eps = 1e-6
    yarn = {"factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
    default, rope_is_cpu = torch.get_default_dtype(), rotary._is_cpu
    torch.set_default_dtype(torch.bfloat16)
    rotary._is_cpu = True  # otherwise it looks for vLLM's kernel, unused on CUDA for 64 rope values
    try:
        layer = DeepseekV2AttentionMLA(
            config,
            hidden_size=HIDDEN,
            num_heads=HEADS,
            qk_nope_head_dim=NOPE,
            qk_rope_head_dim=ROPE,
            v_head_dim=V_DIM,
            q_lora_rank=q_lora_rank,
            kv_lora_rank=RANK,
            rope_scaling=dict(yarn),
            layer_id=layer_id,
            reduce_results=False,
        )
    finally:
        torch.set_default_dtype(default)
        rotary._is_cpu = rope_is_cpu
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() > 1:
                values = torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5
                parameter.copy_(values)
            else:
                parameter.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
    weights = layer.kv_b_proj.weight.data.unflatten(0, (-1, NOPE + V_DIM))
    w_kc, w_vc = weights.split([NOPE, V_DIM], dim=1)  # as in deepseek_weight_loader.post_load_weights
    layer.w_kc = w_kc.transpose(1, 2).contiguous().transpose(1, 2)
    layer.w_vc = w_vc.contiguous().transpose(1, 2)
    return layer


def build_pool(layout, k_scale=1.0, layer_id=LAYER):
    pool = device_pool(
        layout, page_size=1, size=SLOTS, layers=1, start_layer=layer_id, kv_lora_rank=RANK,
        qk_rope_head_dim=ROPE, k_scales={layer_id: k_scale},
    )  # fmt: skip
    guard(pool, byte=0xFF)
    return pool


def recorder(pool, attention):
    """An attention backend that records layer and number of queries of its calls, and returns zeros."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    class Recorder(AttentionBackend):
        def __init__(self):
            super().__init__()
            self.token_to_kv_pool = pool
            self.req_to_token_pool = ReqToTokenPool(8, 64, "cpu", False)
            self.kv_index_translator = KVIndexTranslator(
                req_to_token=self.req_to_token_pool.req_to_token,
                token_to_kv_pool_allocator=None,
                token_to_kv_pool=pool,
                page_size=1,
                device="cpu",
            )
            self.data_type = pool.dtype
            self.prefill_attention_backend_str = self.decode_attention_backend_str = BACKEND
            self.calls = []

        def init_mha_chunk_metadata(self, forward_batch):
            pass

        def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
            self.calls.append((layer, len(q)))
            width = RANK if layer is attention.attn_mqa else V_DIM
            out = q.new_zeros(len(q), HEADS, width)
            if layer is attention.attn_mqa:
                return out.flatten(1)
            return (out, torch.zeros(len(q), HEADS)) if forward_batch.mha_return_lse else out

        forward_extend = forward_decode

    return Recorder()


class Server:
    """One layer with its pool and backend; `run` is one forward of the layer."""

    def __init__(self, layout="bf16", q_lora_rank=Q_RANK, k_scale=1.0):
        self.attention = build_layer(q_lora_rank)
        self.pool = build_pool(layout, k_scale)
        self.backend = recorder(self.pool, self.attention)
        self.hidden = torch.randn(SLOTS, HIDDEN, generator=torch.Generator().manual_seed(2)).bfloat16()
        self.slots = torch.randperm(SLOTS - 1, generator=torch.Generator().manual_seed(3)) + 1
        self.method = None

    def batch(self, mode, lengths, prefixes):
        """Requests of `lengths` tokens, of which `prefixes` are stored; request `i` has row `i + 1`."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        mode = ForwardMode[mode]
        fresh, hidden, positions = [], [], []
        for row, (length, prefix) in enumerate(zip(lengths, prefixes, strict=True)):
            start = row * LONGEST
            own = self.slots[start : start + length]
            self.backend.req_to_token_pool.req_to_token[row + 1, :length] = own.int()
            fresh.append(own[prefix:])
            hidden.append(self.hidden[start + prefix : start + length])
            positions.append(torch.arange(prefix, length))
        queries = [n - p for n, p in zip(lengths, prefixes, strict=True)]
        counted = prefixes if mode.is_target_verify() else lengths  # verify: seq_lens exclude drafts
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(lengths),
            input_ids=torch.zeros(sum(queries), dtype=torch.int64),
            req_pool_indices=torch.arange(1, len(lengths) + 1),
            seq_lens=torch.tensor(counted, dtype=torch.int64),
            out_cache_loc=torch.cat([*fresh, self.slots[:0]]),
            seq_lens_sum=sum(counted),
            seq_lens_cpu=torch.tensor(counted, dtype=torch.int64),
            positions=torch.cat([*positions, self.slots[:0]]),
        )
        if not mode.is_decode_or_idle() and not mode.is_target_verify():
            batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu = list(prefixes), queries
            batch.extend_prefix_lens = torch.tensor(prefixes, dtype=torch.int32)
            batch.extend_seq_lens = torch.tensor(queries, dtype=torch.int32)
        if mode.is_target_verify():
            batch.spec_info = SimpleNamespace(draft_token_num=queries[0], spec_input_type=None)
        translator = self.backend.kv_index_translator
        translator.own_plan(batch).bind(batch, translator)
        return batch, torch.cat([*hidden, self.hidden[:0]])

    def run(self, mode, lengths, prefixes, graph=None, padding=0):
        """One forward; returns the layer's output. Sets `self.method` and fills `self.backend.calls`.

        `padding` rows of NaN follow the tokens, as when a graph captured for more tokens is replayed.
        """
        from sglang.srt.layers.layer_boundary import AttentionInputs, get_attn_tp_context
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
        from sglang.srt.runtime_context import get_parallel

        batch, hidden = self.batch(mode, lengths, prefixes)
        if padding:
            hidden = torch.cat([hidden, hidden.new_full((padding, HIDDEN), float("nan"))])
            batch.positions = torch.cat([batch.positions, batch.positions.new_zeros(padding)])
            batch.out_cache_loc = torch.cat([batch.out_cache_loc, batch.out_cache_loc.new_zeros(padding)])
        self.backend.calls.clear()
        attention = self.attention
        with ExitStack() as stack:
            stack.enter_context(forward_context(ForwardContext(self.backend)))
            stack.enter_context(torch.no_grad())
            # SGLang sets the group when it initializes process groups; with one rank it is only passed on.
            stack.enter_context(get_parallel().override(tp_group=None))
            stack.enter_context(in_graph(graph, batch))
            if attention.q_lora_rank is not None:
                inputs = AttentionInputs(hidden, batch, attention.prepare_qkv_latent)
                get_attn_tp_context().set_attn_inputs(inputs)
            state = attention.forward_prepare(batch.positions, hidden, batch, None)
            self.method = state[1].name if state[1] is not None else None
            return attention.forward_core(state)


@contextmanager
def in_graph(graph, batch):
    """The contexts that SGLang's prefill graph runners enter around a forward."""
    from sglang.srt.model_executor.runner_backend_utils import breakable_cuda_graph as breakable
    from sglang.srt.model_executor.runner_backend_utils import tc_piecewise_cuda_graph as piecewise
    from sglang.srt.model_executor.runner_utils.forward_batch import set_forward_batch
    from sglang.srt.model_executor.runner_utils.prefill_graph import prefill_graph_scope

    with ExitStack() as stack:
        if graph == "breakable":
            batch.global_num_token_non_padded_cpu = batch.input_ids.shape[0]
            stack.enter_context(breakable.enable_breakable_cuda_graph())
            stack.enter_context(
                prefill_graph_scope(full_graph=False, raw_num_tokens=batch.input_ids.shape[0])
            )
            stack.enter_context(set_forward_batch(batch))
        elif graph == "tc_piecewise":
            stack.enter_context(piecewise.enable_tc_piecewise_cuda_graph())
        yield
