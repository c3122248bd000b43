"""States of one linear layer for tests of the kernels, and what comes out of it in float64.

Imports SGLang.
"""

import torch
from hybrid_models import cpu_kernels
from hybrid_net import HybridConfig

CONFIG = HybridConfig(linear_heads=2, linear_head_dim=8)
LAYER, WIDTH, SLOTS = 0, CONFIG.linear_width, 9
CHUNK = cpu_kernels.CHUNK_SIZE
#: A value that no state has by itself.
UNTOUCHED = 7.25


class Pool:
    """Conv and recurrent states as MambaPool lays them out for one KDA layer, and a layer's parameters."""

    def __init__(self, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.conv = torch.full((SLOTS, CONFIG.window - 1, 3 * WIDTH), UNTOUCHED)
        heads, size = CONFIG.linear_heads, CONFIG.linear_head_dim
        self.temporal = torch.full((SLOTS, heads, size, size), UNTOUCHED)
        self.weight = self.draw(3 * WIDTH, CONFIG.window) * 0.5
        self.a_log = self.draw(heads) * 0.3
        self.dt_bias = self.draw(WIDTH) - 3
        self.kernel = object.__new__(cpu_kernels.TorchKDAKernel)

    def draw(self, *shape):
        return torch.randn(*shape, generator=self.generator)

    def inputs(self, tokens):
        """Raw queries, keys and values, forget gate, and write strength of a sequence."""
        return self.draw(tokens, 3 * WIDTH), self.draw(tokens, WIDTH), self.draw(tokens, CONFIG.linear_heads)

    def clear(self, slots):
        """What SGLang does with the slot of a request that begins."""
        self.conv[slots], self.temporal[slots] = 0, 0

    def extend(self, slots, parts, prefixes, track=None):
        """A prefill of `parts` of sequences, each after `prefixes[i]` tokens; outputs of each."""
        qkv, forget, beta = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        lengths = [len(part[0]) for part in parts]
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        indices = torch.tensor(slots, dtype=torch.int32)
        mixed = cpu_kernels.conv_extend(
            qkv.T,
            self.weight,
            None,
            conv_states=self.conv.transpose(-1, -2),
            query_start_loc=starts,
            seq_lens_cpu=lengths,
            cache_indices=indices,
            has_initial_state=torch.tensor(prefixes) > 0,
            activation="silu",
        ).T
        q, k, v = (x.unflatten(-1, (CONFIG.linear_heads, -1))[None] for x in mixed.split(WIDTH, dim=-1))
        wanted = {}
        if track is not None:
            snapshot = torch.full((len(slots), *self.temporal.shape[1:]), UNTOUCHED)
            wanted = {"track_state": snapshot, "track_chunk_idx": torch.tensor(track, dtype=torch.int32)}
        out = self.kernel.extend(
            *(q, k, v, forget.unflatten(-1, (CONFIG.linear_heads, -1))[None], beta[None]),
            ssm_states=self.temporal,
            cache_indices=indices,
            query_start_loc=starts,
            A_log=self.a_log,
            dt_bias=self.dt_bias,
            return_intermediate_states=track is not None,
            **wanted,
        )
        out = out[0] if track is None else out[0][0]
        return list(out.split(lengths)), wanted.get("track_state")

    def decode(self, slots, parts):
        """One token of each sequence; outputs of each."""
        qkv, forget, beta = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        indices = torch.tensor(slots, dtype=torch.int32)
        mixed = cpu_kernels.conv_update(
            qkv,
            self.conv.transpose(-1, -2),
            self.weight,
            None,
            activation="silu",
            conv_state_indices=indices,
        )
        q, k, v = (x.unflatten(-1, (CONFIG.linear_heads, -1))[None] for x in mixed.split(WIDTH, dim=-1))
        return self.kernel.decode(
            *(q, k, v, forget, beta[None]),
            A_log=self.a_log,
            dt_bias=self.dt_bias,
            ssm_states=self.temporal,
            cache_indices=indices,
            query_start_loc=torch.arange(len(slots) + 1, dtype=torch.int32),
        )[0]

    def oracle(self, parts):
        """Outputs of one sequence given in parts, from nothing: matrices in float64, a token at a time."""
        qkv, forget, beta = (torch.cat(tensors).double() for tensors in zip(*parts, strict=True))
        heads, size, window = CONFIG.linear_heads, CONFIG.linear_head_dim, CONFIG.window
        weight, a_log, dt_bias = (x.double() for x in (self.weight, self.a_log, self.dt_bias))
        outs, states = [], [torch.zeros(size, size, dtype=torch.float64)] * heads
        for step in range(len(qkv)):
            seen = qkv[max(0, step - window + 1) : step + 1]
            mixed = (seen * weight[:, window - len(seen) :].T).sum(0)
            q, k, v = (mixed * torch.sigmoid(mixed)).view(3, heads, size)
            for head in range(heads):
                unit_q, unit_k = (x[head] / (x[head] @ x[head] + 1e-6).sqrt() for x in (q, k))
                rate = (forget[step] + dt_bias).view(heads, size)[head].exp().log1p()
                strength = 1 / (1 + (-beta[step, head]).exp())
                # S <- S D (I - b k k^T) + b v k^T
                erase = torch.eye(size, dtype=torch.float64) - strength * torch.outer(unit_k, unit_k)
                kept = torch.diag((-a_log[head].exp() * rate).exp())
                states[head] = states[head] @ kept @ erase + strength * torch.outer(v[head], unit_k)
                outs.append(states[head] @ unit_q * size**-0.5)
        return torch.stack(outs).view(-1, heads, size)
