"""The class that SGLang takes for its KimiLinearForCausalLM; the arithmetic is hybrid_net's.

Pools, budgets, the radix cache with states and the hybrid attention backend follow from the configuration
class and the architecture's name, which are SGLang's own. SGLang's model class consists of fused operators
for a GPU.
"""

import torch
from hybrid_net import HybridConfig, HybridNet
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.runtime_context import get_parallel
from torch import nn

from . import cpu_kernels

cpu_kernels.install()


class KimiLinearForCausalLM(nn.Module):
    """:class:`hybrid_net.HybridNet` over SGLang's rows and states."""

    def __init__(self, config, quant_config=None, prefix: str = "") -> None:
        super().__init__()
        if quant_config is not None or get_parallel().tp_size != 1:
            raise ValueError("the hybrid test model is neither quantised nor sharded")
        self.config = config
        shape = HybridConfig.from_hf(config.to_dict())
        self.model = HybridNet(shape)
        for index, layer in enumerate(self.model.layers):
            attention = layer.self_attn
            if layer.is_linear:
                attention.attn = RadixLinearAttention(
                    index,
                    *(shape.linear_heads,) * 3,
                    *(shape.linear_head_dim,) * 3,
                    conv_weights=attention.conv_weight,
                    A_log=attention.A_log,
                    dt_bias=attention.dt_bias,
                )
            else:
                mla = shape.mla
                rows = {"num_kv_heads": 1, "layer_id": index, "v_head_dim": mla.kv_lora_rank}
                attention.attn_mqa = RadixAttention(mla.heads, mla.row_width, mla.scale, **rows)
        self.logits_processor = LogitsProcessor(config)

    @torch.no_grad()
    def forward(self, input_ids, positions, forward_batch, **_):
        """Logits of a batch of `T` tokens of any requests."""
        layers = self.model.layers

        def attend(layer, q, k):
            attention = layers[layer].self_attn.attn_mqa
            rows = k.unsqueeze(1)
            out = attention(q.flatten(1), rows, rows[..., : attention.v_head_dim], forward_batch)
            return out.view(-1, attention.tp_q_head_num, attention.v_head_dim)

        def recur(layer, qkv, forget, beta):
            linear = layers[layer].self_attn.attn
            if not forward_batch.forward_mode.is_decode():
                forget = forget[None]
            return linear(forward_batch, mixed_qkv=qkv, a=forget, b=beta[None])[0]

        hidden = self.model.hidden_states(input_ids, positions, attend, recur)
        return self.logits_processor(input_ids, hidden, self.model.lm_head, forward_batch)

    def load_weights(self, weights) -> set[str]:
        """Copy a checkpoint's tensors; a surplus tensor, a missing one or a wrong shape is an error."""
        state = dict(weights)
        # RadixLinearAttention registers its layer's parameters a second time.
        own = {name: tensor for name, tensor in self.model.state_dict().items() if ".attn." not in name}
        missing, unexpected = own.keys() - state.keys(), state.keys() - own.keys()
        if missing or unexpected:
            raise ValueError(f"missing {sorted(missing)}, unexpected {sorted(unexpected)}")
        for name, tensor in own.items():
            tensor.copy_(state[name])
        return {f"model.{name}" for name in state}


EntryClass = [KimiLinearForCausalLM]
