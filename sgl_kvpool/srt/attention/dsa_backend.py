"""SGLang's backend of sparse attention (DSA) with our reader of rows that its kernels cannot attend."""

import math
from typing import Any

import torch

from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.srt.facts.readers import layout_of_pool
from sgl_kvpool.srt.facts.topk_transform import IMPLEMENTATIONS, check_pair, is_ours

#: Attributes of a backend: the reader of rows that SGLang's kernels do not attend, absent if they do; with
#: several ranks, the layer that is attended and the top-k selection that the model passed for it.
_READER, SELECTED = "_kvpool_sparse_reader", "_kvpool_selected"


def layout_in_table(backend: Any) -> MLAKVCacheLayout | None:
    """Layout of a backend's pool, if the table of transforms applies to it; None if SGLang decides.

    The table applies to our pools, and to SGLang's unless HiSparse or an implementation for other hardware is
    used.
    """
    pool = backend.token_to_kv_pool
    layout = layout_of_pool(pool)
    known = backend.dsa_prefill_impl in IMPLEMENTATIONS and backend.dsa_decode_impl in IMPLEMENTATIONS
    if hasattr(pool, "kv_cache_layout") or (known and backend.hisparse_coordinator is None):
        return layout
    return None


def attach(backend: Any) -> None:
    """Check a `DeepseekSparseAttnBackend` against its pool, and give it a reader if it needs one.

    UnsupportedCombination if its implementations cannot read the rows. The server's arguments were checked
    before; this check is for what was not resolved there, such as a draft's arguments.
    """
    from sglang.srt.runtime_context import get_buffer, get_parallel

    layout, pool = layout_in_table(backend), backend.token_to_kv_pool
    if layout is None:
        return
    ranks = get_parallel().attn_dcp_size if hasattr(pool, "kv_cache_layout") else 1
    check_pair(
        layout,
        backend.dsa_prefill_impl,
        backend.dsa_decode_impl,
        index_kpool=backend.dsa_index_kpool,
        ranks=ranks,
    )
    if not is_ours(layout, ranks):
        return

    from sgl_kvpool.attention.decode import DecodeWorkspace
    from sgl_kvpool.srt.attention.sparse import SparseReader, sparse_workspace_bytes

    if backend.dcp_size > 1:
        from sglang.srt.environ import envs

        # Each rank attends its part of a list, so all must select the same slots, and scores tie.
        envs.SGLANG_DSA_TOPK_BROADCAST.set(True)
    fmt, device = pool.row_format, backend.device
    longest = backend.dsa_index_topk + backend.dsa_index_kpool - 1  # recent tokens have no pooled key
    heads = backend.num_q_heads * backend.dcp_size  # a draft has its own heads only
    needed = sparse_workspace_bytes(fmt, heads, longest, device)
    # Backends with the same heads run one after the other and share the workspace.
    workspace = get_buffer(f"kvpool_dsa_decode_{needed}", lambda: DecodeWorkspace(needed, device))
    setattr(backend, _READER, SparseReader(fmt, workspace))


def reader_of(backend: Any) -> Any:
    """The `SparseReader` that `attach` gave a backend; None if SGLang's kernels read its rows."""
    return getattr(backend, _READER, None)


def attend(
    backend: Any,
    q: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    kv_lens: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend lists of SGLang's slots as `SparseReader.attend`.

    With several ranks, `q` has the heads of all, the lists are the same on all ranks, each attends its own
    entries, and the log-sum-exp is in base 2, in which SGLang merges.
    """
    reader = reader_of(backend)
    if backend.dcp_size == 1:
        return reader.attend(q, rows, slots, kv_lens, scale)
    from sglang.srt.layers.attention.dsa.dsa_dcp import localize_dcp_page_table

    layer_id, selected = getattr(backend, SELECTED, (0, None))  # absent in a check at start
    own, counts = localize_dcp_page_table(
        backend._dcp_page_table_cache,
        metadata=getattr(backend, "forward_metadata", None),
        layer_id=layer_id,
        topk_indices=selected,
        page_table=slots,
        dcp_size=backend.dcp_size,
        dcp_rank=backend.dcp_rank,
    )
    out, lse = reader.attend(q, rows, own, counts, scale)
    return out, lse.mul_(math.log2(math.e))
