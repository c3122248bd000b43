"""Hooks of the memory budget: bytes of our rows, and of what is allocated besides the pool."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.sglang_plugin import hook_points
from sgl_kvpool.sglang_plugin.hooks.configurator import requested_arrangement, requested_layout
from sgl_kvpool.sglang_plugin.hooks.drafts import own_draft, packed_layers, without_drafts
from sgl_kvpool.sglang_plugin.hooks.workspaces import attention_workspace_bytes
from sgl_kvpool.sglang_plugin.models import row_format_of
from sgl_kvpool.sglang_plugin.options import host_tier_of
from sgl_kvpool.sglang_plugin.rules.host_tier import has_host_tier

__all__ = ["install", "page_buffer_bytes"]


def install() -> None:
    """Apply the hooks."""
    hook_points.wrap_all(HOOKS)


def _compute_cell_size(original, self, kvc, num_layers):
    """Bytes per token: SGLang's number with its rows replaced by ours."""
    cell_size = original(self, kvc, num_layers)
    layout = requested_layout(kvc)
    if layout is None:
        return cell_size
    import torch
    from sglang.srt.mem_cache import kv_cache_configurator

    values = kv_cache_configurator.calculate_mla_kv_cache_dim(
        model_config=kvc.model_config, kv_cache_dtype=kvc.kv_cache_dtype
    )
    stock_row_bytes = values * torch.empty(0, dtype=kvc.kv_cache_dtype).element_size()
    return cell_size + num_layers * (row_format_of(kvc.model_config, layout).row_bytes - stock_row_bytes)


def _init_pool_configurator(original, self, kvc):
    layout = requested_layout(kvc)
    if layout is None or kvc.is_draft_worker:
        return original(self, kvc)
    draft = own_draft(kvc)
    if draft is None:
        original(self, kvc)
    else:
        with without_drafts(kvc):
            original(self, kvc)
        self._cell_size += draft.token_bytes(layout)
    workspace = attention_workspace_bytes(kvc, row_format_of(kvc.model_config, layout))
    self._fixed_overhead_bytes += workspace + page_buffer_bytes(kvc, layout)


def page_buffer_bytes(kvc: Any, layout: MLAKVCacheLayout) -> int:
    """Bytes of the GPU buffer that a host tier's pages pass through; 0 if no engine needs one."""
    from sglang.srt.arg_groups.overrides import resolving_view

    from sgl_kvpool.transfer.page_buffer import buffer_bytes, staged_state_bytes

    view, options = resolving_view(kvc.server_args), host_tier_of(kvc.server_args)
    ours = has_host_tier(view) and options.takes(layout, requested_arrangement(kvc), view.device)
    if not ours or view.device == "cpu" or not options.may_stage:
        return 0
    hybrid, stage = kvc.mambaish_config, kvc.layer_info
    layers, states = stage.num_effective_layers, 0
    if hybrid is not None:
        here = range(stage.start_layer, stage.end_layer)
        layers = sum(layer in here for layer in hybrid.full_attention_layer_ids)
        cache = hybrid.mamba2_cache_params
        parts = [math.prod(shape) * cache.dtype.conv.itemsize for shape in cache.shape.conv]
        parts.append(math.prod(cache.shape.temporal) * cache.dtype.temporal.itemsize)
        slot_bytes = sum(layer in here for layer in cache.layers) * sum(parts)
        states = buffer_bytes(staged_state_bytes(slot_bytes, max(parts))) if slot_bytes else 0
    host_layout, draft = options.host_layout(layout), own_draft(kvc)
    target_bytes = (layers + packed_layers(kvc)) * row_format_of(kvc.model_config, host_layout).row_bytes
    draft_bytes = draft.token_bytes(host_layout) if draft is not None and draft.has_rows else 0
    # A draft that SGLang does not pack has a tier of its own.
    return states + sum(buffer_bytes(view.page_size * each) for each in (target_bytes, draft_bytes) if each)


_SIZES = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator"

#: Function of SGLang -> hook around it.
HOOKS: Mapping[str, Callable] = {
    f"{_SIZES}._compute_cell_size": _compute_cell_size,
    f"{_SIZES}.__init__": _init_pool_configurator,
}
