"""Checkpoints of the shapes of DeepSeek-V3 and V3.2, Kimi-K2 and GLM-5, small and random, with an MTP layer.

Written by transformers' own classes, so that names and shapes are those SGLang loads. Weights are large
enough for attention to decide something: with the usual 0.02 all keys look alike. All weights are bf16, the
indexer's too: SGLang's indexer quantises its queries and keys itself, its weights only where a checkpoint
has FP8.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch

VOCAB = 512
LAYERS = 3
#: Tokens that an indexer selects. No other number works with SGLang's defaults: where the top-k list of a
#: prefill is of slots (BF16 rows, or 656-byte rows read by flashmla_kv), `fast_topk_transform_fused` of
#: sgl_kernel asserts 2048. So prompts have to be longer for a selection to matter.
INDEX_TOPK = 2048

#: What differs between shapes: heads, groups of experts.
DENSE = {
    "deepseek_v3": {"num_attention_heads": 16, "n_group": 2, "topk_group": 1, "n_routed_experts": 8},
    "kimi_k2": {"num_attention_heads": 64, "n_group": 1, "topk_group": 1, "n_routed_experts": 12},
}
#: Every token goes to every expert: a selection of experts that jumps would, as the indexer's selection does,
#: make answers of two servers differ.
ALL_EXPERTS = {"n_group": 1, "topk_group": 1, "n_routed_experts": 8, "num_experts_per_tok": 8}
#: Heads have to divide 64 or be a multiple of it (flashmla_sparse; flashmla_kv pads to 64 or 128, tilelang
#: wants 16 at least); heads of an indexer have to be 32 or 64, of 128 values (DeepGEMM's fp8_mqa_logits).
SPARSE = {
    "deepseek_v32": {**ALL_EXPERTS, "num_attention_heads": 16, "index_n_heads": 64},
    # Its indexer rotates interleaved pairs, for which SGLang has other, fused kernels.
    "glm5": {
        **ALL_EXPERTS, "num_attention_heads": 64, "index_n_heads": 32, "indexer_rope_interleave": True,
        "qk_nope_head_dim": 192, "v_head_dim": 256,
    },
}  # fmt: skip
SHAPES = {**DENSE, **SPARSE}
#: Prefix of transformers' configuration and model.
CLASSES = {"deepseek_v32": "DeepseekV32", "glm5": "GlmMoeDsa"}
#: In config.json of every published checkpoint and read by SGLang's classes, but not written by transformers.
PUBLISHED = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
#: Written by transformers, but absent from published checkpoints.
UNPUBLISHED = ("layer_types", "mlp_layer_types")
#: As llm-compressor writes it where it quantises nothing but rows.
ONLY_K_SCALES = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {},
    "ignore": ["re:.*"],
    "kv_cache_scheme": {
        "num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True,
    },
}  # fmt: skip


def config_of(shape: str, **changed):
    """transformers' configuration."""
    import transformers

    differing = {"qk_nope_head_dim": 128, "v_head_dim": 128, "num_experts_per_tok": 2, **SHAPES[shape]}
    if shape in SPARSE:
        differing |= {"index_topk": INDEX_TOPK, "index_head_dim": 128}
    differing |= changed
    return getattr(transformers, f"{CLASSES.get(shape, 'DeepseekV3')}Config")(
        **differing, num_key_value_heads=differing["num_attention_heads"], vocab_size=VOCAB, hidden_size=512,
        intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=LAYERS, n_shared_experts=1,
        kv_lora_rank=512, q_lora_rank=256, qk_rope_head_dim=64, first_k_dense_replace=1,
        max_position_embeddings=8192, num_nextn_predict_layers=1, initializer_range=0.05,
    )  # fmt: skip


def write(folder: Path, shape: str, *, k_scales: Sequence[float] = (), **changed) -> Path:
    """Write a checkpoint, with k_scales of its layers; returns its folder. `changed` is its configuration."""
    import transformers
    from safetensors.torch import load_file, save_file

    folder, config = Path(folder), config_of(shape, **changed)
    torch.manual_seed(5)
    model = f"{CLASSES.get(shape, 'DeepseekV3')}ForCausalLM"
    getattr(transformers, model)(config).bfloat16().save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    published = {key: value for key, value in written.items() if key not in UNPUBLISHED}
    if k_scales:
        published["quantization_config"] = ONLY_K_SCALES
    (folder / "config.json").write_text(json.dumps(published | PUBLISHED, indent=2))
    [path] = folder.glob("*.safetensors")
    weights = load_file(path)
    # The layer for MTP: a decoder layer after the last one, and what surrounds it.
    last, extra = f"model.layers.{LAYERS - 1}.", f"model.layers.{LAYERS}."
    draft = {extra + n.removeprefix(last): w.clone() for n, w in weights.items() if n.startswith(last)}
    hidden = config.hidden_size
    for name in ("enorm", "hnorm", "shared_head.norm"):
        draft[f"{extra}{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    draft |= {
        extra + "eh_proj.weight": (torch.randn(hidden, 2 * hidden) * 0.05).bfloat16(),
        extra + "shared_head.head.weight": weights["lm_head.weight"].clone(),
        extra + "embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
    }
    draft |= {
        f"model.layers.{layer}.self_attn.{x}_proj.{x}_scale": torch.tensor(scale)
        for layer, scale in enumerate(k_scales)
        for x in "kv"
    }
    save_file(weights | draft, path, metadata={"format": "pt"})
    return folder
