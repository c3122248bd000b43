"""The k_scales of a loaded model, and the attention backends that multiply rows by them."""

from collections.abc import Collection, Sequence
from typing import Any

from sglang.srt.layers.radix_attention import RadixAttention

from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.refusal import Refusal, Way, use_words
from sgl_kvpool.srt.facts.readers import DSA_BACKEND, KVPOOL_BACKEND


def checked_k_scales(
    model: Any, layout: MLAKVCacheLayout, readers: Sequence[str], with_rows: Collection[int] | None = None
) -> dict[int, float]:
    """k_scales of the layers `with_rows`, or of all; Refusal if a reader would not multiply rows by them."""
    if not layout.uses_k_scale:
        return {}
    k_scales = collect_k_scales(model)
    if with_rows is not None:  # linear layers that are `RadixAttention` modules (lightning) were found too
        k_scales = {layer: value for layer, value in k_scales.items() if layer in with_rows}
    scaled = sorted(layer for layer, value in k_scales.items() if value != 1.0)
    stock = sorted({name for name in readers if name != KVPOOL_BACKEND})
    if scaled and stock:
        bf16 = f"--kv-cache-layout={MLAKVCacheLayout.BF16}"
        ways = [use_words(bf16)]
        if DSA_BACKEND not in stock:
            backend = f"--attention-backend={KVPOOL_BACKEND}"
            ways = [use_words(backend), Way(bf16.replace("=", " "), add=(bf16,))]
        raise Refusal(
            f"the checkpoint has k_scale={k_scales[scaled[0]]} in layer {scaled[0]}, and attention backend "
            f"{', '.join(stock)} does not multiply rows by it in both prefill and decode",
            *ways,
        )
    return k_scales


def collect_k_scales(model: Any) -> dict[int, float]:
    """k_scale of every model layer that has one, by layer id, where SGLang's loader sets it.

    The scale of other layers is 1.0. Refusal if two modules of a layer disagree.
    """
    attentions = [(n, m) for n, m in model.named_modules() if isinstance(m, RadixAttention)]
    # DeepSeek models have two per layer, and the loader sets k_scale on attn_mqa alone.
    absorbed = [(n, m) for n, m in attentions if n.rpartition(".")[2] == "attn_mqa"]
    k_scales: dict[int, float] = {}
    for name, module in absorbed or attentions:
        if module.k_scale_float is None:
            continue
        value = float(module.k_scale_float)
        if k_scales.setdefault(module.layer_id, value) != value:
            raise Refusal(
                f"two attention modules of layer {module.layer_id} have k_scale "
                f"{k_scales[module.layer_id]} and {value} ({name}); the checkpoint's KV scales are damaged"
            )
    return k_scales
