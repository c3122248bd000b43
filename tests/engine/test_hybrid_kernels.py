"""The plain-torch kernels of the hybrid model: against the delta rule in float64, and against SGLang's.

Triton's interpreter runs SGLang's kernels for one token here, and the convolutions and copies. The chunked
kernel of its prefill does not run in it; prefill is the same code as decoding on our side.
"""

import os

import pytest
import torch
from hybrid_net import HybridConfig, HybridNet, Remembered

pytest.importorskip("sglang")
from hybrid_models import cpu_kernels

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


def close(found, wanted):
    """Equal up to the rounding of fp32."""
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)


def test_the_plain_net_is_the_oracle():
    pool = Pool(7)
    part = pool.inputs(CHUNK + 3)
    net = HybridNet(CONFIG)
    attention = net.layers[LAYER].self_attn
    attention.conv_weight.data = pool.weight.double()
    attention.A_log.data, attention.dt_bias.data = pool.a_log.double(), pool.dt_bias.double()
    with torch.no_grad():
        out = Remembered(net).recur(LAYER, *(tensor.double() for tensor in part))
    torch.testing.assert_close(out, pool.oracle([part]))


@pytest.mark.parametrize("tokens", [1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_a_sequence_from_nothing(tokens):
    pool = Pool()
    part = pool.inputs(tokens)
    pool.clear([3])
    [out], _ = pool.extend([3], [part], [0])
    close(out, pool.oracle([part]))


@pytest.mark.parametrize("cut", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1])
def test_a_prefix_goes_on_where_it_ended(cut):
    pool = Pool(1)
    first, second = pool.inputs(cut), pool.inputs(CHUNK + 9)
    pool.clear([5])
    [head], _ = pool.extend([5], [first], [0])
    [tail], _ = pool.extend([5], [second], [cut])
    close(torch.cat([head, tail]), pool.oracle([first, second]))


def test_decoded_tokens_go_on_from_a_prefill_and_from_each_other():
    pool = Pool(2)
    parts = [pool.inputs(CHUNK), *(pool.inputs(1) for _ in range(6))]
    pool.clear([2])
    [head], _ = pool.extend([2], parts[:1], [0])
    rest = [pool.decode([2], [part]) for part in parts[1:]]
    close(torch.cat([head, *rest]), pool.oracle(parts))


def test_sequences_of_a_batch_keep_to_their_slots():
    pool = Pool(3)
    lengths, slots = [5, CHUNK, 1, CHUNK + 7], [4, 1, 8, 6]
    begun, more = [pool.inputs(n) for n in (3, 2, 9)], [pool.inputs(n) for n in lengths]
    pool.clear(slots)
    # The last begins now, the others have begun in another order and batch.
    pool.extend([8, 4, 1], [begun[2], begun[0], begun[1]], [0, 0, 0])
    outs, _ = pool.extend(slots, more, [3, 2, 9, 0])
    steps = [pool.inputs(1) for _ in slots]
    last = pool.decode(slots, steps)
    for row in range(4):
        whole = [*begun[row : row + 1], more[row], steps[row]]
        close(torch.cat([outs[row], last[row : row + 1]]), pool.oracle(whole)[-lengths[row] - 1 :])
    free = [slot for slot in range(SLOTS) if slot not in slots]
    assert (pool.conv[free] == UNTOUCHED).all()
    assert (pool.temporal[free] == UNTOUCHED).all()


def test_a_padded_row_reads_and_writes_no_slot():
    pool = Pool(4)
    pool.clear([2])
    part = pool.inputs(4)
    outs, _ = pool.extend([2, -1], [part, pool.inputs(3)], [0, 0])
    close(outs[0], pool.oracle([part]))
    pool.decode([-1, 2], [pool.inputs(1), pool.inputs(1)])
    free = [slot for slot in range(SLOTS) if slot != 2]
    assert (pool.conv[free] == UNTOUCHED).all()
    assert (pool.temporal[free] == UNTOUCHED).all()


def test_a_sequence_that_begins_does_not_see_what_was_in_its_slot():
    pool = Pool(5)
    part = pool.inputs(6)
    pool.temporal[1] = 0
    # SGLang clears the window too; the kernel is told that there is no prefix, and must not read it.
    [out], _ = pool.extend([1], [part], [0])
    close(out, pool.oracle([part]))


@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_the_state_of_a_tracked_chunk_is_that_of_a_sequence_that_ends_there(chunk):
    pool, other = Pool(6), Pool(6)
    part = pool.inputs(2 * CHUNK + 11)
    pool.clear([3, 4])
    _, snapshot = pool.extend([4, 3], [pool.inputs(5), part], [0, 0], track=[-1, chunk])
    other.clear([7])
    if chunk:
        other.extend([7], [tuple(tensor[: chunk * CHUNK] for tensor in part)], [0])
    torch.testing.assert_close(snapshot[1], other.temporal[7])
    assert (snapshot[0] == UNTOUCHED).all()


def test_tracking_copies_the_masked_rows_alone():
    layers, slots = 3, 10
    conv = torch.arange(layers * slots * 4.0).view(layers, slots, 2, 2)
    temporal = -torch.arange(layers * slots * 8.0).view(layers, slots, 2, 2, 2)
    before = conv.clone(), temporal.clone()
    indices = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    mask = torch.tensor([True, False, True, True])
    # The last row's tracking slot has been given back.
    targets = torch.tensor([7, 8, 9, -1])
    cpu_kernels.track_all_layers(conv, temporal, indices, mask, targets, 4)
    for found, old in zip((conv, temporal), before, strict=True):
        wanted = old.clone()
        wanted[:, 7], wanted[:, 9] = old[:, 1], old[:, 3]
        assert torch.equal(found, wanted)
    cpu_kernels.track_one_layer(conv[1], temporal[1], indices, mask[[1, 0, 1, 1]], targets, 2)
    assert torch.equal(conv[1, 8], before[0][1, 2])
    assert torch.equal(conv[0, 8], before[0][0, 8])


# ------------------------------------------------------------------ SGLang's own kernels

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="takes CPU tensors")


