"""The k_scales of a loaded model, and the attention backends that multiply rows by them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.refusal import Refusal, Way, use_words
from sgl_kvpool.srt.facts.readers import DSA_BACKEND, KVPOOL_BACKEND

if TYPE_CHECKING:
    from sgl_kvpool.srt.pool.row_pool import RowPool


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
    from sglang.srt.layers.radix_attention import RadixAttention

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


#: The pools of this process, target first, each with the function that collects and checks its k_scales.
_followed: list[tuple[RowPool, Callable[[], Mapping[int, float]]]] = []


def follow_k_scales(pool: RowPool, collect: Callable[[], Mapping[int, float]]) -> None:
    """Let a pool take the k_scales that `collect` finds in the model after an update."""
    _followed.append((pool, collect))


def followed_digest() -> str:
    """Digest of the k_scales of all pools that follow an update."""
    from sgl_kvpool.srt.pool.row_pool import k_scales_digest

    return k_scales_digest([pool.row_pool for pool, _ in _followed])


def take_k_scales(scheduler: Any) -> None:
    """Collect the k_scales again. RuntimeError, which ends the server, where something keeps the old ones.

    The weights are other ones already, so the update cannot be refused.
    """
    for pool, collect in _followed:
        new = collect()  # a model's loader sets k_scales, and never removes them
        layer = next((x for x in sorted(new) if new[x] != pool.k_scale(x)), None)
        if layer is None:
            continue
        if kept := _kept_in(scheduler, pool):
            raise RuntimeError(
                f"an update of weights has changed k_scale of layer {layer} from "
                f"{pool.k_scale(layer)} to {new[layer]}, and {kept}; "
                "start the server with the new weights"
            )
        pool.take_k_scales(new)


def _kept_in(scheduler: Any, pool: RowPool) -> str | None:
    """What keeps a pool's old k_scales; None if nothing does."""
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.model_executor.runner.eager_runner import EagerRunner

    for _, runner in scheduler.weight_updater._select_runners():
        graphs = (runner.decode_cuda_graph_runner, runner.prefill_cuda_graph_runner)
        if any(not isinstance(graph, EagerRunner) for graph in graphs if graph is not None):
            return "CUDA graphs have captured the old one"
    if scheduler.disaggregation_mode != DisaggregationMode.NULL:
        return "peers have compared the old one when they connected (--disaggregation-mode)"
    layout = pool.kv_cache_layout
    if pool.row_pool.host_tier.host_layout(layout) is not layout:
        return "the host tier converts rows with the old one (--kv-host-layout)"
    return None
