"""The demo checkpoint and its model, without a server."""

import json

import numpy as np
import pytest
import torch
from byte_model import SPECIAL_TOKEN, read_config, read_model, write_config, write_tokenizer
from random_checkpoint import write_random_model

from sgl_kvpool.demo.net import SPECIAL_TOKEN_ID, ByteMLAConfig

SMALL = {"hidden_size": 32, "intermediate_size": 48, "kv_lora_rank": 128}
SMALL |= {"qk_nope_head_dim": 16, "v_head_dim": 24}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    # With config.json beside it, since transformers picks the class from both.
    folder = tmp_path_factory.mktemp("tokenizer")
    write_config(folder, ByteMLAConfig())
    write_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("rope", [0, 64])
def test_config_says_mla_and_round_trips(tmp_path, rope):
    config = ByteMLAConfig(layers=5, kv_lora_rank=256, qk_rope_head_dim=rope, rope_theta=5e4)
    write_config(tmp_path, config)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["architectures"] == ["DeepseekV2ForCausalLM"]
    assert fields["first_k_dense_replace"] == fields["num_hidden_layers"] == 5
    assert fields["max_position_embeddings"] == 4096
    assert isinstance(fields["n_routed_experts"], int)
    assert read_config(tmp_path) == config


def test_tokenizer_round_trip(tokenizer):
    # Every byte that UTF-8 uses: each lead byte twice, and thereby each continuation byte.
    points = [*range(0x800), *range(0x800, 0xD800, 64), *range(0xE000, 0x110000, 64)]
    text = "".join(map(chr, points)) + "  two  spaces\r\n\n\ttab 'll the end "
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert set(range(256)) - set(ids) == {0xC0, 0xC1, *range(0xF5, 0x100)}
    assert tokenizer.decode(ids) == text
    # What is not UTF-8 decodes to replacement characters, one at a time.
    assert tokenizer.decode([0x61, 0xFF, 0x62]) == "a\ufffdb"


def test_special_token(tokenizer):
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == SPECIAL_TOKEN_ID
    assert tokenizer.encode(f"a{SPECIAL_TOKEN}b") == [97, SPECIAL_TOKEN_ID, 98]
    assert tokenizer.decode([97, SPECIAL_TOKEN_ID, 98], skip_special_tokens=True) == "ab"
    assert len(tokenizer) == ByteMLAConfig().vocab_size


def oracle(weights, config, ids):
    """Logits [T, V] of one sequence in float64: per head, per query, with complex rotations."""
    w = {name: tensor.double().numpy() for name, tensor in weights.items()}
    c, count = config, len(ids)

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + c.rms_eps) * w[f"{name}.weight"]

    def turn(x):
        half = x.shape[-1] // 2
        pair = np.arange(half)
        angle = np.arange(count)[:, None] / c.rope_theta ** (2 * pair / max(2 * half, 1))
        z = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angle)
        return np.concatenate([z.real, z.imag], axis=1)

    x = w["embed_tokens.weight"][ids]
    for n in range(c.layers):
        at, a = f"layers.{n}.self_attn", norm(x, f"layers.{n}.input_layernorm")
        compressed = a @ w[f"{at}.kv_a_proj_with_mqa.weight"].T
        latent = norm(compressed[:, : c.kv_lora_rank], f"{at}.kv_a_layernorm")
        k_rope = turn(compressed[:, c.kv_lora_rank :])
        q_all = a @ w[f"{at}.q_proj.weight"].T
        kv_all = latent @ w[f"{at}.kv_b_proj.weight"].T
        q_width = c.qk_nope_head_dim + c.qk_rope_head_dim
        kv_width = c.qk_nope_head_dim + c.v_head_dim
        heads = []
        for h in range(c.heads):
            q = q_all[:, h * q_width : (h + 1) * q_width]
            kv = kv_all[:, h * kv_width : (h + 1) * kv_width]
            q = np.concatenate([q[:, : c.qk_nope_head_dim], turn(q[:, c.qk_nope_head_dim :])], 1)
            k = np.concatenate([kv[:, : c.qk_nope_head_dim], k_rope], 1)
            v = kv[:, c.qk_nope_head_dim :]
            out = np.empty_like(v)
            for t in range(count):
                score = k[: t + 1] @ q[t] / np.sqrt(q_width)
                weight = np.exp(score - score.max())
                out[t] = weight @ v[: t + 1] / weight.sum()
            heads.append(out)
        x = x + np.concatenate(heads, axis=1) @ w[f"{at}.o_proj.weight"].T
        b = norm(x, f"layers.{n}.post_attention_layernorm")
        gate = b @ w[f"layers.{n}.mlp.gate_proj.weight"].T
        up = b @ w[f"layers.{n}.mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"layers.{n}.mlp.down_proj.weight"].T
    return norm(x, "norm") @ w["lm_head.weight"].T


@pytest.mark.parametrize("absorbed", [True, False])
@pytest.mark.parametrize("rope", [0, 64])
def test_forward_equals_the_oracle(tmp_path, rope, absorbed):
    folder = write_random_model(tmp_path, seed=7, qk_rope_head_dim=rope, **SMALL)
    net = read_model(folder, torch.float64)
    torch.manual_seed(0)
    # With weights of 1, a norm that ignores its weight would go unnoticed.
    for parameter in net.parameters():
        if parameter.ndim == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    ids = torch.randint(0, 256, (2, 37))
    with torch.no_grad():
        got = net(ids, absorbed=absorbed)
    for b in range(2):
        want = oracle(net.state_dict(), net.config, ids[b].numpy())
        np.testing.assert_allclose(got[b].numpy(), want, rtol=0, atol=1e-10)
    assert np.abs(want[:, 0x20:0x7F]).max() > 1
