"""What `kvpool_mla` needs of a model's attention layers, checked when a server starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_kvpool.attention.readers import KVPOOL_BACKEND

if TYPE_CHECKING:
    import torch

    from sgl_kvpool.layout import RowFormat

__all__ = ["check_layers", "is_absorbed"]


def is_absorbed(layer, fmt: RowFormat) -> bool:
    """Whether a layer attends latent rows, and not keys and values that were computed from them."""
    return layer.head_dim == fmt.head_dim and layer.v_head_dim == fmt.kv_lora_rank


def check_layers(model: torch.nn.Module, fmt: RowFormat, *, mha_form: bool) -> None:
    """Refuse models with layers whose attention `kvpool_mla` does not compute.

    Parameters
    ----------
    model : torch.nn.Module
    fmt : RowFormat
        Of the pool.
    mha_form : bool
        Whether layers may attend keys and values that a model computes from the latent. SGLang's DeepSeek
        classes have such a layer beside each absorbed one and pick per batch.

    Raises
    ------
    ValueError
        Names the first layer with another width, a sliding window or capped logits; or says that no layer
        attends latent rows.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    found = 0
    for name, module in model.named_modules():
        if not isinstance(module, RadixAttention):
            continue
        absorbed = is_absorbed(module, fmt)
        found += absorbed
        problem = None
        if not absorbed and not mha_form:
            problem = f"attends keys {module.head_dim} wide and not rows of {fmt.head_dim} values"
        elif module.sliding_window_size is not None and module.sliding_window_size > -1:
            problem = f"has a sliding window of {module.sliding_window_size}"
        elif module.logit_cap:
            problem = f"caps its logits at {module.logit_cap}"
        if problem:
            where = "" if mha_form else " on a CPU"
            raise ValueError(
                f"layer {name} of {type(model).__name__} {problem}, which attention backend "
                f"{KVPOOL_BACKEND} does not compute{where}; serve the model without --kv-cache-layout"
            )
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no attention layer that attends latent rows; serve the model "
            "without --kv-cache-layout"
        )
