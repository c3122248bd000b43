"""Memory that is allocated beside the pool after it has taken its share, for SGLang's budget."""

from __future__ import annotations

from typing import Any

from sgl_kvpool.attention.readers import KVPOOL_BACKEND
from sgl_kvpool.layout import RowFormat
from sgl_kvpool.sglang_plugin.attention_rules import backends_in_use

__all__ = ["attention_workspace_bytes"]


def attention_workspace_bytes(kvc: Any, fmt: RowFormat) -> int:
    """Bytes that our attention backend allocates once; 0 if it is not in use.

    Parameters
    ----------
    kvc : KVCacheConfigurator
        SGLang's, of the target.
    fmt : RowFormat
    """
    from sglang.srt.arg_groups.overrides import resolving_view

    view = resolving_view(kvc.server_args)
    if KVPOOL_BACKEND not in backends_in_use(view):
        return 0
    if view.device == "cpu":
        from sgl_kvpool.attention.host import RowReader

        return RowReader.workspace_bytes(fmt)
    from sglang.srt import runtime_context

    from sgl_kvpool.attention.cuda_extend import extend_workspace_bytes
    from sgl_kvpool.attention.few_queries import decode_workspace_bytes

    config = kvc.model_config
    decode = decode_workspace_bytes(
        fmt,
        config.num_attention_heads // runtime_context.get_parallel().attn_tp_size,
        _MOST_REQUESTS,
        config.context_len,
        runtime_context.max_speculative_num_draft_tokens() or 1,
        view.device,
    )
    # Target and draft share both.
    return extend_workspace_bytes(fmt) + decode


#: SGLang fixes the number of requests after the pool. With more lists than the GPU runs programs at a time a
#: list is not split, so the workspace stops growing long before.
_MOST_REQUESTS = 4096
