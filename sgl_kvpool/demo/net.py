"""The byte-level MLA language model as plain torch modules. Importing this module does not import SGLang.

A decoder of pre-norm layers, each a multi-head latent attention and a gated MLP. Tokens are bytes,
plus one special token. An attention layer stores one row per token: ``kv_lora_rank``
normalised latent values followed by ``qk_rope_head_dim`` rotary values, as DeepSeek-V2 does.

It runs in the absorbed form: the up-projections are folded into the query and the output, and attention runs
on the stored rows themselves, as in a server. The attention itself is a callable, which SGLang's pool and
backend replace (``models/absorbed.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: The only token that is not a byte: end of text, beginning of text and padding.
SPECIAL_TOKEN_ID = 256

#: ``attend(layer, q [..., H, R+P], k [..., R+P]) -> [..., H, R]``: attention over the rows `k` and the rows
#: that the callable has stored; the values are the first R of each row.
Attend = Callable[[int, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ByteMLAConfig:
    """Shape of the model. Field names are ours; :meth:`to_hf` gives the names in config.json."""

    layers: int = 3
    heads: int = 2
    hidden_size: int = 256
    intermediate_size: int = 768
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    vocab_size: int = SPECIAL_TOKEN_ID + 1
    context_length: int = 4096
    rope_theta: float = 10000.0
    rms_eps: float = 1e-6

    @property
    def scale(self) -> float:
        """Factor of the attention scores: follows from the expanded head, not from the stored row."""
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5

    @property
    def row_width(self) -> int:
        """Values that an attention layer stores per token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def to_hf(self) -> dict[str, Any]:
        """Fields of config.json for the shape."""
        shape = {_HF_NAMES.get(name, name): value for name, value in asdict(self).items()}
        shape["num_key_value_heads"] = self.heads
        shape["rope_parameters"] = {"rope_type": "default", "rope_theta": shape.pop("rope_theta")}
        return shape

    @classmethod
    def from_hf(cls, fields: Mapping[str, Any]) -> ByteMLAConfig:
        """The inverse of :meth:`to_hf`; further fields are ignored."""
        given = {**fields, "rope_theta": float(fields["rope_parameters"]["rope_theta"])}
        return cls(**{name: given[_HF_NAMES.get(name, name)] for name in cls.__dataclass_fields__})


_HF_NAMES = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "context_length": "max_position_embeddings",
    "rms_eps": "rms_norm_eps",
}


def rotation(positions: Tensor, config: ByteMLAConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float64, ``[..., P/2]``, for `positions` of any shape."""
    width = config.qk_rope_head_dim
    exponent = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device)
    angle = positions.to(torch.float64)[..., None] * config.rope_theta ** -(exponent / max(width, 1))
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` ``[..., P]``: value i and value i + P/2 are a pair. Computes in fp32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    first, second = x.to(wide).chunk(2, dim=-1)
    cos, sin = cos.to(wide), sin.to(wide)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class LatentAttention(nn.Module):
    """Multi-head latent attention. Leading dimensions of inputs are arbitrary: [T] or [B, T]."""

    def __init__(self, config: ByteMLAConfig) -> None:
        super().__init__()
        c = self.config = config
        qk_width = c.qk_nope_head_dim + c.qk_rope_head_dim
        up_width = c.qk_nope_head_dim + c.v_head_dim
        self.q_proj = nn.Linear(c.hidden_size, c.heads * qk_width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(c.hidden_size, c.row_width, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(c.kv_lora_rank, eps=c.rms_eps)
        self.kv_b_proj = nn.Linear(c.kv_lora_rank, c.heads * up_width, bias=False)
        self.o_proj = nn.Linear(c.heads * c.v_head_dim, c.hidden_size, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries ``[..., H, N]`` and ``[..., H, P]``, latent ``[..., R]``, keys ``[..., P]``."""
        c = self.config
        q = self.q_proj(x).unflatten(-1, (c.heads, -1))
        q_nope, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        if c.qk_rope_head_dim:
            q_rope = rotate(q_rope, cos[..., None, :], sin[..., None, :])
            k_rope = rotate(k_rope, cos, sin)
        return q_nope, q_rope, self.kv_a_layernorm(latent), k_rope

    def absorbed(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        """Attention over stored rows: queries and outputs are in the latent space."""
        c = self.config
        q_nope, q_rope, latent, k_rope = self.project(x, cos, sin)
        up = self.kv_b_proj.weight.unflatten(0, (c.heads, -1))
        key_up, value_up = up.split([c.qk_nope_head_dim, c.v_head_dim], dim=1)
        q_latent = torch.einsum("...hn,hnr->...hr", q_nope, key_up)
        q = torch.cat([q_latent, q_rope], dim=-1)
        k = torch.cat([latent, k_rope], dim=-1)
        out = torch.einsum("...hr,hvr->...hv", attend(layer, q, k), value_up)
        return self.o_proj(out.flatten(-2))


class GatedMLP(nn.Module):
    def __init__(self, config: ByteMLAConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: ByteMLAConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_eps)
        self.self_attn = LatentAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_eps)
        self.mlp = GatedMLP(config)


class ByteMLA(nn.Module):
    """The model in its absorbed form; `lm_head` makes logits of `hidden_states`."""

    def __init__(self, config: ByteMLAConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def hidden_states(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Final hidden states, normalised, ``[..., hidden_size]``.

        `ids` and `positions` are integers of one shape, any that `attend` supports.
        """
        cos, sin = rotation(positions, self.config)
        x = self.embed_tokens(ids)
        for index, layer in enumerate(self.layers):
            x = x + layer.self_attn.absorbed(layer.input_layernorm(x), cos, sin, index, attend)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)
