"""Kind of a server's model, the format of its rows, and models whose KV cache no layout stores."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sgl_kvpool.attention.decode_config import gpu_problem
from sgl_kvpool.layout import MLAKVCacheLayout, RowFormat
from sgl_kvpool.refusal import Refusal
from sgl_kvpool.sglang_plugin.registry import fields, uses

#: Tokens per page with a host tier.
HOST_TIER_PAGE_SIZE = 64

uses("sglang.srt.configs.model_config.is_deepseek_dsa", "model rules", takes=("config",))
uses("sglang.srt.configs.hybrid_arch.mambaish_config", "model rules", takes=("model_config",))
uses(
    "sglang.srt.arg_groups.overrides.supports_mamba_cache_extra_buffer",
    "arguments",
    takes=("view", "hf_config"),
)
fields("device", "mamba_radix_cache_strategy", "mamba_track_interval")
fields("model_path", "speculative_draft_model_path")


def is_dsa(model_config: Any) -> bool:
    """Whether SGLang serves a model (its ModelConfig) with sparse attention."""
    from sglang.srt.configs.model_config import is_deepseek_dsa

    return is_deepseek_dsa(model_config.hf_config)


def layers_with_rows(model_config: Any) -> Sequence[int] | None:
    """Full-attention layers of a hybrid model, the layers that store rows; None for other models."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    hybrid = mambaish_config(model_config)
    return None if hybrid is None else hybrid.full_attention_layer_ids


def is_hybrid(model_config: Any) -> bool:
    """Whether a model mixes MLA with linear attention."""
    return layers_with_rows(model_config) is not None


def keeps_states_by_token(model_config: Any, view: Any) -> bool:
    """Whether a server's prefix cache keeps states of linear layers by token, which needs pages of one token.

    For longer pages SGLang chooses its other strategy, `extra_buffer`, if model, linear backend and device
    support it (`overrides._mamba_radix_cache_resolution`, `mamba_hook.validate_mamba_extra_buffer`).
    """
    from sglang.srt.arg_groups.overrides import supports_mamba_cache_extra_buffer

    if not is_hybrid(model_config):
        return False
    strategy = view.mamba_radix_cache_strategy
    if strategy != "auto":
        return strategy == "no_buffer"
    return view.device == "cpu" or not supports_mamba_cache_extra_buffer(view, model_config.hf_config)


def host_tier_page_size(model_config: Any, view: Any) -> int:
    """Tokens per page with a host tier, unless the user sets --page-size.

    For hybrid models, the size divides the interval at which states are kept, as SGLang requires.
    """
    if not is_hybrid(model_config):
        return HOST_TIER_PAGE_SIZE
    return math.gcd(HOST_TIER_PAGE_SIZE, view.mamba_track_interval)


def is_rocm() -> bool:
    """Whether torch's "cuda" device is an AMD GPU."""
    import torch

    return torch.version.hip is not None


def device_name(view: Any) -> str:
    """Name of a server's device for messages."""
    return "ROCm" if view.device == "cuda" and is_rocm() else view.device


def model_name(model_config: Any) -> str:
    """Name of a model's class, for messages."""
    return (getattr(model_config.hf_config, "architectures", None) or ["this model"])[0]


def has_own_draft(view: Any) -> bool:
    """Whether the draft model is another checkpoint than the target's."""
    draft, target = view.speculative_draft_model_path, view.model_path
    if draft is None or draft == target:
        return False
    # Two spellings of one folder are one checkpoint.
    return not (Path(draft).is_dir() and Path(draft).resolve() == Path(target).resolve())


def row_format_of(model_config: Any, layout: MLAKVCacheLayout) -> RowFormat:
    """Row format of a model's pool; ValueError for a geometry that no layout stores."""
    return layout.pool_row_format(
        model_config.kv_lora_rank, model_config.qk_rope_head_dim, is_dsa=is_dsa(model_config)
    )


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


def check_gpu(what: str, remedy: str) -> None:
    """Refuse `what`, which needs our decode, on a GPU that does not run it."""
    import torch

    if (problem := gpu_problem(torch.cuda.get_device_capability())) is not None:
        raise Refusal(f"{what} {problem}; {remedy}")


def check_resolved_dtype(layout: MLAKVCacheLayout, kv_cache_dtype: str, *, is_dsa: bool) -> None:
    """Refuse another dtype than the one that was declared to SGLang for the layout."""
    shown = layout.sglang_kv_cache_dtype(is_dsa=is_dsa)
    if kv_cache_dtype != shown:
        raise Refusal(
            f"SGLang resolved --kv-cache-dtype to {kv_cache_dtype}, but layout {layout} declares "
            f"{shown}; another plugin or model rule changed it"
        )
