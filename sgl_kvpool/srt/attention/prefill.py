"""Prefill on CUDA: what an `ExtendReader` attends of SGLang's batch and our pool, and the MHA form.

FlashInfer's kernels for the MHA form are planned on the host. With decode context parallelism SGLang gathers
the stored rows of all ranks, decoded, before each layer.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import torch
from sglang.kernels.ops.attention.kv_indices import create_flashinfer_kv_indices_triton
from sglang.srt.layers.attention.flashinfer_mla_backend import FlashInferMhaChunkKVRunner
from sglang.srt.runtime_context import get_buffer, get_schedule

from sgl_kvpool import env
from sgl_kvpool.codec import gather_rows
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.memory.arrangement import global_slots, local_slots
from sgl_kvpool.srt import overrides
from sgl_kvpool.srt.attention.extend import ExtendReader, bounds, extend_workspace, keep_pinned, plan_extend

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from sgl_kvpool.srt.attention.decode_verify import ListReader
    from sgl_kvpool.srt.attention.extend import ExtendBatch
    from sgl_kvpool.srt.pool.row_pool import RowsToWrite

logger = logging.getLogger(__name__)


class AbsorbedPrefill:
    """Attends new tokens and their requests' stored rows; `wrapper` is FlashInfer's for absorbed MLA."""

    def __init__(
        self, model_runner: Any, heads: int, lists: ListReader, rows_to_write: RowsToWrite, wrapper: Any
    ):
        self._lists, self._rows_to_write = lists, rows_to_write
        fmt, dtype, device = lists.pool.row_format, model_runner.dtype, model_runner.device
        workspace = get_buffer(
            f"kvpool_mla_extend_{fmt.head_dim}_{dtype}", lambda: extend_workspace(fmt, dtype, device)
        )
        stored = fmt
        if lists.dcp_size > 1 and fmt.layout.is_packed:  # SGLang gathers decoded rows
            stored = MLAKVCacheLayout.BF16.row_format(fmt.kv_lora_rank, fmt.qk_rope_head_dim)
        self.reader = ExtendReader(stored, heads, workspace, wrapper=wrapper)
        self.reader.require(_longest_prefill(model_runner.model_config.context_len))
        self.reads_rows = env.flag(env.PREFILL_READS_ROWS)
        if self.reads_rows:
            logger.info("sgl-kvpool: prefill attends stored rows (%s=1)", env.PREFILL_READS_ROWS)

    def plan(self, forward_batch: ForwardBatch, requests: int, scale: float) -> ExtendBatch:
        """Plan the first `requests` requests, with lengths from the host and rows from the request table."""

        def list_rows(lengths: torch.Tensor, starts: torch.Tensor, total: int) -> torch.Tensor:
            table = self._lists.req_to_token
            if self._lists.dcp_size > 1:
                return torch.arange(total, dtype=torch.int32, device=table.device)
            slots = torch.empty(total, dtype=torch.int32, device=table.device)
            if total:
                create_flashinfer_kv_indices_triton[(len(lengths),)](
                    table, forward_batch.req_pool_indices, lengths, starts, None, slots, table.stride(0)
                )
            return self._lists.pool.slot_to_row(slots)

        return plan_extend(
            list(forward_batch.extend_prefix_lens_cpu[:requests]),
            list(forward_batch.extend_seq_lens_cpu[:requests]),
            list_rows,
            self.reader,
            scale,
        )

    def attend(
        self, batch: ExtendBatch, q, q_rope, k, k_rope, layer: RadixAttention, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """Attention of requests, `[tokens, heads, R]`; `q`, `q_rope` as in `ListReader.attend`.

        `k` is `[tokens, 1, R + P]`, or `[tokens, 1, R]` beside `k_rope`.
        """
        pool, layer_id = self._lists.pool, layer.layer_id
        fmt, tokens, k_scale = pool.row_format, len(q), pool.k_scale(layer_id)
        if self._lists.dcp_size == 1:
            rows = pool.get_row_buffer(layer_id).squeeze(1)
        else:  # the prefixes of all requests, one after the other
            rows = forward_batch.attn_dcp_metadata.dcp_kv_buffer.squeeze(1).view(torch.uint8)
        if q_rope is None:
            q, q_rope = q.split([fmt.kv_lora_rank, fmt.qk_rope_head_dim], dim=-1)
        if self.reads_rows:
            own = self._rows_to_write.of(forward_batch).loc[:tokens]
            extend_kv = gather_rows(rows, own, fmt, q.dtype, k_scale=k_scale)
        elif k_rope is not None:
            parts = k.view(tokens, fmt.kv_lora_rank), k_rope.view(tokens, fmt.qk_rope_head_dim)
            extend_kv = torch.cat(parts, dim=-1).to(q.dtype)
        else:
            extend_kv = k.view(tokens, fmt.head_dim).to(q.dtype)
        return self.reader.attend(q, q_rope, extend_kv, rows, batch, layer.scaling, k_scale=k_scale)


def _longest_prefill(context_tokens: int) -> int:
    schedule = get_schedule()
    chunk = schedule.chunked_prefill_size
    if chunk is None or chunk <= 0:
        return max(schedule.max_prefill_tokens, context_tokens)
    return chunk


def take_own_prefixes(forward_batch: ForwardBatch, lists: ListReader) -> None:
    """Correct a batch's list of slots that this rank contributes to the prefixes which SGLang gathers.

    SGLang takes every `ranks`-th slot of all prefixes together, and so other ranks' slots of a request behind
    such a prefix. A chunk of a prefill ends at a multiple of the page size of one rank, and with
    `--enable-mixed-chunk` running requests end anywhere.
    """
    rank, ranks, req_to_token = lists.dcp_rank, lists.dcp_size, lists.req_to_token
    lengths = forward_batch.extend_prefix_lens_cpu
    if not any(length % ranks for length in lengths):
        return
    own = [global_slots(torch.arange(len(range(rank, length, ranks))), rank, ranks) for length in lengths]
    requests = torch.arange(len(own)).repeat_interleave(torch.tensor([len(each) for each in own]))
    host = torch.stack([requests, torch.cat(own)])
    if req_to_token.is_cuda:
        host = host.pin_memory()  # so that the copy does not wait
    request, position = host.to(req_to_token.device, non_blocking=True)
    slots = req_to_token[forward_batch.req_pool_indices[request], position]
    forward_batch.attn_dcp_metadata.dcp_local_prefix_kv_indices = local_slots(slots, ranks)


def plan_ragged(
    wrapper: Any, sizes: Any, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, *, causal: bool = True
) -> None:
    """Plan a `BatchPrefillWithRaggedKVCacheWrapper` without waiting for the GPU.

    FlashInfer plans on the host: bounds on the GPU, which SGLang passes, are copied back, twice per call.
    `qo_indptr` and `kv_indptr` are `[requests + 1]` on the CPU: bounds of the requests' queries and keys.
    `sizes` is SGLang's updater or runner, with numbers of heads, head dimensions, `q_data_type`, and
    `qo_indptr` on the wrapper's device.
    """
    on_host = [part.int() for part in (qo_indptr, kv_indptr)]
    if sizes.qo_indptr.is_cuda:  # FlashInfer copies them to the GPU; a pinned source makes that asynchronous
        on_host = [part.pin_memory() for part in on_host]
        # A wrapper writes all its plans to the same pinned memory, which may not have been copied yet.
        pinned = torch.empty_like(wrapper._pin_memory_int_workspace_buffer, pin_memory=True)
        wrapper._pin_memory_int_workspace_buffer = pinned
    wrapper.begin_forward(
        qo_indptr=on_host[0],
        kv_indptr=on_host[1],
        num_qo_heads=sizes.num_local_heads,
        num_kv_heads=sizes.num_local_heads,
        head_dim_qk=sizes.qk_nope_head_dim + sizes.qk_rope_head_dim,
        head_dim_vo=sizes.v_head_dim,
        q_data_type=sizes.q_data_type,
        causal=causal,
    )
    keep_pinned(wrapper)


class ChunkRunner(FlashInferMhaChunkKVRunner):
    """SGLang's runner for chunks of prefixes, planned on the host, with the natural logarithm in its LSE.

    FlashInfer's `forward_return_lse` returns base 2, but SGLang's `merge_state` expects base e, so that
    SGLang 0.5.23 weights the chunks of a long prefix wrongly (its issue 40903).
    """

    @overrides
    def update_wrapper(self, forward_batch, disable_flashinfer_ragged: bool = False) -> None:
        """As SGLang's, with bounds from the lengths that the host has."""
        chunks = forward_batch.num_prefix_chunks
        self.update_prefix_chunks(chunks)
        queries = bounds(forward_batch.extend_seq_lens_cpu)
        for number in range(chunks):
            lengths = forward_batch.prefix_chunk_seq_lens_cpu[number].tolist()
            plan_ragged(self.chunk_ragged_wrappers[number], self, queries, bounds(lengths), causal=False)
        if not disable_flashinfer_ragged:
            keys = queries
            if forward_batch.mha_one_shot:
                keys = queries + bounds(forward_batch.extend_prefix_lens_cpu)
            plan_ragged(self.ragged_wrapper, self, queries, keys)

    @overrides
    def forward(self, q, k, v, layer, forward_batch):
        """As SGLang's: `out`, or `(out, lse)` if the batch requests it or a prefix is attended."""
        result = super().forward(q, k, v, layer, forward_batch)
        if not isinstance(result, tuple):
            return result
        out, lse = result
        return out, lse * math.log(2.0)  # -inf of a request without rows in a chunk stays -inf
