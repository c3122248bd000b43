"""What SGLang's ModelConfig says of a model with rows."""

from collections.abc import Sequence
from typing import Any

from sgl_kvpool.layout import MLAKVCacheLayout, RowFormat
from sgl_kvpool.sglang_plugin.registry import uses

uses("sglang.srt.configs.model_config.is_deepseek_dsa", "model rules", takes=("config",))
uses("sglang.srt.configs.hybrid_arch.mambaish_config", "model rules", takes=("model_config",))


def is_dsa(model_config: Any) -> bool:
    """Whether SGLang serves a model (its ModelConfig) with sparse attention."""
    from sglang.srt.configs.model_config import is_deepseek_dsa

    return is_deepseek_dsa(model_config.hf_config)


def layers_with_rows(model_config: Any) -> Sequence[int] | None:
    """Full-attention layers of a hybrid model, the layers that store rows; None for other models."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    hybrid = mambaish_config(model_config)
    return None if hybrid is None else hybrid.full_attention_layer_ids


def model_name(model_config: Any) -> str:
    """Name of a model's class, for messages."""
    return (getattr(model_config.hf_config, "architectures", None) or ["this model"])[0]


def row_format_of(model_config: Any, layout: MLAKVCacheLayout) -> RowFormat:
    """Row format of a model's pool; ValueError for a geometry that no layout stores."""
    return layout.pool_row_format(
        model_config.kv_lora_rank, model_config.qk_rope_head_dim, is_dsa=is_dsa(model_config)
    )
