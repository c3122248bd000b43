"""The demo's byte model as SGLang serves it.

SGLang treats ``DeepseekV2ForCausalLM`` as an MLA model: pools, budgets and attention backends follow from the
name. With ``SGLANG_EXTERNAL_MODEL_PACKAGE=sgl_kvpool.demo.models`` the class below replaces the stock one,
whose fused operators need a GPU or AMX. The arithmetic is that of :mod:`sgl_kvpool.demo.net`; only the
attention is SGLang's.
"""

from collections.abc import Iterable

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.runtime_context import get_parallel
from torch import Tensor, nn

from sgl_kvpool.demo.net import ByteMLA, ByteMLAConfig


class AbsorbedModel(nn.Module):
    """Base of models over SGLang's KV pool, in the absorbed form only."""

    def __init__(self, config, quant_config=None, prefix: str = "") -> None:
        super().__init__()
        if quant_config is not None:
            raise ValueError("the demo model has no quantised form")
        if get_parallel().tp_size != 1:
            raise ValueError("the demo model is not sharded: serve it with --tp-size 1")
        self.config = config
        self.logits_processor = LogitsProcessor(config)

    @staticmethod
    def add_attention(layers: nn.ModuleList, heads: int, row_width: int, scale: float, latent: int) -> None:
        """Give every layer SGLang's attention over rows of `row_width` values, the first `latent` as V."""
        for index, layer in enumerate(layers):
            # The name is DeepSeek's: SGLang and our plugin read this attribute.
            layer.self_attn.attn_mqa = RadixAttention(
                heads, row_width, scale, num_kv_heads=1, layer_id=index, v_head_dim=latent
            )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy a checkpoint's tensors; raises for unknown or missing tensors and for wrong shapes."""
        state = dict(weights)
        self.model.load_state_dict(state, strict=True)
        return {f"model.{name}" for name in state}


class DeepseekV2ForCausalLM(AbsorbedModel):
    """:class:`~sgl_kvpool.demo.net.ByteMLA` over SGLang's KV pool."""

    def __init__(self, config, quant_config=None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        shape = ByteMLAConfig.from_hf(config.to_dict())
        self.model = ByteMLA(shape)
        self.add_attention(self.model.layers, shape.heads, shape.row_width, shape.scale, shape.kv_lora_rank)

    @torch.no_grad()
    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch, **_):
        """Logits of a batch of `T` tokens of any requests; `positions` is ``[T]``."""

        def attend(layer: int, q: Tensor, k: Tensor) -> Tensor:
            attention = self.model.layers[layer].self_attn.attn_mqa
            rows = k.unsqueeze(1)
            out = attention(q.flatten(1), rows, rows[..., : attention.v_head_dim], forward_batch)
            return out.view(-1, attention.tp_q_head_num, attention.v_head_dim)

        hidden = self.model.hidden_states(input_ids, positions, attend)
        return self.logits_processor(input_ids, hidden, self.model.lm_head, forward_batch)


EntryClass = [DeepseekV2ForCausalLM]
