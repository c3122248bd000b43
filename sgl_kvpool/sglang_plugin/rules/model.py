"""Models whose KV cache no layout stores, and the dtype that SGLang sees of it."""

from __future__ import annotations

from typing import Any

from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.refusal import Refusal
from sgl_kvpool.sglang_plugin.models import layers_with_rows, model_name, row_format_of


def check_model(layout: MLAKVCacheLayout, model_config: Any) -> None:
    """Refuse models whose KV cache is not MLA, or whose geometry no layout stores."""
    from sglang.srt.configs.model_config import AttentionArch

    name = model_name(model_config)
    remedy = "serve it without --kv-cache-layout"
    if model_config.attention_arch != AttentionArch.MLA:
        raise Refusal(
            f"--kv-cache-layout {layout} stores rows of multi-head latent attention (MLA), and {name} "
            f"uses {model_config.attention_arch.name}; {remedy}"
        )
    with_rows = layers_with_rows(model_config)
    if with_rows is not None and not with_rows:
        raise Refusal(
            f"--kv-cache-layout {layout} stores rows of multi-head latent attention (MLA), and all "
            f"{model_config.num_hidden_layers} layers of {name} keep states instead; {remedy}"
        )
    if model_config.is_hybrid_swa:
        raise Refusal(
            f"{name} mixes MLA with sliding windows, which --kv-cache-layout {layout} does not support; "
            f"{remedy}"
        )
    row_format_of(model_config, layout)


def check_resolved_dtype(layout: MLAKVCacheLayout, kv_cache_dtype: str, *, is_dsa: bool) -> None:
    """Refuse another dtype than the one that was declared to SGLang for the layout."""
    shown = layout.sglang_kv_cache_dtype(is_dsa=is_dsa)
    if kv_cache_dtype != shown:
        raise Refusal(
            f"SGLang resolved --kv-cache-dtype to {kv_cache_dtype}, but layout {layout} declares "
            f"{shown}; another plugin or model rule changed it"
        )
