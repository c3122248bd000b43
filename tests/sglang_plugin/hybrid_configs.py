"""Configurations of hybrid models for `checkpoints`: fields that differ from those of the small MLA model.

MLA layers are 3 and 5 of 6, so no layer id is equal to its index in the pool; `kda-alone`, `gdn` and `dots3`
differ.
"""

LAYERS = 6
MLA_LAYERS = [3, 5]


def _kimi(mla_layers):
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "num_hidden_layers": LAYERS,
        "first_k_dense_replace": LAYERS,
        "num_nextn_predict_layers": 0,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 64,
        "mla_use_nope": True,
        # Counted from 1, as in checkpoints of the Kimi-Linear family.
        "linear_attn_config": {
            "full_attn_layers": [layer + 1 for layer in mla_layers],
            "kda_layers": [layer + 1 for layer in range(LAYERS) if layer not in mla_layers],
            "head_dim": 16,
            "num_heads": 3,
            "short_conv_kernel_size": 4,
        },
    }


_BAILING = {
    "model_type": "bailing_hybrid",
    "num_hidden_layers": LAYERS,
    "layer_group_size": [1, 1, 1, 0, 1, 0],  # 1 is a linear layer
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": LAYERS,
}
_BAILING_KDA = {**_BAILING, "architectures": ["BailingMoeV3ForCausalLM"], "short_conv_kernel_size": 4}
#: Sizes of sparse attention, also of models without linear attention.
SPARSE = {"q_lora_rank": 128, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 4}
_SPARSE_LAYER = "deepseek_sparse_attention"
_GLM5 = {
    **SPARSE,
    "architectures": ["Glm5NextForConditionalGeneration"],
    "model_type": "glm5_next",
    "num_hidden_layers": LAYERS,
    "first_k_dense_replace": LAYERS,
    "qk_rope_head_dim": 0,
    "layer_types": [_SPARSE_LAYER if n in MLA_LAYERS else "linear_attention" for n in range(LAYERS)],
    "index_kpool": 4,
}

HYBRIDS = {
    "kda": _kimi(MLA_LAYERS),
    "kda-alone": _kimi([]),
    "kda-rank448": {**_kimi(MLA_LAYERS), "kv_lora_rank": 448},
    "k3": {**_kimi(MLA_LAYERS), "architectures": ["KimiK3ForConditionalGeneration"]},
    "lightning": {**_BAILING, "architectures": ["BailingMoeV2_5ForCausalLM"]},
    "bailing-kda": _BAILING_KDA,
    "bailing-kda-norope": {**_BAILING_KDA, "use_mla_nope": True},
    "gdn": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "head_dim": 64,
        "num_key_value_heads": 2,
    },
    "glm5": _GLM5,
    "glm5-compressed": {**_GLM5, "index_kpool_compress": True},
    "dots3": {
        "architectures": ["Dots3NoteForCausalLM"],
        "model_type": "dots3_note",
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
}
