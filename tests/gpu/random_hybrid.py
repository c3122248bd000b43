"""Checkpoints of hybrids of MLA and linear attention, small and random: Kimi-Linear, Ring-2.5, Ling-V3.

Kimi-Linear's is written by transformers' own class; of Bailing's models transformers has none, so their names
and shapes are listed here.
Every token goes to every expert: a selection of experts that jumps would make two servers incomparable. Two
layers of six attend rows; their outputs are scaled up, so that rows show in the answers.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch

VOCAB = 512
LAYERS = 6
HIDDEN = 512
EXPERTS = 8
_SCALE = 0.05
#: Scale of embeddings. With it, bfloat16 instead of float32 arithmetic changes the log-probabilities of
#: Kimi-Linear's shape by 0.021 on average; with `_SCALE` by 0.026. FP8 rows change them by 0.038 with both.
_EMBEDDING_SCALE = 0.5
#: Scale of MLA's output projection.
_MLA_OUT_SCALE = 0.2

#: 0-based ids of the layers with MLA: not the first layer, and not every second one.
MLA_LAYERS = {"kimi_linear": (3, 5), "lightning": (2, 5), "bailing_v3": (2, 5)}
#: Configuration keys that Kimi's and Bailing's models share.
_COMMON = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": HIDDEN, "moe_intermediate_size": 128,
    "first_k_dense_replace": 1, "num_experts": EXPERTS, "num_shared_experts": 1, "topk_group": 1,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "dtype": "bfloat16",
    # Not among the tokens of the prompts.
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_KIMI = {
    **_COMMON,
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear",
    # Of the published checkpoint; SGLang's linear attention always has it (kimi_linear.py:198).
    "rms_norm_eps": 1e-5,
    # q and k have the rope values, but these are not rotated.
    "mla_use_nope": True,
    "head_dim": 72, "q_lora_rank": None, "num_experts_per_token": EXPERTS, "num_expert_group": 1,
    "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
    "use_grouped_topk": True, "routed_scaling_factor": 2.446, "num_nextn_predict_layers": 0,
    "rope_theta": 10000.0, "rope_scaling": None, "model_max_length": 8192, "max_position_embeddings": 8192,
    # Its layers are counted from one.
    "linear_attn_config": {
        "full_attn_layers": [layer + 1 for layer in MLA_LAYERS["kimi_linear"]],
        "kda_layers": [layer + 1 for layer in range(LAYERS) if layer not in MLA_LAYERS["kimi_linear"]],
        "head_dim": 128, "num_heads": 8, "short_conv_kernel_size": 4,
    },
}  # fmt: skip
_BAILING = {
    **_COMMON,
    "model_type": "bailing_hybrid", "head_dim": 128, "q_lora_rank": 256, "layer_group_size": 3,
    "num_experts_per_tok": EXPERTS, "n_group": 1, "norm_topk_prob": True, "router_dtype": "fp32",
    "moe_router_enable_expert_bias": True, "score_function": "sigmoid", "routed_scaling_factor": 2.5,
    "use_bias": False, "use_qkv_bias": False, "max_position_embeddings": 8192, "rope_theta": 600000.0,
    "rope_interleave": True, "num_nextn_predict_layers": 1,
}  # fmt: skip
CONFIGS = {
    "kimi_linear": _KIMI,
    "lightning": {
        **_BAILING,
        "architectures": ["BailingMoeV2_5ForCausalLM"], "use_qk_norm": True, "partial_rotary_factor": 0.5,
        "group_norm_size": 4, "linear_silu": False, "rope_scaling": None,
    },
    "bailing_v3": {
        **_BAILING,
        "architectures": ["BailingMoeV3ForCausalLM"], "short_conv_kernel_size": 4, "no_kda_lora": True,
        "kda_safe_gate": True, "kda_lower_bound": -5.0,
        "gated_attention_proj_granularity_type": "element_wise",
    },
}  # fmt: skip


def write(folder: Path, shape: str) -> Path:
    """Write a checkpoint; returns its folder."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(5)
    weights = _kimi_weights() if shape == "kimi_linear" else dict(_bailing_weights(CONFIGS[shape]))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIGS[shape], indent=2))
    return folder


def kimi_model() -> torch.nn.Module:
    """transformers' model of Kimi-Linear's shape, bf16, with the weights of the checkpoint."""
    import transformers

    torch.manual_seed(5)
    # transformers would set these two keys twice.
    known = {key: value for key, value in _KIMI.items() if key not in ("architectures", "head_dim")}
    config = transformers.models.kimi_linear.KimiLinearConfig(**known, initializer_range=_SCALE)
    model = transformers.models.kimi_linear.KimiLinearForCausalLM(config).bfloat16()
    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            parameter.data = parameter.data.float()
    model.model.embed_tokens.weight.data.mul_(_EMBEDDING_SCALE / _SCALE)
    for layer in MLA_LAYERS["kimi_linear"]:
        model.model.layers[layer].self_attn.o_proj.weight.data.mul_(_MLA_OUT_SCALE / _SCALE)
    return model


