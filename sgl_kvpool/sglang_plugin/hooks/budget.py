"""Hooks of the memory budget: bytes of our rows, and of what is allocated besides the pool."""

import math

from sgl_kvpool.sglang_plugin.pool_request import PoolRequest
from sgl_kvpool.sglang_plugin.registry import around, uses
from sgl_kvpool.srt.facts.readers import KVPOOL_BACKEND
from sgl_kvpool.srt.facts.topk_transform import is_ours
from sgl_kvpool.srt.pool.drafts import own_draft, packed_layers

_SIZES = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator"

uses(
    "sglang.srt.mem_cache.kv_cache_configurator.calculate_mla_kv_cache_dim",
    "pools",
    takes=("model_config", "kv_cache_dtype"),
)
uses("sglang.srt.configs.model_config.get_dsa_mtp_topk_width", "sparse attention", takes=("config",))

#: Requests for which the workspace is sized: SGLang resolves `max_running_requests` after it has sized the
#: pool. With more requests than concurrent programs on the GPU, their kv indices are not split, so the
#: workspace stops growing far below this number.
_MOST_REQUESTS = 4096


@around(f"{_SIZES}._compute_cell_size", "pools")
def _compute_cell_size(original, self, kvc, num_layers):
    """Bytes per token: SGLang's number with its rows replaced by ours."""
    cell_size = original(self, kvc, num_layers)
    request = PoolRequest(kvc)
    if not request.has_rows:
        return cell_size
    import torch
    from sglang.srt.mem_cache import kv_cache_configurator

    values = kv_cache_configurator.calculate_mla_kv_cache_dim(
        model_config=kvc.model_config, kv_cache_dtype=kvc.kv_cache_dtype
    )
    stock_row_bytes = values * torch.empty(0, dtype=kvc.kv_cache_dtype).element_size()
    return cell_size + num_layers * (request.row_format.row_bytes - stock_row_bytes)


@around(f"{_SIZES}.__init__", "pools")
def _init_pool_configurator(original, self, kvc):
    """Reserve attention workspace and page buffers of the host tier, and charge a draft's own bytes.

    They are allocated after the pool. SGLang counts each draft as layers of its target.
    """
    request = PoolRequest(kvc)
    if not request.has_rows or kvc.is_draft_worker:
        return original(self, kvc)
    from sglang.srt.runtime_context import get_parallel

    draft = own_draft(kvc)
    if draft is None:
        original(self, kvc)
        if not request.is_dsa:  # where SGLang counts that each rank has all rows of a draft
            others = (get_parallel().attn_dcp_size - 1) * packed_layers(kvc)
            self._cell_size += others * request.row_format.row_bytes
    else:
        import msgspec

        whole = kvc.spec_aux_config
        kvc.spec_aux_config = msgspec.structs.replace(whole, eagle_draft_num_layers=None)
        try:
            original(self, kvc)
        finally:
            kvc.spec_aux_config = whole
        self._cell_size += draft.token_bytes(request.layout)
    self._fixed_overhead_bytes += attention_workspace_bytes(request) + page_buffer_bytes(request)


def page_buffer_bytes(request: PoolRequest) -> int:
    """Bytes of the GPU buffer that a host tier's pages pass through; 0 if no engine needs one."""
    from sgl_kvpool.transfer.gpu_engine import buffer_bytes, staged_state_bytes

    kvc, engine = request.configurator, request.config.host_tier.engine
    if not request.has_our_tier or request.view.device == "cpu" or engine not in ("auto", "staged"):
        return 0
    from sglang.srt.runtime_context import get_parallel

    states = 0
    if request.slot_bytes:
        cache = kvc.mambaish_config.mamba2_cache_params
        parts = [math.prod(shape) * cache.dtype.conv.itemsize for shape in cache.shape.conv]
        parts.append(math.prod(cache.shape.temporal) * cache.dtype.temporal.itemsize)
        states = buffer_bytes(staged_state_bytes(request.slot_bytes, max(parts)))
    host_layout, draft = request.host_layout, own_draft(kvc)
    packed = packed_layers(kvc) * get_parallel().attn_dcp_size  # each rank has all rows of a draft
    target_bytes = (request.stage_rows + packed) * request.row_format_in(host_layout).row_bytes
    draft_bytes = draft.token_bytes(host_layout) if draft is not None and draft.has_rows else 0
    # A draft that SGLang does not pack has a tier of its own.
    return states + sum(
        buffer_bytes(request.view.page_size * each) for each in (target_bytes, draft_bytes) if each
    )


def attention_workspace_bytes(request: PoolRequest) -> int:
    """Bytes that our attention allocates once, for a target; 0 if it is not in use."""
    from sglang.srt.configs.model_config import get_dsa_mtp_topk_width
    from sglang.srt.runtime_context import get_parallel, max_speculative_num_draft_tokens

    fmt, device, ranks = request.row_format, request.view.device, get_parallel().attn_dcp_size
    if request.is_dsa:
        is_used = is_ours(request.layout, ranks)
    else:
        is_used = device != "cpu" and KVPOOL_BACKEND in request.backends
    if not is_used:
        return 0

    from sgl_kvpool.srt.attention.decode_verify import decode_workspace_bytes
    from sgl_kvpool.srt.attention.extend import extend_workspace_bytes
    from sgl_kvpool.srt.attention.sparse import sparse_workspace_bytes

    model_config, view = request.model_config, request.view
    heads = model_config.num_attention_heads // get_parallel().attn_tp_size
    if request.is_dsa:
        # An extend gathers the rows of its requests into memory from torch, as SGLang's own gathering does.
        # The reserve is for as many rows as dense MLA decodes at a time; longer extends use memory that
        # SGLang leaves free.
        top_k = get_dsa_mtp_topk_width(model_config.hf_config)
        decode = sparse_workspace_bytes(fmt, heads * ranks, top_k, device)
        if ranks > 1:
            # A prefill attends stored rows with the queries of all ranks. Beside these, SGLang's merge has
            # results of all heads in 16 and in 32 bits. SGLang reserves what one rank needs. A rank's own
            # entries of each list, int32, are there beside those of the chunk before.
            head_bytes = 2 * fmt.head_dim + (2 + 4) * fmt.kv_lora_rank
            decode += view.chunked_prefill_size * (heads * (ranks - 1) * head_bytes + 2 * 4 * top_k)
            if request.configurator.spec_algorithm.is_none():
                return decode  # a draft has all rows, and gathers and decodes them as without ranks
            decode += sparse_workspace_bytes(fmt, heads, top_k, device)
    else:
        most_queries = max_speculative_num_draft_tokens() or 1
        most_rows = -(-model_config.context_len // ranks)  # each attends its rows with the queries of all
        decode = decode_workspace_bytes(fmt, heads * ranks, _MOST_REQUESTS, most_rows, most_queries, device)
        if ranks > 1 and not request.configurator.spec_algorithm.is_none():  # a draft, of one rank's heads
            most_rows = model_config.context_len
            decode += decode_workspace_bytes(fmt, heads, _MOST_REQUESTS, most_rows, most_queries, device)
    # Target and draft share both workspaces, with several ranks that of extends.
    return extend_workspace_bytes(fmt) + decode
