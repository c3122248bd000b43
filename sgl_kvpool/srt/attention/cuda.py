"""`kvpool_mla` on CUDA: decode reads rows of any layout directly, prefill decodes rows in bounded chunks.

SGLang calls an MLA backend in three forms. Absorbed decode, verification of drafts and a draft's extend have
the same small number of queries per request: `mla_decode` attends them over the lists in SGLang's own request
table, so that only kv_lens are computed per step. Absorbed prefill decodes stored rows in chunks (`prefill`);
requests with one new token at the end of its batch are attended like a decode. In the MHA form SGLang
passes keys and values that the model has computed from the latent. FlashInfer attends them through the base
class and its runner, with the natural log-sum-exp that SGLang expects (`prefill`).

With decode context parallelism each rank attends the rows that it stores, with the queries of all ranks, and
SGLang merges the results. For a prefill SGLang gathers the rows of all ranks, decoded.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.layers.attention.flashinfer_mla_backend import FlashInferMLAAttnBackend, PrefillMetadata
from sglang.srt.layers.attention.verify_mask import VerifyMask, maybe_create_verify_mask
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import is_in_breakable_cuda_graph
from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import (
    is_in_tc_piecewise_cuda_graph,
)
from sglang.srt.runtime_context import get_exec, get_parallel, max_speculative_num_draft_tokens
from sglang.srt.utils import get_cuda_graph_max_batch_size

from sgl_kvpool.attention import decode_checks
from sgl_kvpool.attention.decode_config import decode_kernel_of, tile_config
from sgl_kvpool.srt import overrides
from sgl_kvpool.srt.attention.decode_verify import (
    DecodeBatch,
    ListReader,
    decode_tail,
    has_fixed_query_length,
    tokens_as_lists,
)
from sgl_kvpool.srt.attention.extend import bounds
from sgl_kvpool.srt.attention.layers import check_layers, is_absorbed, pool_of
from sgl_kvpool.srt.attention.prefill import AbsorbedPrefill, ChunkRunner, plan_ragged, take_own_prefixes
from sgl_kvpool.srt.facts.readers import KVPOOL_BACKEND
from sgl_kvpool.srt.pool.row_pool import RowsToWrite

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    from sgl_kvpool.srt.attention.extend import ExtendBatch

logger = logging.getLogger(__name__)


class KVPoolMLACudaBackend(FlashInferMLAAttnBackend):
    """MLA attention over a pool of rows (`RowPool`) on CUDA; `skip_prefill`: only decodes (draft steps).

    The backend of one draft step has `draft_step`, the tokens drafted so far, which `seq_lens` does not
    include. ValueError as `pool_of` and `check_layers`.
    """

    #: kv_lens come from tensors on the device, and the lengths of a prefill are on the host in any case.
    needs_cpu_seq_lens: bool = False
    supports_ragged_verify_graph: bool = False

    def __init__(self, model_runner, skip_prefill: bool = False, *, draft_step: int = 0):
        pool = pool_of(model_runner)
        check_layers(model_runner.model, pool, mha_form=True)
        super().__init__(model_runner, skip_prefill)
        self.fmt = pool.row_format
        for buffer in pool.row_pool.kv_buffer[:1]:  # a pipeline stage may have no layer
            if buffer.is_cuda:
                decode_checks.rows_on_cuda(buffer.squeeze(1).view(torch.uint8), self.fmt)
        self._rows_to_write = RowsToWrite(pool)
        self._extend: ExtendBatch | None = None
        self._decode_tail: DecodeBatch | None = None
        heads = model_runner.model_config.num_attention_heads // get_parallel().attn_tp_size
        requests = get_cuda_graph_max_batch_size(model_runner.req_to_token_pool.size)
        most_queries = max_speculative_num_draft_tokens() or 1
        self._lists = ListReader(
            pool, model_runner.req_to_token_pool.req_to_token, heads, requests, most_queries, draft_step
        )
        if self.enable_chunk_kv:
            self.mha_chunk_kv_cache = ChunkRunner(model_runner, self)
        tile = tile_config(self.fmt.layout, heads * pool.dcp_size, decode_kernel_of(self.fmt))
        logger.info("kvpool_mla decodes %s with the %s kernel", self.fmt.layout, tile.kernel)
        self.absorbed_prefill: AbsorbedPrefill | None = None
        if not self.skip_prefill:
            self.absorbed_prefill = AbsorbedPrefill(
                model_runner, heads, self._lists, self._rows_to_write, self.prefill_wrapper_paged
            )
        # SGLang writes the mask of a tree of drafts before it calls the backend. With one draft per step the
        # mask is causal and not read.
        self._verify_mask = maybe_create_verify_mask(
            is_draft_runner=model_runner.is_draft_worker,
            skip_prefill=self.skip_prefill,
            max_bs=requests,
            max_context_len=self.max_context_len,
            num_draft_tokens=max_speculative_num_draft_tokens(),
            device=self.device,
            is_read=False,
        )

    @property
    @overrides
    def verify_mask(self) -> VerifyMask | None:
        """Buffer into which SGLang writes the mask of drafts; not read."""
        return self._verify_mask

    @overrides
    def update_verify_buffers_to_fill_after_draft(self, spec_info, cuda_graph_bs: int | None) -> None:
        """Does nothing: no plan depends on the drafts, since kv_lens follow from lengths."""

    @overrides
    def shared_read_ends(self, fm: ForwardMode) -> SharedReadEnds:
        """When SGLang may change its request table: after the last layer, since every layer reads it."""
        if fm.is_decode() or fm.is_target_verify() or fm.is_draft_extend_v2():
            return SharedReadEnds.POST_REPLAY
        return super().shared_read_ends(fm)

    @overrides
    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, *_unused) -> None:
        """Check that the buffer of kv_lens holds the largest graph; SGLang's lists are not needed."""
        self._lists.kv_lens.require(max_num_tokens)

    @overrides
    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Prepare a batch that runs without a CUDA graph, or whose attention runs between graphs."""
        if has_fixed_query_length(forward_batch.forward_mode):
            self.init_forward_metadata_out_graph(forward_batch)
            self.init_forward_metadata_in_graph(forward_batch)
            return
        self._rows_to_write.forget()
        ranks = self._lists.dcp_size
        if ranks > 1:
            take_own_prefixes(forward_batch, self._lists)
        self._extend = None  # planned by the first absorbed layer, because the MHA form does not need it
        if self._lists.deterministic:
            self.forward_metadata = tokens_as_lists(forward_batch)
            return
        # With several ranks, a prefill has the queries of one.
        self._decode_tail = decode_tail(forward_batch, len(self._lists.lse)) if ranks == 1 else None
        use_ragged = self.fmt.qk_rope_head_dim > 0 and not (
            any(forward_batch.extend_prefix_lens_cpu)
            or get_exec().kernel.flashinfer_mla_disable_ragged
            or is_in_tc_piecewise_cuda_graph()
            or is_in_breakable_cuda_graph()
        )
        if use_ragged:
            queries = bounds(forward_batch.extend_seq_lens_cpu)
            plan_ragged(self.prefill_wrapper_ragged, self.indices_updater_prefill, queries, queries)
        self.forward_metadata = PrefillMetadata(self.prefill_wrapper_paged, use_ragged)

    @overrides
    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Set up views of static buffers for a batch of fixed query length, without reading lengths."""
        if not has_fixed_query_length(forward_batch.forward_mode):
            raise NotImplementedError(
                f"attention backend {KVPOOL_BACKEND} does not run prefill inside a CUDA graph; use "
                "--cuda-graph-backend-prefill breakable, or disable prefill graphs"
            )
        self.forward_metadata = self._lists.kv_lens.of(forward_batch)

    @overrides
    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Compute how many rows of its request each query attends; recorded into decode graphs."""
        self._rows_to_write.forget()
        if has_fixed_query_length(forward_batch.forward_mode):
            self._lists.kv_lens.fill(self.forward_metadata, forward_batch)

    @overrides
    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    @overrides
    def forward_decode(
        self, q, k, v, layer: RadixAttention, forward_batch, save_kv_cache=True, q_rope=None, k_rope=None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Absorbed decode, one query per request; see `_decode_or_verify`."""
        return self._decode_or_verify(q, k, layer, forward_batch, save_kv_cache, q_rope, k_rope)

    @overrides
    def forward_extend(
        self, q, k, v, layer: RadixAttention, forward_batch, save_kv_cache=True, q_rope=None, k_rope=None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Verification and a draft's extend, absorbed prefill, or the MHA form, which SGLang computes."""
        fixed = has_fixed_query_length(forward_batch.forward_mode)
        if not fixed and not is_absorbed(layer, self.token_to_kv_pool):
            if self._lists.deterministic:
                raise RuntimeError(
                    f"layer {layer.layer_id} prefills in the MHA form, whose results depend on chunks; serve "
                    "this model without --enable-deterministic-inference"
                )
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, q_rope, k_rope)
        if fixed or self._lists.deterministic:
            return self._decode_or_verify(q, k, layer, forward_batch, save_kv_cache, q_rope, k_rope)
        return self._prefill(q, k, layer, forward_batch, save_kv_cache, q_rope, k_rope)

    def _decode_or_verify(
        self, q, k, layer, forward_batch, save_kv_cache, q_rope, k_rope
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Store the new keys, then attend the lists of SGLang's request table; also a deterministic prefill.

        `q` is `[tokens, heads * (R + P)]`, or `[tokens, heads * R]` beside `q_rope`; `k` is
        `[tokens, 1, R + P]`, or `[tokens, 1, R]` beside `k_rope`. Returns `[tokens, heads * R]`; with several
        ranks, whose heads `q` has, also the log-sum-exp over this rank's rows `[tokens, heads]`, in base 2.
        """
        fmt, batch, heads = self.fmt, self.forward_metadata, layer.tp_q_head_num
        self._store(k, k_rope, layer, forward_batch, save_kv_cache)
        padded = q.shape[0]
        out = q.new_empty((padded, heads, fmt.kv_lora_rank))
        q, q_rope = self._by_head(q, q_rope, heads)
        tokens = batch.kv_lens.numel()
        if padded > tokens:
            # Data-parallel attention adds padding tokens to batches after planning.
            out[tokens:].zero_()
            q, q_rope = q[:tokens], None if q_rope is None else q_rope[:tokens]
        self._lists.attend(q, q_rope, layer, batch, out[:tokens])
        if self._lists.dcp_size == 1:
            return out.view(padded, heads * fmt.kv_lora_rank)
        lse = self._lists.lse[:padded].view(padded, heads)
        lse[tokens:].zero_()
        # SGLang merges in base 2, except for backends that `is_mla_dcp_lse_base_on_e` lists.
        return out.view(padded, heads * fmt.kv_lora_rank), lse.mul_(math.log2(math.e))

    def _by_head(self, q, q_rope, heads: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        if q_rope is None:
            return q.view(len(q), heads, self.fmt.head_dim), None
        return q.view(len(q), heads, self.fmt.kv_lora_rank), q_rope.view(
            len(q), heads, self.fmt.qk_rope_head_dim
        )

    def _prefill(self, q, k, layer, forward_batch, save_kv_cache, q_rope, k_rope) -> torch.Tensor:
        """Store the new tokens' keys, then attend them and the stored rows; shapes as `_decode_or_verify`."""
        fmt, heads, tokens = self.fmt, layer.tp_q_head_num, q.shape[0]
        prefill = self.absorbed_prefill
        if prefill is None:
            raise RuntimeError(f"a {KVPOOL_BACKEND} backend for decode alone was called for a prefill")
        tail, lengths = self._decode_tail, forward_batch.extend_seq_lens_cpu
        requests = len(lengths) - (0 if tail is None else len(tail.kv_lens))
        if self._extend is None:
            self._extend = prefill.plan(forward_batch, requests, layer.scaling)
        batch = self._extend
        first = batch.query_tokens  # first query of the decode tail
        if tokens != first + len(lengths) - requests:
            raise ValueError(f"{tokens} queries in a batch with {sum(lengths)} new tokens")
        self._store(k, k_rope, layer, forward_batch, save_kv_cache)
        q, q_rope = self._by_head(q, q_rope, heads)
        if tail is None:
            out = prefill.attend(batch, q, q_rope, k, k_rope, layer, forward_batch)
            return out.view(tokens, heads * fmt.kv_lora_rank)
        out = q.new_empty((tokens, heads, fmt.kv_lora_rank))
        if first:
            new_q_rope, new_k_rope = (None if part is None else part[:first] for part in (q_rope, k_rope))
            out[:first] = prefill.attend(
                batch, q[:first], new_q_rope, k[:first], new_k_rope, layer, forward_batch
            )
        own_rope = None if q_rope is None else q_rope[first:]
        self._lists.attend(q[first:], own_rope, layer, tail, out[first:])
        return out.view(tokens, heads * fmt.kv_lora_rank)

    def _store(self, k, k_rope, layer, forward_batch, save_kv_cache: bool) -> None:
        if not save_kv_cache or k is None:
            return
        rank = self.fmt.kv_lora_rank
        if k_rope is None:
            k, k_rope = k[..., :rank], k[..., rank:]
        self.token_to_kv_pool.set_mla_kv_buffer(layer, self._rows_to_write.of(forward_batch), k, k_rope)
