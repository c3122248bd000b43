"""Hooks on SGLang's DSA backend: the top-k transform from one table, and readers of rows that it cannot read.

The hooks of methods are on the class, so that they reach target, drafts and the steps of a draft alike. All
hooks are installed for models with sparse attention and a layout, and with KVPOOL_FIX_TOPK=1 and no layout.
"""

import math
from dataclasses import replace
from typing import Any

import torch

from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.sglang_plugin.registry import around, uses
from sgl_kvpool.srt.facts.readers import layout_of_pool
from sgl_kvpool.srt.facts.topk_transform import (
    DECODE_MODES,
    EXTEND_MODES,
    IDLE_MODES,
    IMPLEMENTATIONS,
    check_pair,
    is_ours,
    select_topk_transform,
    table_names,
)

#: Attributes of a backend: the reader of rows that SGLang's kernels do not attend, absent if they do; with
#: several ranks, the layer that is attended and the top-k selection that the model passed for it.
_READER, _SELECTED = "_kvpool_sparse_reader", "_kvpool_selected"

_BACKEND = "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend"
_KPOOL = "sglang.srt.layers.attention.dsa.dsa_backend_kpool.DeepseekSparseAttnBackendKPoolMixin"
_DEQUANT = "sglang.kernels.ops.attention.dsa.dequant_k_cache"

uses(
    "sglang.srt.layers.attention.dsa.dsa_topk_backend.TopkTransformMethod.__members__",
    "sparse attention",
    members=("PAGED", "RAGGED"),
)
# The table of transforms names the members of the `IntEnum`.
uses(
    "sglang.srt.model_executor.forward_batch_info.ForwardMode.__members__",
    "sparse attention",
    members=(*EXTEND_MODES, *DECODE_MODES, *IDLE_MODES),
)
uses("sglang.srt.runtime_context.get_buffer", "sparse attention", takes=("name", "factory"))


def _layout_in_table(backend: Any) -> MLAKVCacheLayout | None:
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


@around(f"{_BACKEND}.__init__", "sparse attention", reads=("model_runner",))
def _init(original, self, *args, **kwargs):
    """Refuse implementations that cannot read the rows, and add our reader of 4-bit rows.

    Some arguments of drafts are not known when SGLang resolves arguments.
    """
    original(self, *args, **kwargs)
    attach(self)


def attach(backend: Any) -> None:
    """Check a `DeepseekSparseAttnBackend` against its pool, and give it a reader if it needs one.

    UnsupportedCombination if its implementations cannot read the rows. The server's arguments were checked
    before; this check is for what was not resolved there, such as a draft's arguments.
    """
    from sglang.srt.runtime_context import get_buffer, get_parallel

    layout, pool = _layout_in_table(backend), backend.token_to_kv_pool
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


@around(f"{_BACKEND}.set_dsa_prefill_impl", "sparse attention", repairs="#21011, closed")
def _set_dsa_prefill_impl(original, self, forward_batch=None):
    """Restore the user's `flashmla_auto` before SGLang chooses an implementation for a batch.

    For a batch with dense attention SGLang does not choose, and would use its choice for an earlier batch.
    """
    if self.enable_auto_select_prefill_impl:
        self.dsa_prefill_impl = "flashmla_auto"
    original(self, forward_batch)


@around(f"{_BACKEND}.get_topk_transform_method", "sparse attention", repairs="#20163, #21011, closed")
def _get_topk_transform_method(original, self, forward_mode=None):
    """The top-k transform, for metadata, indexer, forward pass and the seeds of drafts alike."""
    layout = _layout_in_table(self)
    if layout is None:
        return original(self, forward_mode)
    from sglang.srt.layers.attention.dsa.dsa_topk_backend import TopkTransformMethod

    if self.dcp_size > 1:
        return TopkTransformMethod.PAGED  # a rank has only some of the rows that a prefill would gather
    ours = reader_of(self) is not None
    pair = table_names(self.dsa_prefill_impl, self.dsa_decode_impl, ours=ours)
    transform = select_topk_transform(layout, *pair, forward_mode, index_kpool=self.dsa_index_kpool)
    return TopkTransformMethod[transform.name]


