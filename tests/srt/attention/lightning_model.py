"""The model of `random_hybrid`'s lightning shape in plain torch: its logits, and how stored rows change them.

Written from the formulas, because SGLang's kernels for this model do not run on a CPU.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F


def logits(
    weights: dict[str, torch.Tensor],
    config: dict,
    tokens: torch.Tensor,
    stored: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows,
) -> torch.Tensor:
    """Logits `[tokens, vocabulary]` of one sequence in float32.

    `stored` maps written MLA rows `[tokens, R + P]` of a layer to the rows that are read back.
    """
    model = _Model({name: weight.float() for name, weight in weights.items()}, config, stored)
    x = model.weights["model.word_embeddings.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        x = model.layer(layer, x)
    return model.norm(x, "model.norm") @ model.weights["lm_head.weight"].T


class _Model:
    def __init__(self, weights, config, stored):
        self.weights, self.config, self.stored = weights, config, stored
        self.heads = config["num_attention_heads"]

    def apply(self, x, name):
        return x @ self.weights[name + ".weight"].T

    def norm(self, x, name):
        return F.rms_norm(x, x.shape[-1:], self.weights[name + ".weight"], self.config["rms_norm_eps"])

    def layer(self, layer, x):
        prefix = f"model.layers.{layer}."
        full = (layer + 1) % self.config["layer_group_size"] == 0
        normed = self.norm(x, prefix + "input_layernorm")
        attention = self.mla if full else self.lightning
        x = x + attention(normed, prefix + "attention.", layer)
        normed = self.norm(x, prefix + "post_attention_layernorm")
        if layer < self.config["first_k_dense_replace"]:
            return x + self.mlp(normed, prefix + "mlp.")
        return x + self.experts(normed, prefix + "mlp.")

    def mlp(self, x, prefix):
        gated = F.silu(self.apply(x, prefix + "gate_proj")) * self.apply(x, prefix + "up_proj")
        return self.apply(gated, prefix + "down_proj")

    def experts(self, x, prefix):
        scores = self.apply(x, prefix + "gate").sigmoid()  # every expert is selected
        shares = scores / scores.sum(-1, keepdim=True) * self.config["routed_scaling_factor"]
        routed = [self.mlp(x, f"{prefix}experts.{expert}.") for expert in range(shares.shape[-1])]
        return self.mlp(x, prefix + "shared_experts.") + (torch.stack(routed, -1) * shares[:, None]).sum(-1)

    def mla(self, x, prefix, layer):
        c = self.config
        rank, nope, rope = c["kv_lora_rank"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        q = self.norm(self.apply(x, prefix + "q_a_proj"), prefix + "q_a_layernorm")
        q = self.apply(q, prefix + "q_b_proj").unflatten(-1, (self.heads, nope + rope))
        latent, k_rope = self.apply(x, prefix + "kv_a_proj_with_mqa").split([rank, rope], -1)
        latent = self.norm(latent, prefix + "kv_a_layernorm")
        q_nope, q_rope = q.split([nope, rope], -1)
        q_rope = self.rotate(q_rope, interleaved=True)
        k_rope = self.rotate(k_rope[:, None], interleaved=True)[:, 0]
        latent, k_rope = self.stored(torch.cat([latent, k_rope], -1)).split([rank, rope], -1)
        kv = self.apply(latent, prefix + "kv_b_proj").unflatten(-1, (self.heads, -1))
        k = torch.cat([kv[..., :nope], k_rope[:, None].expand(-1, self.heads, -1)], -1)
        q = torch.cat([q_nope, q_rope], -1)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), kv[..., nope:].transpose(0, 1), is_causal=True
        )
        return self.apply(out.transpose(0, 1).flatten(1), prefix + "dense")

    def lightning(self, x, prefix, layer):
        c, head_dim = self.config, self.config["head_dim"]
        qkv = self.apply(x, prefix + "query_key_value").unflatten(-1, (3, self.heads, head_dim))
        q, k, v = qkv.unbind(1)
        q, k = self.norm(q, prefix + "query_layernorm"), self.norm(k, prefix + "key_layernorm")
        rotated = int(head_dim * c["partial_rotary_factor"])
        q, k = (
            torch.cat([self.rotate(t[..., :rotated], interleaved=False), t[..., rotated:]], -1)
            for t in (q, k)
        )
        # One rate of decay per head, slower in deeper layers.
        slopes = 2.0 ** (-8.0 / self.heads * torch.arange(1, self.heads + 1))
        slopes = slopes * (1 - layer / (c["num_hidden_layers"] - 1) + 1e-5)
        positions = torch.arange(x.shape[0])
        past = (positions[:, None] - positions[None]).float()
        decay = torch.where(past >= 0, torch.exp(-slopes[:, None, None] * past.clamp_min(0)), 0)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(head_dim) * decay
        out = torch.einsum("hqk,khd->qhd", scores, v).flatten(1)
        groups = out.unflatten(-1, (c["group_norm_size"], -1))
        normed = F.rms_norm(groups, groups.shape[-1:], eps=c["rms_norm_eps"]).flatten(1)
        gate = self.apply(x, prefix + "g_proj").sigmoid()
        return self.apply(normed * self.weights[prefix + "g_norm.weight"] * gate, prefix + "dense")

    def rotate(self, x, *, interleaved):
        """Rotate pairs of values of `[tokens, heads, values]` by position; pairs are neighbours or halves."""
        half = x.shape[-1] // 2
        rates = self.config["rope_theta"] ** (-torch.arange(half) / half)
        angles = torch.arange(x.shape[0])[:, None, None] * rates
        a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        turned = a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()
        return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
