"""The demo's models as SGLang serves them, in the absorbed form only.

SGLang treats ``DeepseekV2ForCausalLM`` and ``DeepseekV3ForCausalLM`` as MLA models: pools, budgets and
attention backends follow from the names. With ``SGLANG_EXTERNAL_MODEL_PACKAGE=sgl_kvpool.demo.models`` the
classes below replace the stock ones, whose fused operators need a GPU or AMX. Only the attention is SGLang's.

Of a Llama the latent of a token is its rotated keys and its values: grouped-query attention over G key heads
of D values is MLA with ``kv_lora_rank`` ``2 * G * D`` and no rotary part. The absorbed query of a head has
its rotated query at the place of its key head and zeros elsewhere; its output is read from the place of its
value head.
"""

from collections.abc import Iterable

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.runtime_context import get_parallel
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from sgl_kvpool.demo.net import ByteMLA, ByteMLAConfig

#: Name of `_attend` among transformers' attention functions.
_ATTENTION = "kvpool_latent"


class _AbsorbedModel(nn.Module):
    """Base of models over SGLang's KV pool."""

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


class DeepseekV2ForCausalLM(_AbsorbedModel):
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


class DeepseekV3ForCausalLM(_AbsorbedModel):
    """A Llama of `sgl_kvpool.demo.smollm2`'s checkpoint over SGLang's KV pool.

    Computes in float32, which is several times as fast on CPUs without bfloat16 instructions; weights and
    rows are bfloat16 numbers.
    """

    def __init__(self, config, quant_config=None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        shape = LlamaConfig(**config.llama)
        shape._attn_implementation = _ATTENTION
        self.model = LlamaForCausalLM(shape).float()
        layers, rank = self.model.model.layers, config.kv_lora_rank
        self.add_attention(layers, shape.num_attention_heads, rank, layers[0].self_attn.scaling, rank)

    @torch.no_grad()
    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch, **_):
        hidden = self.model.model(
            input_ids=input_ids[None],
            position_ids=positions[None],
            use_cache=False,
            forward_batch=forward_batch,
        ).last_hidden_state
        return self.logits_processor(input_ids, hidden[0], self.model.lm_head, forward_batch)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """As the base class; the checkpoint has the tied weights of the head once."""
        state = dict(weights)
        return super().load_weights((state | {"lm_head.weight": state["model.embed_tokens.weight"]}).items())


def _attend(module, query: Tensor, key: Tensor, value: Tensor, mask, forward_batch=None, **_):
    """Transformers' attention of a layer.

    Query ``[1, H, T, D]`` and key ``[1, G, T, D]`` are rotated; the value is ``[1, G, T, D]``.
    """
    heads, groups, (tokens, width) = query.shape[1], key.shape[1], query.shape[2:]
    rows = torch.cat([key[0], value[0]]).transpose(0, 1)  # [T, 2 G, D]
    absorbed = query.new_zeros(tokens, heads, 2 * groups, width)
    head = torch.arange(heads, device=query.device)
    group = head // (heads // groups)
    absorbed[:, head, group] = query[0].transpose(0, 1)
    latent = rows.flatten(1).unsqueeze(1).bfloat16()  # [T, 1, 2 G D]
    out = module.attn_mqa(absorbed.flatten(1), latent, latent, forward_batch)
    out = out.view(tokens, heads, 2 * groups, width)
    return out[:, head, groups + group][None], None


AttentionInterface.register(_ATTENTION, _attend)

EntryClass = [DeepseekV2ForCausalLM, DeepseekV3ForCausalLM]
