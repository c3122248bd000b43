"""Check at construction that our attention backend computes what a model's layers require."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sgl_kvpool.refusal import Refusal
from sgl_kvpool.srt.facts.readers import KVPOOL_BACKEND

if TYPE_CHECKING:
    import torch
    from sglang.srt.layers.radix_attention import RadixAttention

    from sgl_kvpool.srt.pool.row_pool import RowPool


def is_absorbed(layer: RadixAttention, pool: RowPool) -> bool:
    """Whether a layer attends latent rows, not keys and values that the model computes from them."""
    shape = (layer.head_dim, layer.v_head_dim, layer.tp_k_head_num)
    return shape == (pool.row_format.head_dim, pool.kv_lora_rank, 1)


def pool_of(model_runner: Any) -> RowPool:
    """Pool of a ModelRunner, which has to be one of ours."""
    from sgl_kvpool.srt.pool.row_pool import RowPool

    pool = model_runner.token_to_kv_pool
    if not isinstance(pool, RowPool):
        raise Refusal(
            f"attention backend {KVPOOL_BACKEND} reads pools of sgl-kvpool, but this server's pool is "
            f"{type(pool).__name__}; start it with --kv-cache-layout"
        )
    return pool


def check_layers(model: torch.nn.Module, pool: RowPool, *, mha_form: bool) -> None:
    """Refuse models with layers whose attention our backend does not compute.

    `mha_form`: whether it also computes the MHA form, for which SGLang's DeepSeek classes have a layer beside
    each absorbed layer, chosen for some prefills.
    """
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

    # Linear layers may be modules of this class too (lightning attention). SGLang's wrapper of backends
    # distinguishes them by layer id alone and does not pass them to our backend.
    attentions = [
        (name, m)
        for name, m in model.named_modules()
        if isinstance(m, RadixAttention) and pool.has_rows(m.layer_id)
    ]
    width = pool.row_format.head_dim
    absorbed = {module.layer_id for _, module in attentions if is_absorbed(module, pool)}
    scales = {module.scaling for _, module in attentions if is_absorbed(module, pool)}
    where = "" if mha_form else " on a CPU"
    for name, module in attentions:
        problem = None
        if module.sliding_window_size is not None and module.sliding_window_size > -1:
            problem = f"has a sliding window of {module.sliding_window_size}"
        elif module.logit_cap:
            problem = f"caps its logits at {module.logit_cap}"
        elif module.is_cross_attention or module.attn_type != AttentionType.DECODER:
            problem = f"is not causal ({getattr(module.attn_type, 'value', module.attn_type)})"
        elif module.head_dim != width and not (mha_form and module.layer_id in absorbed):
            # On a CPU SGLang does not choose between two forms, so the layer cannot be for the MHA form.
            problem = f"attends keys {module.head_dim} wide and not rows of {width} values"
        if problem:
            raise Refusal(_text(model, name, problem, where))
    if mha_form and len(scales) > 1:
        # FlashInfer's call is planned once per batch, with one scale.
        raise Refusal(
            f"{type(model).__name__} has absorbed attention layers with softmax scales {sorted(scales)}, but "
            f"attention backend {KVPOOL_BACKEND} takes one scale; serve the model without --kv-cache-layout"
        )
    for name, other in model.named_modules():
        if getattr(other, "learnable_sink_param", None) is not None:
            raise Refusal(_text(model, name, "has an attention sink", where))
    if not attentions and pool.row_pool.layer_num:  # a pipeline stage of a hybrid model may lack MLA layers
        raise Refusal(
            f"{type(model).__name__} has no attention layer that attends latent rows; serve the model "
            "without --kv-cache-layout"
        )


def _text(model: torch.nn.Module, name: str, problem: str, where: str) -> str:
    return (
        f"layer {name} of {type(model).__name__} {problem}, which attention backend {KVPOOL_BACKEND} does "
        f"not compute{where}; serve the model without --kv-cache-layout"
    )


def nested(backend: Any) -> list[Any]:
    """A backend and those nested in it, for hybrid models and for two batches that overlap."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    found = [backend]
    for outer in found:  # the loop extends the list
        inside = list(getattr(outer, "__dict__", {}).values())
        inside += [one for part in inside if isinstance(part, list) for one in part]
        found += [one for one in inside if isinstance(one, AttentionBackend) and one not in found]
    return found


def outer_absorbed_layers(model: Any, pool: Any) -> list[Any]:
    """First and last of a model's absorbed attention layers that have rows."""
    from sglang.srt.layers.radix_attention import RadixAttention

    # With --dcp-size a layer has two: the later one, for decode, has the heads of all ranks.
    layers = {
        module.layer_id: module
        for module in model.modules()
        if isinstance(module, RadixAttention) and pool.has_rows(module.layer_id) and is_absorbed(module, pool)
    }
    return [layers[layer_id] for layer_id in sorted({min(layers), max(layers)})] if layers else []
