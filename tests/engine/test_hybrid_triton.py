"""The plain-torch kernels of the hybrid model against SGLang's own, run by Triton's interpreter.

The interpreter does not run the chunked kernel of SGLang's prefill; our prefill is the code of our decode.
"""

import os

import pytest
import torch

pytest.importorskip("sglang")
from hybrid_models import cpu_kernels
from hybrid_states import CHUNK, CONFIG, WIDTH, Pool

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")


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
