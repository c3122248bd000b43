"""A Llama served by SGLang as an MLA model: the latent of a token is its rotated keys and its values.

Grouped-query attention over G key heads of D values is MLA with ``kv_lora_rank`` ``2 * G * D`` and no rotary
part. The absorbed query of a head has its rotated query at the place of its key head and zeros elsewhere; its
output is read from the place of its value head. The rest is transformers' own Llama.

SGLang treats ``DeepseekV3ForCausalLM`` as MLA, like ``DeepseekV2ForCausalLM``, which `byte_mla` replaces.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from sgl_kvpool.demo.models.byte_mla import AbsorbedModel

#: Name of `_attend` among transformers' attention functions.
_ATTENTION = "kvpool_latent"


class DeepseekV3ForCausalLM(AbsorbedModel):
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
        """Logits of a batch of `T` tokens of any requests; `positions` is ``[T]``."""
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

EntryClass = [DeepseekV3ForCausalLM]
