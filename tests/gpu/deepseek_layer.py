"""A `DeepseekV2AttentionMLA` of SGLang with the dimensions of DeepSeek-V3 but for hidden size and heads."""

import torch

HIDDEN, HEADS, NOPE, ROPE, V_DIM, RANK, Q_RANK = 64, 16, 128, 64, 128, 512, 48


def build_layer(layer_id):
    """The layer with random weights, absorbed as SGLang's loader does it."""
    from sglang.srt.layers.rotary_embedding import base as rotary
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA
    from transformers import PretrainedConfig

    config = PretrainedConfig(architectures=["DeepseekV3ForCausalLM"])
    config.rms_norm_eps = 1e-6
    yarn = {"factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
    default, rope_is_cpu = torch.get_default_dtype(), rotary._is_cpu
    torch.set_default_dtype(torch.bfloat16)
    rotary._is_cpu = True  # otherwise it looks for vLLM's kernel, unused on CUDA for 64 rope values
    try:
        layer = DeepseekV2AttentionMLA(
            config, hidden_size=HIDDEN, num_heads=HEADS, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE,
            v_head_dim=V_DIM, q_lora_rank=Q_RANK, kv_lora_rank=RANK, rope_scaling=dict(yarn),
            layer_id=layer_id, reduce_results=False,
        )  # fmt: skip
    finally:
        torch.set_default_dtype(default)
        rotary._is_cpu = rope_is_cpu
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            values = torch.randn(parameter.shape, generator=generator)
            is_matrix = parameter.dim() > 1
            parameter.copy_(values / parameter.shape[-1] ** 0.5 if is_matrix else 1 + 0.1 * values)
    weights = layer.kv_b_proj.weight.data.unflatten(0, (-1, NOPE + V_DIM))
    w_kc, w_vc = weights.split([NOPE, V_DIM], dim=1)  # as in deepseek_weight_loader.post_load_weights
    layer.w_kc = w_kc.transpose(1, 2).contiguous().transpose(1, 2)
    layer.w_vc = w_vc.contiguous().transpose(1, 2)
    return layer
