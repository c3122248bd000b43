"""Loaded by SGLang in each scheduler process, before the host tier is built.

Each tensor-parallel rank has some of the heads: its rows of `q_proj` and `kv_b_proj`, its columns of
`o_proj`, whose results SGLang's all-reduce adds up. Everything else is computed by every rank, and so are the
rows of the KV cache, as in SGLang's own MLA models. Each pipeline stage runs some of the layers.
"""

from dataclasses import replace

import torch
from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.layers import dcp
from sglang.srt.layers.dcp.planner import prepare_decode_context_parallel_metadata
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.pool_host import base
from sglang.srt.model_executor.forward_batch_info import PPProxyTensors
from sglang.srt.model_executor.forward_context import get_token_to_kv_pool
from sglang.srt.runtime_context import get_parallel
from torch import nn

from sgl_kvpool.demo.models import absorbed
from sgl_kvpool.demo.net import ByteMLA, ByteMLAConfig, rotation

base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


class PartOfASum(nn.Linear):
    """The product over this rank's columns, added up over the ranks in float32."""

    def forward(self, x):
        part = super().forward(x)
        return get_parallel().attn_tp_group.all_reduce(part.float()).to(part.dtype)


def heads_by_name(heads):
    """Attention layers of a layer, as in SGLang's DeepSeek classes: of all ranks' heads, for a decode."""
    ranks = get_parallel().attn_dcp_size
    return [("attn_mqa", heads), *([("attn_mqa_for_dcp_decode", heads * ranks)] if ranks > 1 else [])]


def attend_over_ranks(layer, q, k, batch):
    """Attention with decode context parallelism, in the steps of SGLang's `forward_mla.py:664`."""
    heads, latent = q.shape[1], layer.attn_mqa.v_head_dim
    (q, q_rope), (k, k_rope) = (x.split([latent, x.shape[-1] - latent], -1) for x in (q, k.unsqueeze(1)))
    ropes = {"q_rope": q_rope, "k_rope": k_rope}
    if batch.forward_mode.is_decode():
        q, ropes["q_rope"] = dcp.all_gather_q_for_mla_decode(q, q_rope)
        out, lse = layer.attn_mqa_for_dcp_decode(q, k, k, batch, **ropes)
        group = get_parallel().dcp_group
        out = dcp.cp_lse_ag_out_rs_mla(out.view(q.shape), lse, group, is_lse_base_on_e=False)
        return out.transpose(0, 1)
    if batch.forward_mode.is_extend():
        prefixes = batch.attn_dcp_metadata
        dcp.all_gather_kv_cache_for_mla_extend(
            *(get_token_to_kv_pool(), layer.attn_mqa, batch.extend_prefix_lens_cpu),
            *(prefixes.dcp_local_prefix_kv_indices, prefixes.dcp_extend_prefix_lens_sum),
            *(prefixes.dcp_kv_buffer, latent, k, k_rope),
        )
    return layer.attn_mqa(q, k, k, batch, **ropes).view(-1, heads, latent)


class DeepseekV2ForCausalLM(absorbed.DeepseekV2ForCausalLM):
    def __init__(self, config, quant_config=None, prefix=""):
        nn.Module.__init__(self)
        ranks = get_parallel()
        self.config = config
        self.whole = ByteMLAConfig.from_hf(config.to_dict())
        assert self.whole.heads % ranks.attn_tp_size == 0
        shape = replace(self.whole, heads=self.whole.heads // ranks.attn_tp_size)
        self.model = ByteMLA(shape)
        self.start_layer, self.end_layer = get_pp_indices(shape.layers, ranks.pp_rank, ranks.pp_size)
        for layer in self.model.layers:
            layer.self_attn.o_proj = PartOfASum(shape.heads * shape.v_head_dim, shape.hidden_size, bias=False)
        for index in range(self.start_layer, self.end_layer):
            attention = self.model.layers[index].self_attn
            for name, heads in heads_by_name(shape.heads):
                rows = {"num_kv_heads": 1, "layer_id": index, "v_head_dim": shape.kv_lora_rank}
                setattr(attention, name, RadixAttention(heads, shape.row_width, shape.scale, **rows))
        # Every rank has the whole of `lm_head`.
        self.logits_processor = LogitsProcessor(config, skip_all_gather=True)

    @torch.no_grad()
    def forward(self, input_ids, positions, forward_batch, pp_proxy_tensors=None, **_):
        ranks, net = get_parallel(), self.model

        def attend(layer, q, k):
            if ranks.attn_dcp_size > 1:
                return attend_over_ranks(net.layers[layer].self_attn, q, k, forward_batch)
            attention = net.layers[layer].self_attn.attn_mqa
            rows = k.unsqueeze(1)
            out = attention(q.flatten(1), rows, rows[..., : attention.v_head_dim], forward_batch)
            return out.view(-1, attention.tp_q_head_num, attention.v_head_dim)

        cos, sin = rotation(positions, net.config)
        x = net.embed_tokens(input_ids) if ranks.pp_rank == 0 else pp_proxy_tensors["hidden_states"]
        for index in range(self.start_layer, self.end_layer):
            layer = net.layers[index]
            x = x + layer.self_attn.absorbed(layer.input_layernorm(x), cos, sin, index, attend)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        if ranks.pp_rank < ranks.pp_size - 1:
            return PPProxyTensors({"hidden_states": x})
        return self.logits_processor(input_ids, net.norm(x), net.lm_head, forward_batch)

    #: SGLang's runner asks its DeepSeek classes for it.
    prepare_context_parallel_metadata_for_dcp = staticmethod(prepare_decode_context_parallel_metadata)

    def load_weights(self, weights):
        """This rank's heads of the checkpoint's tensors; every stage has all layers."""
        rank, heads, whole = get_parallel().attn_tp_rank, self.model.config.heads, self.whole
        mine = slice(rank * heads, (rank + 1) * heads)

        def of_this_rank(name, tensor):
            kind = name.split(".")[-2]
            if kind in ("q_proj", "kv_b_proj"):
                return tensor.unflatten(0, (whole.heads, -1))[mine].flatten(0, 1)
            if kind == "o_proj":
                return tensor.unflatten(1, (whole.heads, -1))[:, mine].flatten(1, 2)
            return tensor

        return super().load_weights((name, of_this_rank(name, tensor)) for name, tensor in weights)


EntryClass = [DeepseekV2ForCausalLM]
