"""Plain-torch forms of the Triton kernels that SGLang's KDA backend launches, for a machine without a GPU.

Only kernels are replaced. `KDAAttnBackend`, its metadata, `MambaPool` and its slots stay SGLang's, and SGLang
decides which states are tracked for the radix cache. :func:`install` puts the functions below where SGLang
looks for its own.

Indices of state slots below 0 are padding and nothing is read or written for them.
"""

import torch
from hybrid_net import NORM_EPS, decay, delta_step
from sglang.kernels.ops.attention.fla.chunk_delta_h import CHUNK_SIZE
from sglang.srt.layers.attention import hybrid_linear_attn_backend
from sglang.srt.layers.attention.linear import kda_backend
from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel
from torch import Tensor
from torch.nn import functional as F


def _convolve(history: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Causal depthwise convolution of ``[C, T]`` after ``[C, W-1]`` earlier values, then SiLU."""
    joined = torch.cat([history, x], dim=-1).float()
    wide = F.conv1d(
        joined[None], weight.float()[:, None], None if bias is None else bias.float(), groups=len(weight)
    )
    return F.silu(wide[0]).to(x.dtype)


def conv_extend(
    x, weight, bias, conv_states, query_start_loc, cache_indices=None, has_initial_state=None, **_
):
    """Packed sequences, ``[C, T]`` in and out; updates their `conv_states` ``[slots, C, W-1]``."""
    out = torch.empty_like(x)
    bounds = query_start_loc.tolist()
    for row, slot in enumerate(cache_indices.tolist()):
        begin, end = bounds[row], bounds[row + 1]
        if slot < 0 or begin == end:
            continue
        history = conv_states[slot]
        if not has_initial_state[row]:
            history = torch.zeros_like(history)
        out[:, begin:end] = _convolve(history.to(x.dtype), x[:, begin:end], weight, bias)
        joined = torch.cat([history.to(x.dtype), x[:, begin:end]], dim=-1)
        conv_states[slot] = joined[:, -history.shape[-1] :]
    return out


def conv_update(x, conv_state, weight, bias=None, activation=None, conv_state_indices=None, **_):
    """One token ``[B, C]`` of each sequence."""
    out = torch.zeros_like(x)
    for row, slot in enumerate(conv_state_indices.tolist()):
        if slot < 0:
            continue
        history = conv_state[slot].to(x.dtype)
        out[row] = _convolve(history, x[row, :, None], weight, bias)[:, 0]
        conv_state[slot] = torch.cat([history, x[row, :, None]], dim=-1)[:, 1:]
    return out


class TorchKDAKernel(TritonKDAKernel):
    """The gated delta rule token by token in fp32, behind the interface of SGLang's Triton kernel."""

    # One way through the backend for every decode: conv, then decode().
    supports_packed_decode = False
    supports_fused_chain_verify = False

    def decode(self, q, k, v, a, b, *, A_log, dt_bias, ssm_states, cache_indices, query_start_loc, **_):
        """One or more tokens of each sequence, ``[1, T, H, D]`` each."""
        return self._run(q, k, v, a, b, A_log, dt_bias, ssm_states, cache_indices, query_start_loc)

    def extend(
        self, q, k, v, g, beta, *, ssm_states, cache_indices, query_start_loc, A_log=None, dt_bias=None,
        return_intermediate_states=False, track_state=None, track_chunk_idx=None, **_,
    ):  # fmt: skip
        """Prefill; `track_state` ``[B, H, V, K]`` gets the states before the chunks `track_chunk_idx`."""
        wanted = [-1] * len(cache_indices) if track_state is None else track_chunk_idx.tolist()
        out = self._run(
            *(q, k, v, g, beta, A_log, dt_bias, ssm_states, cache_indices, query_start_loc),
            track_state=track_state,
            track_steps=[chunk * CHUNK_SIZE for chunk in wanted],
        )
        # States of chunks that nobody tracks are not kept: the backend then reads `track_state` alone.
        return (out, None) if return_intermediate_states else out

    def target_verify(self, *_, **__):
        """Speculative decoding is not for this model."""
        raise NotImplementedError("the hybrid test model has no speculative decoding")

    @staticmethod
    def _run(q, k, v, a, b, a_log, dt_bias, states, slots, starts, track_state=None, track_steps=None):
        tokens, heads, size = q.shape[1:]
        dtype = v.dtype
        q, k, v = (tensor[0].float() for tensor in (q, k, v))
        q = q / (q.square().sum(-1, keepdim=True) + NORM_EPS).sqrt() * size**-0.5
        k = k / (k.square().sum(-1, keepdim=True) + NORM_EPS).sqrt()
        kept = decay(a.float().reshape(tokens, -1), a_log.float(), dt_bias.float())
        strength = torch.sigmoid(b.float().reshape(tokens, heads, 1))
        out = torch.zeros_like(v)
        bounds = starts.tolist()
        for row, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            begin, end = bounds[row], bounds[row + 1]
            # SGLang has cleared the slot of a sequence that begins.
            state = states[slot].float()
            for step in range(begin, end):
                if track_steps and step - begin == track_steps[row]:
                    track_state[row] = state
                state, out[step] = delta_step(state, q[step], k[step], v[step], kept[step], strength[step])
            states[slot] = state.to(states.dtype)
        return out.to(dtype)[None]


def track_one_layer(conv_states, ssm_states, cache_indices, mask, track_indices, batch_size, **_):
    """Copy the states ``[slots, ...]`` of sequences in `mask` to their tracking slots."""
    track_all_layers(conv_states[None], ssm_states[None], cache_indices, mask, track_indices, batch_size)


def track_all_layers(conv_pool, ssm_pool, cache_indices, mask, track_indices, batch_size, **_):
    """The same for ``[layers, slots, ...]``."""
    rows = mask[:batch_size].nonzero()[:, 0]
    source, target = cache_indices[rows].long(), track_indices[rows].long()
    used = (source >= 0) & (target >= 0)
    for pool in (conv_pool, ssm_pool):
        pool[:, target[used]] = pool[:, source[used]]


def install() -> None:
    """Let SGLang's KDA backend find these; before it is constructed."""
    kda_backend.causal_conv1d_fn = conv_extend
    kda_backend.causal_conv1d_update = conv_update
    kda_backend.TritonKDAKernel = TorchKDAKernel
    hybrid_linear_attn_backend.track_mamba_states_if_needed = track_one_layer
    hybrid_linear_attn_backend.track_mamba_states_all_layers = track_all_layers
    if not torch.cuda.is_available():
        # `ScheduleBatch.prepare_for_decode` pins the mask of tracked requests, which needs a GPU.
        torch.Tensor.pin_memory = lambda self, *_, **__: self
