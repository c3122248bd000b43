"""A small hybrid language model as plain torch modules: linear-attention layers beside MLA layers.

The linear layers are Kimi Delta Attention as SGLang's KimiLinearForCausalLM has them: a short causal
convolution over queries, keys and values, then a gated delta rule whose state per head is a matrix. The MLA
layers, the MLP and the row format are :mod:`sgl_kvpool.demo.net`'s. Importing this does not import SGLang.

Callables keep what a layer remembers, in SGLang's pools.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sgl_kvpool.demo.net import ByteMLAConfig, GatedMLP, LatentAttention, rotation

#: What SGLang's kernels add to the squared length of a query or key before the root.
NORM_EPS = 1e-6


@dataclass(frozen=True)
class HybridConfig:
    """Shape of the model: that of the MLA layers, and of the linear ones."""

    mla: ByteMLAConfig = field(default_factory=lambda: ByteMLAConfig(layers=5, intermediate_size=512))
    #: Layers with a state; the others have rows. Counted from 0, unlike in config.json.
    linear_layers: tuple[int, ...] = (0, 1, 3)
    linear_heads: int = 4
    linear_head_dim: int = 32
    window: int = 4

    @property
    def linear_width(self) -> int:
        """Width of the queries of all linear heads, of the keys, and of the values."""
        return self.linear_heads * self.linear_head_dim

    @classmethod
    def from_hf(cls, fields) -> HybridConfig:
        """The shape that config.json's fields state."""
        linear = fields["linear_attn_config"]
        return cls(
            mla=ByteMLAConfig.from_hf(fields),
            linear_layers=tuple(i - 1 for i in linear["kda_layers"]),
            linear_heads=linear["num_heads"],
            linear_head_dim=linear["head_dim"],
            window=linear["short_conv_kernel_size"],
        )


class DeltaAttention(nn.Module):
    """Projections around the delta rule. Leading dimensions of inputs are free."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        hidden, width = config.mla.hidden_size, config.linear_width
        self.head_dim = config.linear_head_dim
        self.qkv_proj = nn.Linear(hidden, 3 * width, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(3 * width, config.window))
        #: Forget gate and output gate have low-rank projections, as in Kimi Linear.
        self.f_a_proj = nn.Linear(hidden, self.head_dim, bias=False)
        self.f_b_proj = nn.Linear(self.head_dim, width, bias=False)
        self.g_a_proj = nn.Linear(hidden, self.head_dim, bias=False)
        self.g_b_proj = nn.Linear(self.head_dim, width, bias=False)
        self.b_proj = nn.Linear(hidden, config.linear_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(config.linear_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(width, dtype=torch.float32))
        self.o_norm = nn.RMSNorm(self.head_dim, eps=config.mla.rms_eps)
        self.o_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor, layer: int, recur) -> Tensor:
        """`recur(layer, qkv [..., 3*W], forget [..., W], beta [..., H]) -> [..., H, D]` of raw inputs."""
        forget = self.f_b_proj(self.f_a_proj(x))
        gate = self.g_b_proj(self.g_a_proj(x)).unflatten(-1, (-1, self.head_dim))
        out = recur(layer, self.qkv_proj(x), forget, self.b_proj(x))
        return self.o_proj((self.o_norm(out) * torch.sigmoid(gate)).flatten(-2))


class HybridLayer(nn.Module):
    def __init__(self, config: HybridConfig, index: int) -> None:
        super().__init__()
        c = config.mla
        self.is_linear = index in config.linear_layers
        self.input_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_eps)
        self.self_attn = DeltaAttention(config) if self.is_linear else LatentAttention(c)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_eps)
        self.mlp = GatedMLP(c)


class HybridNet(nn.Module):
    """The model; `attend` and `recur` remember what came before."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        c = config.mla
        self.config = config
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(HybridLayer(config, i) for i in range(c.layers))
        self.norm = nn.RMSNorm(c.hidden_size, eps=c.rms_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)

    def hidden_states(self, ids: Tensor, positions: Tensor, attend, recur) -> Tensor:
        """Final hidden states, normalised; `ids` and `positions` have one shape."""
        cos, sin = rotation(positions, self.config.mla)
        x = self.embed_tokens(ids)
        for index, layer in enumerate(self.layers):
            normed = layer.input_layernorm(x)
            if layer.is_linear:
                x = x + layer.self_attn(normed, index, recur)
            else:
                x = x + layer.self_attn.absorbed(normed, cos, sin, index, attend)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)


def decay(forget: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Factors on the rows of the state, ``[..., H, D]``, from the raw forget gate ``[..., H*D]``."""
    heads = a_log.numel()
    raw = F.softplus(forget + dt_bias.flatten()).unflatten(-1, (heads, -1))
    return torch.exp(-torch.exp(a_log.view(heads, 1)) * raw)


def delta_step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: Tensor, beta: Tensor):
    """One token: new state ``[H, V, K]`` and output ``[H, V]``; `beta` is ``[H, 1]`` in 0..1."""
    state = state * kept[:, None, :]
    wrong = v - (state @ k[..., None])[..., 0]
    state = state + (beta * wrong)[..., None] * k[:, None, :]
    return state, (state @ q[..., None])[..., 0]
