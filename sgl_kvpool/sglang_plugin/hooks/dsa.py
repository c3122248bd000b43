"""Hooks on SGLang's DSA backend: the top-k transform from one table, and readers of rows that it cannot read.

The hooks of methods are on the class, so that they reach target, drafts and the steps of a draft alike. All
hooks are installed for models with sparse attention and a layout, and with KVPOOL_FIX_TOPK=1 and no layout.
"""

from dataclasses import replace

import torch

from sgl_kvpool.sglang_plugin.registry import around, uses
from sgl_kvpool.srt.attention.dsa_backend import SELECTED, attach, attend, layout_in_table, reader_of
from sgl_kvpool.srt.facts.topk_transform import (
    DECODE_MODES,
    EXTEND_MODES,
    IDLE_MODES,
    select_topk_transform,
    table_names,
)

_GROUP, _DSA = "sparse attention", "sglang.srt.layers.attention.dsa"
_BACKEND = "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend"
_KPOOL = f"{_DSA}.dsa_backend_kpool.DeepseekSparseAttnBackendKPoolMixin"
_DEQUANT = "sglang.kernels.ops.attention.dsa.dequant_k_cache"

uses(f"{_DSA}.dsa_topk_backend.TopkTransformMethod.__members__", _GROUP, members=("PAGED", "RAGGED"))
# The table of transforms names the members of the `IntEnum`.
uses(
    "sglang.srt.model_executor.forward_batch_info.ForwardMode.__members__",
    _GROUP,
    members=(*EXTEND_MODES, *DECODE_MODES, *IDLE_MODES),
)
uses("sglang.srt.runtime_context.get_buffer", _GROUP, takes=("name", "factory"))


@around(f"{_BACKEND}.__init__", _GROUP, reads=("model_runner",))
def _init(original, self, *args, **kwargs):
    """Refuse implementations that cannot read the rows, and add our reader of 4-bit rows.

    Some arguments of drafts are not known when SGLang resolves arguments.
    """
    original(self, *args, **kwargs)
    attach(self)


@around(f"{_BACKEND}.set_dsa_prefill_impl", _GROUP, repairs="#21011, closed")
def _set_dsa_prefill_impl(original, self, forward_batch=None):
    """Restore the user's `flashmla_auto` before SGLang chooses an implementation for a batch.

    For a batch with dense attention SGLang does not choose, and would use its choice for an earlier batch.
    """
    if self.enable_auto_select_prefill_impl:
        self.dsa_prefill_impl = "flashmla_auto"
    original(self, forward_batch)


@around(f"{_BACKEND}.get_topk_transform_method", _GROUP, repairs="#20163, #21011, closed")
def _get_topk_transform_method(original, self, forward_mode=None):
    """The top-k transform, for metadata, indexer, forward pass and the seeds of drafts alike."""
    layout = layout_in_table(self)
    if layout is None:
        return original(self, forward_mode)
    from sglang.srt.layers.attention.dsa.dsa_topk_backend import TopkTransformMethod

    if self.dcp_size > 1:
        return TopkTransformMethod.PAGED  # a rank has only some of the rows that a prefill would gather
    ours = reader_of(self) is not None
    pair = table_names(self.dsa_prefill_impl, self.dsa_decode_impl, ours=ours)
    transform = select_topk_transform(layout, *pair, forward_mode, index_kpool=self.dsa_index_kpool)
    return TopkTransformMethod[transform.name]


@around(f"{_BACKEND}.init_forward_metadata", _GROUP, repairs="#33197, open")
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
    _GROUP,
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


@around(f"{_BACKEND}.forward_extend", _GROUP, reads=("topk_indices",))
@around(f"{_BACKEND}.forward_decode", _GROUP, reads=("topk_indices",))
def _forward(original, self, q, k, v, layer, forward_batch, *args, **kwargs):
    """Keep the layer's top-k selection: layers that reuse that of the layer before share its lists."""
    if self.dcp_size > 1:
        setattr(self, SELECTED, (layer.layer_id, kwargs.get("topk_indices")))
    return original(self, q, k, v, layer, forward_batch, *args, **kwargs)


@around(f"{_KPOOL}._resolve_kpool_tail_backend", _GROUP)
def _resolve_kpool_tail_backend(original, self, topk_indices, dsa_impl):
    """With pooled index keys SGLang replaces flashmla_sparse, under whose name our reader attends."""
    return original(self, topk_indices, dsa_impl) if reader_of(self) is None else dsa_impl


@around(f"{_KPOOL}._check_kpool_tail_backend", _GROUP)
def _check_kpool_tail_backend(original, self, topk_indices, dsa_impl, phase):
    """Our reader attends the recent tokens behind the last pooled key, which end each list."""
    if reader_of(self) is None:
        original(self, topk_indices, dsa_impl, phase)


@around(f"{_DEQUANT}.dequantize_k_cache_paged_dsa", _GROUP)
def _dequantize_k_cache_paged_dsa(original, quant_k_cache, page_table_1_flattened, *args, **kwargs):
    """Decode the keys of some slots: uint8 rows with our codec, other rows with SGLang's kernel."""
    if quant_k_cache.dtype != torch.uint8:
        return original(quant_k_cache, page_table_1_flattened, *args, **kwargs)
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

    from sgl_kvpool.codec import gather_rows

    # The function does not get the pool; the rows belong to the pool of the running forward pass.
    fmt = get_token_to_kv_pool().row_format
    return gather_rows(quant_k_cache.squeeze(1), page_table_1_flattened, fmt).unsqueeze(1)
