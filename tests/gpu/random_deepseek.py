"""Checkpoints of the shapes of DeepSeek-V3 and Kimi-K2, small and random, with a layer for MTP.

Written by transformers' own class, so that names and shapes are those SGLang loads. Weights are large enough
for attention to decide something: with the usual 0.02 all keys look alike.
"""

from pathlib import Path

import torch

VOCAB = 512
LAYERS = 3
#: What differs between the two: heads, groups of experts.
SHAPES = {
    "deepseek_v3": {"num_attention_heads": 16, "n_group": 2, "topk_group": 1, "n_routed_experts": 8},
    "kimi_k2": {"num_attention_heads": 64, "n_group": 1, "topk_group": 1, "n_routed_experts": 12},
}


def write(folder: Path, shape: str) -> Path:
    """Write a checkpoint; returns its folder."""
    from safetensors.torch import load_file, save_file
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    heads = SHAPES[shape]["num_attention_heads"]
    config = DeepseekV3Config(
        **SHAPES[shape],
        num_key_value_heads=heads,
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=LAYERS,
        n_shared_experts=1,
        kv_lora_rank=512,
        q_lora_rank=256,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        max_position_embeddings=8192,
        num_nextn_predict_layers=1,
        initializer_range=0.05,
    )
    torch.manual_seed(5)
    DeepseekV3ForCausalLM(config).bfloat16().save_pretrained(folder)
    [path] = Path(folder).glob("*.safetensors")
    weights = load_file(path)
    # The layer for MTP: a decoder layer after the last one, and what surrounds it.
    last, extra = f"model.layers.{LAYERS - 1}.", f"model.layers.{LAYERS}."
    draft = {extra + n.removeprefix(last): w.clone() for n, w in weights.items() if n.startswith(last)}
    hidden = config.hidden_size
    draft |= {
        extra + "enorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        extra + "hnorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        extra + "eh_proj.weight": (torch.randn(hidden, 2 * hidden) * 0.05).bfloat16(),
        extra + "shared_head.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        extra + "shared_head.head.weight": weights["lm_head.weight"].clone(),
        extra + "embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
    }
    save_file(weights | draft, path, metadata={"format": "pt"})
    return Path(folder)