def _kimi_weights() -> dict[str, torch.Tensor]:
    """Kimi-Linear's weights under the published names, which transformers writes."""
    import tempfile

    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        kimi_model().save_pretrained(folder)
        [path] = Path(folder).glob("*.safetensors")
        weights = load_file(path)
    # transformers calls a layer's MLP the same whether it has experts or not; published checkpoints do not.
    dense = [f"model.layers.{layer}." for layer in range(_KIMI["first_k_dense_replace"])]
    return {
        name.replace(".block_sparse_moe.", ".mlp.") if name.startswith(tuple(dense)) else name: weight
        for name, weight in weights.items()
    }


# -------------------------------------------------------------------- Bailing


def _matrix(*shape: int, scale: float = _SCALE) -> torch.Tensor:
    return (torch.randn(shape) * scale).bfloat16()


def _ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def _bailing_weights(config: dict) -> Iterator[tuple[str, torch.Tensor]]:
    yield "model.word_embeddings.weight", _matrix(VOCAB, HIDDEN, scale=_EMBEDDING_SCALE)
    yield "model.norm.weight", _ones(HIDDEN)
    yield "lm_head.weight", _matrix(VOCAB, HIDDEN)
    linear = _kda if "short_conv_kernel_size" in config else _lightning
    for layer in range(LAYERS):
        attention = _mla if (layer + 1) % config["layer_group_size"] == 0 else linear
        yield from _decoder(config, layer, attention, sparse=layer >= config["first_k_dense_replace"])
    yield from _decoder(config, LAYERS, _mla, sparse=True)
    extra = f"model.layers.{LAYERS}."
    yield extra + "eh_proj.weight", _matrix(HIDDEN, 2 * HIDDEN)
    for name in ("enorm", "hnorm", "final_layernorm"):
        yield f"{extra}{name}.weight", _ones(HIDDEN)


def _decoder(config: dict, layer: int, attention, *, sparse: bool) -> Iterator[tuple[str, torch.Tensor]]:
    prefix = f"model.layers.{layer}."
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}{name}.weight", _ones(HIDDEN)
    for name, weight in attention(config):
        yield f"{prefix}attention.{name}", weight
    if not sparse:
        yield from _mlp(prefix + "mlp.", config["intermediate_size"])
        return
    yield prefix + "mlp.gate.weight", _matrix(EXPERTS, HIDDEN)
    yield prefix + "mlp.gate.expert_bias", torch.zeros(EXPERTS, dtype=torch.float32)
    for name in ("shared_experts", *(f"experts.{expert}" for expert in range(EXPERTS))):
        yield from _mlp(f"{prefix}mlp.{name}.", config["moe_intermediate_size"])


def _mlp(prefix: str, width: int) -> Iterator[tuple[str, torch.Tensor]]:
    yield prefix + "gate_proj.weight", _matrix(width, HIDDEN)
    yield prefix + "up_proj.weight", _matrix(width, HIDDEN)
    yield prefix + "down_proj.weight", _matrix(HIDDEN, width)


def _mla(config: dict) -> Iterator[tuple[str, torch.Tensor]]:
    heads, rank, q_rank = config["num_attention_heads"], config["kv_lora_rank"], config["q_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    yield "q_a_proj.weight", _matrix(q_rank, HIDDEN)
    yield "q_a_layernorm.weight", _ones(q_rank)
    yield "q_b_proj.weight", _matrix(heads * (nope + rope), q_rank)
    yield "kv_a_proj_with_mqa.weight", _matrix(rank + rope, HIDDEN)
    yield "kv_a_layernorm.weight", _ones(rank)
    yield "kv_b_proj.weight", _matrix(heads * (nope + value), rank)
    yield "dense.weight", _matrix(HIDDEN, heads * value, scale=_MLA_OUT_SCALE)
    if "gated_attention_proj_granularity_type" in config:
        yield "g_proj.weight", _matrix(heads * value, HIDDEN)


def _lightning(config: dict) -> Iterator[tuple[str, torch.Tensor]]:
    head_dim, inner = config["head_dim"], config["num_attention_heads"] * config["head_dim"]
    yield "query_key_value.weight", _matrix(3 * inner, HIDDEN)
    yield "query_layernorm.weight", _ones(head_dim)
    yield "key_layernorm.weight", _ones(head_dim)
    yield "g_proj.weight", _matrix(inner, HIDDEN)
    yield "g_norm.weight", _ones(inner)
    yield "dense.weight", _matrix(HIDDEN, inner)


def _kda(config: dict) -> Iterator[tuple[str, torch.Tensor]]:
    heads, head_dim = config["num_attention_heads"], config["head_dim"]
    inner, kernel = heads * head_dim, config["short_conv_kernel_size"]
    for name in "qkvfg":
        yield f"{name}_proj.weight", _matrix(inner, HIDDEN)
    yield "b_proj.weight", _matrix(heads, HIDDEN)
    for name in "qkv":
        bound = 1 / math.sqrt(kernel)
        yield f"{name}_conv1d.weight", torch.empty(inner, 1, kernel).uniform_(-bound, bound).bfloat16()
    # As FLA initialises them: decays from one to sixteen, steps from a thousandth to a tenth.
    yield "A_log", torch.empty(heads).uniform_(1, 16).log()
    steps = torch.empty(inner).uniform_(math.log(1e-3), math.log(1e-1)).exp()
    yield "dt_bias", steps + torch.log(-torch.expm1(-steps))
    yield "o_norm.weight", _ones(head_dim)
    yield "o_proj.weight", _matrix(HIDDEN, inner)
