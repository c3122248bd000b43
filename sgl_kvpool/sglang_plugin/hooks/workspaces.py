"""Bytes of the attention workspaces, which are allocated after the pool; SGLang's budget reserves them."""

from __future__ import annotations

from typing import Any

from sgl_kvpool.attention.readers import KVPOOL_BACKEND, sglang_dsa_reads
from sgl_kvpool.layout import RowFormat
from sgl_kvpool.sglang_plugin.models import is_dsa
from sgl_kvpool.sglang_plugin.rules.attention import backends_in_use

__all__ = ["attention_workspace_bytes"]


def attention_workspace_bytes(kvc: Any, fmt: RowFormat) -> int:
    """Bytes that our attention allocates once; 0 if our attention is not in use.

    Parameters
    ----------
    kvc : KVCacheConfigurator
        SGLang's configurator of the target.
    fmt : RowFormat
    """
    from sglang.srt.arg_groups.overrides import resolving_view

    view = resolving_view(kvc.server_args)
    if is_dsa(kvc.model_config):
        return 0 if sglang_dsa_reads(fmt.layout) else _sparse_bytes(kvc, fmt, view.device)
    if KVPOOL_BACKEND not in backends_in_use(view):
        return 0
    if view.device == "cpu":
        from sgl_kvpool.attention.cpu import RowReader

        return RowReader.workspace_bytes(fmt)
    from sgl_kvpool.srt.attention.decode_verify import decode_workspace_bytes
    from sgl_kvpool.srt.attention.extend import extend_workspace_bytes

    decode = decode_workspace_bytes(
        fmt, _heads(kvc), _MOST_REQUESTS, kvc.model_config.context_len, _most_queries(), view.device
    )
    # Target and draft share both workspaces.
    return extend_workspace_bytes(fmt) + decode


def _sparse_bytes(kvc: Any, fmt: RowFormat, device: str) -> int:
    """Bytes of sparse attention's workspace for rows that SGLang's kernels cannot read."""
    from sglang.srt.configs.model_config import get_dsa_index_topk

    from sgl_kvpool.srt.attention.extend import extend_workspace_bytes
    from sgl_kvpool.srt.attention.sparse import sparse_workspace_bytes

    top_k = get_dsa_index_topk(kvc.model_config.hf_config)
    decode = sparse_workspace_bytes(fmt, _heads(kvc), top_k, device)
    # An extend gathers the rows of its requests into memory from torch, as SGLang's own gathering does. The
    # reserve is for as many rows as dense MLA decodes at a time; longer extends use memory that SGLang leaves
    # free.
    return decode + extend_workspace_bytes(fmt)


def _heads(kvc: Any) -> int:
    """Query heads of this rank."""
    from sglang.srt.runtime_context import get_parallel

    return kvc.model_config.num_attention_heads // get_parallel().attn_tp_size


def _most_queries() -> int:
    """Most queries of a request in a batch other than prefill."""
    from sglang.srt.runtime_context import max_speculative_num_draft_tokens

    return max_speculative_num_draft_tokens() or 1


#: Requests for which the workspace is sized: SGLang resolves `max_running_requests` after it has sized the
#: pool. With more requests than concurrent programs on the GPU, their kv indices are not split, so the
#: workspace stops growing far below this number.
_MOST_REQUESTS = 4096