@interpreted
def test_one_token_as_sglangs_kernel(monkeypatch):
    import triton.language as tl
    from sglang.kernels.ops.attention.fla import fused_recurrent

    # The interpreter replaces tl.exp while a kernel runs, and not what has been imported under another name.
    monkeypatch.setattr(fused_recurrent, "exp", lambda x: tl.exp(x))
    pool, heads, size = Pool(8), CONFIG.linear_heads, CONFIG.linear_head_dim
    mixed, forget, beta = pool.inputs(3)
    pool.temporal.copy_(pool.draw(*pool.temporal.shape))
    states, slots = pool.temporal.clone(), torch.tensor([4, -1, 2], dtype=torch.int32)
    wanted = torch.empty(3, 1, heads, size)
    fused_recurrent.fused_recurrent_kda_packed_decode(
        *(mixed, forget, beta, pool.a_log, pool.dt_bias, size**-0.5, states, wanted, slots),
        use_qk_l2norm_in_kernel=True,
    )
    q, k, v = (x.unflatten(-1, (heads, -1))[None] for x in mixed.split(WIDTH, dim=-1))
    found = pool.kernel.decode(
        *(q, k, v, forget, beta[None]),
        A_log=pool.a_log,
        dt_bias=pool.dt_bias,
        ssm_states=pool.temporal,
        cache_indices=slots,
        query_start_loc=torch.arange(4, dtype=torch.int32),
    )
    torch.testing.assert_close(found[0], wanted[:, 0])
    torch.testing.assert_close(pool.temporal, states)


@interpreted
def test_convolutions_as_sglangs_kernels():
    from sglang.kernels.ops.mamba import causal_conv1d_triton

    pool = Pool(9)
    pool.conv.copy_(pool.draw(*pool.conv.shape))
    slots, x = torch.tensor([4, 1, 2], dtype=torch.int32), pool.draw(CHUNK + 6, 3 * WIDTH)
    packed = {
        "cache_indices": slots,
        "has_initial_state": torch.tensor([True, False, True]),
        "query_start_loc": torch.tensor([0, 2, CHUNK + 2, CHUNK + 6], dtype=torch.int32),
        "seq_lens_cpu": [2, CHUNK, 4],
        "activation": "silu",
    }
    found, wanted = [], []
    for kernels, outs in (
        ((cpu_kernels.conv_extend, cpu_kernels.conv_update), found),
        ((causal_conv1d_triton.causal_conv1d_fn, causal_conv1d_triton.causal_conv1d_update), wanted),
    ):
        states = pool.conv.clone()
        view = states.transpose(-1, -2)
        outs.append(kernels[0](x.T, pool.weight, None, conv_states=view, **packed))
        outs.append(states.clone())
        outs.append(kernels[1](x[:3].clone(), view, pool.weight, None, "silu", conv_state_indices=slots))
        outs.append(states)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@interpreted
def test_tracking_as_sglangs_kernel(monkeypatch):
    from sglang.kernels.ops.mamba import mamba_state_scatter_triton as scatter

    monkeypatch.setattr(scatter, "_num_sms", lambda device: 1)
    pool = Pool(10)
    conv, temporal = pool.draw(3, 10, 2, 5), pool.draw(3, 10, 2, 4, 4)
    rows = (torch.tensor([1, 2, 3]).int(), torch.tensor([True, False, True]), torch.tensor([7, 8, 9]), 3)
    found, wanted = (conv.clone(), temporal.clone()), (conv.clone(), temporal.clone())
    cpu_kernels.track_all_layers(*found, *rows)
    scatter.track_mamba_states_all_layers(*wanted, *rows)
    cpu_kernels.track_one_layer(found[0][2], found[1][2], rows[0], rows[1], torch.tensor([4, 5, 6]), 3)
    scatter.track_mamba_states_if_needed(
        wanted[0][2], wanted[1][2], rows[0], rows[1], torch.tensor([4, 5, 6]), 3
    )
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