@around(f"{_BACKEND}.init_forward_metadata", "sparse attention", repairs="#33197, open")
def _init_forward_metadata(original, self, forward_batch):
    """Where the keys of each token's request begin, with prefill context parallelism and RAGGED.

    Without prefixes a rank attends the gathered keys of all requests, but SGLang counts only those of the
    requests that have tokens on this rank. If a request has fewer tokens than there are ranks, some ranks
    have none.
    """
    from sglang.srt.layers.attention.dsa.utils import can_dsa_prefill_cp_interleave
    from sglang.srt.layers.cp.base import get_cp_strategy

    original(self, forward_batch)
    metadata = self.forward_metadata
    if metadata.topk_indices_offset is None or not can_dsa_prefill_cp_interleave(forward_batch):
        return
    offsets = metadata.topk_indices_offset
    if not any(forward_batch.extend_prefix_lens_cpu):
        fresh = forward_batch.extend_seq_lens
        starts = (fresh.cumsum(0) - fresh).to(offsets.dtype)
        every = torch.repeat_interleave(starts, fresh, output_size=sum(forward_batch.extend_seq_lens_cpu))
        offsets = get_cp_strategy().shard_local_tokens(every)
    if not self.use_fused_topk:
        # A rank's tokens are padded to a multiple of the ranks, and each has an offset added.
        padding = len(metadata.dsa_cache_seqlens_int32) - len(offsets)
        offsets = torch.nn.functional.pad(offsets, (0, padding))
    self.forward_metadata = replace(metadata, topk_indices_offset=offsets)


@around(
    f"{_BACKEND}._forward_flashmla_sparse",
    "sparse attention",
    reads=("v_head_dim", "page_table_1", "sm_scale", "topk_length", "attn_sink"),
)
def _forward_flashmla_sparse(original, self, q_all, kv_cache, **kwargs):
    """SGLang's kernel, or ours for rows that SGLang's kernel cannot read, or not on several ranks."""
    reader = reader_of(self)
    # With the RAGGED transform SGLang passes 16-bit keys; with PAGED, the rows from `get_key_buffer`.
    if reader is None or not reader.reads(kv_cache):
        return original(self, q_all, kv_cache, **kwargs)
    if kwargs.get("attn_sink") is not None:
        raise ValueError(
            f"attention sinks are not computed over rows of KV cache layout {reader.fmt.layout}; use bf16"
        )
    found = attend(
        self, q_all, kv_cache, kwargs["page_table_1"], kwargs.get("topk_length"), kwargs["sm_scale"]
    )
    return found if self.dcp_size > 1 else found[0]


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

    layer_id, selected = getattr(backend, _SELECTED, (0, None))  # absent in a check at start
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


@around(f"{_BACKEND}.forward_extend", "sparse attention", reads=("topk_indices",))
def _forward_extend(original, self, q, k, v, layer, forward_batch, *args, **kwargs):
    """As for `forward_decode`, in prefill and verification."""
    if self.dcp_size > 1:
        setattr(self, _SELECTED, (layer.layer_id, kwargs.get("topk_indices")))
    return original(self, q, k, v, layer, forward_batch, *args, **kwargs)


@around(f"{_BACKEND}.forward_decode", "sparse attention", reads=("topk_indices",))
def _forward_decode(original, self, q, k, v, layer, forward_batch, *args, **kwargs):
    """Keep the layer's top-k selection: layers that reuse that of the layer before share its lists."""
    if self.dcp_size > 1:
        setattr(self, _SELECTED, (layer.layer_id, kwargs.get("topk_indices")))
    return original(self, q, k, v, layer, forward_batch, *args, **kwargs)


@around(f"{_KPOOL}._resolve_kpool_tail_backend", "sparse attention")
def _resolve_kpool_tail_backend(original, self, topk_indices, dsa_impl):
    """With pooled index keys SGLang replaces flashmla_sparse, under whose name our reader attends."""
    return original(self, topk_indices, dsa_impl) if reader_of(self) is None else dsa_impl


@around(f"{_KPOOL}._check_kpool_tail_backend", "sparse attention")
def _check_kpool_tail_backend(original, self, topk_indices, dsa_impl, phase):
    """Our reader attends the recent tokens behind the last pooled key, which end each list."""
    if reader_of(self) is None:
        original(self, topk_indices, dsa_impl, phase)


@around(f"{_DEQUANT}.dequantize_k_cache_paged_dsa", "sparse attention")
def _dequantize_k_cache_paged_dsa(original, quant_k_cache, page_table_1_flattened, *args, **kwargs):
    """Decode the keys of some slots: uint8 rows with our codec, other rows with SGLang's kernel."""
    if quant_k_cache.dtype != torch.uint8:
        return original(quant_k_cache, page_table_1_flattened, *args, **kwargs)
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

    from sgl_kvpool.codec import gather_rows

    # The function does not get the pool; the rows belong to the pool of the running forward pass.
    fmt = get_token_to_kv_pool().row_format
    return gather_rows(quant_k_cache.squeeze(1), page_table_1_flattened, fmt).unsqueeze(1)
