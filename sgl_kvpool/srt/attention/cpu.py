"""`kvpool_mla` on a CPU: an attention backend of SGLang that reads rows of any layout.

SGLang calls it with absorbed queries and keys, 576 values wide for the usual geometry. All reads of the pool
go through `get_row_buffer` and access only rows of the batch.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sgl_kvpool import env
from sgl_kvpool.attention import compiled
from sgl_kvpool.attention.cpu import Request, RowReader, attend, causal_limits, merge
from sgl_kvpool.attention.decode import mla_decode
from sgl_kvpool.attention.readers import KVPOOL_BACKEND
from sgl_kvpool.refusal import Refusal
from sgl_kvpool.srt import overrides
from sgl_kvpool.srt.attention.decode_verify import DecodeBatch, is_deterministic, tokens_as_lists
from sgl_kvpool.srt.attention.layers import check_layers, pool_of
from sgl_kvpool.srt.pool.row_pool import RowsToWrite

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

logger = logging.getLogger(__name__)


class KVPoolMLABackend(AttentionBackend):
    """MLA attention over a pool of rows (`RowPool`), on the CPU.

    Serves prefill with and without a stored prefix, chunked prefill and decode, for batches of unequal
    lengths. With `KVPOOL_PREFILL_READS_ROWS=1` a prefill also reads its new tokens back from the pool. A
    deterministic server attends every token by itself.
    ValueError for another pool, or for layers that this backend does not compute (sliding windows,
    logit caps).
    """

    def __init__(self, model_runner):
        super().__init__()
        pool = pool_of(model_runner)
        if torch.device(model_runner.device).type != "cpu":
            raise Refusal(
                f"this is attention backend {KVPOOL_BACKEND} for CPUs, but the device is "
                f"{model_runner.device}; build KVPoolMLACudaBackend there, as create_backend does"
            )
        check_layers(model_runner.model, pool, mha_form=False)
        # Part of the interface: SGLang finds its pools through the backend object.
        self.token_to_kv_pool = pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.device = model_runner.device
        self.data_type = pool.dtype
        self.kv_cache_dtype = pool.dtype

        self.prefill_reads_rows = env.flag(env.PREFILL_READS_ROWS)
        compiled.module()  # compiled now, not by the first request
        self.deterministic = is_deterministic()
        self._every_token: DecodeBatch | None = None  # of a deterministic server
        self.reader = RowReader(pool.row_format)
        self._requests: list[Request] = []
        self._kv_indices = torch.empty(0, dtype=torch.int64)
        self._plan: list = []
        self._rows_to_write = RowsToWrite(pool)
        if self.prefill_reads_rows:
            logger.info("sgl-kvpool: prefill attends stored rows (%s=1)", env.PREFILL_READS_ROWS)

    # ---------------------------------------------------------------- once per step

    @overrides
    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Collect the row numbers of this batch; they are the same for every layer."""
        if self.deterministic:
            self._rows_to_write.forget()
            self._every_token = tokens_as_lists(forward_batch)
            return
        seq_lens = forward_batch.seq_lens_cpu.tolist()
        if forward_batch.forward_mode.is_decode_or_idle():
            queries = [1] * len(seq_lens)
            stored = seq_lens
        else:
            queries = list(forward_batch.extend_seq_lens_cpu)
            prefixes = list(forward_batch.extend_prefix_lens_cpu)
            stored = seq_lens if self.prefill_reads_rows else prefixes
        self._rows_to_write.forget()
        self._requests = []
        query_start = rows_start = 0
        for seq_len, query_count, rows_count in zip(seq_lens, queries, stored, strict=True):
            self._requests.append(
                Request(query_start, query_count, seq_len - query_count, rows_start, rows_count)
            )
            query_start += query_count
            rows_start += rows_count
        table = self.req_to_token_pool.req_to_token
        slots = forward_batch.req_pool_indices.tolist()
        lists = [table[slot, :count] for slot, count in zip(slots, stored, strict=True)]
        listed = torch.cat(lists) if lists else table.new_empty(0)
        self._kv_indices = self.token_to_kv_pool.slot_to_row(listed)
        self._plan = self.reader.plan(self._requests)

    @overrides
    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of a padding request; there are no CUDA graphs on the CPU."""
        return 1

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """As `get_cuda_graph_seq_len_fill_value`; SGLang uses this name where it pads batches on a CPU."""
        return 1

    @overrides
    def support_triton(self) -> bool:
        """False, so that SGLang's helpers take their torch path."""
        return False

    # ---------------------------------------------------------------- per layer

    @overrides
    def forward_extend(
        self, q, k, v, layer: RadixAttention, forward_batch, save_kv_cache=True, **kwargs
    ) -> torch.Tensor:
        """Absorbed prefill; see `_forward`."""
        fresh = not self.prefill_reads_rows
        return self._forward(q, k, layer, forward_batch, save_kv_cache, fresh, **kwargs)

    @overrides
    def forward_decode(
        self, q, k, v, layer: RadixAttention, forward_batch, save_kv_cache=True, **kwargs
    ) -> torch.Tensor:
        """Absorbed decode, one query per request, over stored rows alone; see `_forward`."""
        return self._forward(q, k, layer, forward_batch, save_kv_cache, False, **kwargs)

    def _forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
        attend_fresh: bool,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the batch's keys, then attend stored rows and, with `attend_fresh`, the new tokens' own keys.

        `q` is `[tokens, heads * (R + P)]`, or `[tokens, heads * R]` beside `q_rope`; `k` is
        `[tokens, 1, R + P]`, or `[tokens, 1, R]` beside `k_rope`. Returns `[tokens, heads * R]`.
        """
        pool, fmt = self.token_to_kv_pool, self.reader.fmt
        rank, heads = fmt.kv_lora_rank, layer.tp_q_head_num
        k_nope = k[..., :rank]
        if k_rope is None:
            k_rope = k[..., rank:]
        if save_kv_cache:
            pool.set_mla_kv_buffer(layer, self._rows_to_write.of(forward_batch), k_nope, k_rope)

        tokens = q.shape[0]
        if q_rope is None:
            query = q.reshape(tokens, heads, fmt.head_dim)
        else:
            rope = q_rope.reshape(tokens, heads, fmt.qk_rope_head_dim)
            query = torch.cat([q.reshape(tokens, heads, rank), rope], dim=-1)
        rows = pool.get_row_buffer(layer.layer_id).squeeze(1)
        if (batch := self._every_token) is not None:
            out, _ = mla_decode(
                query, rows, self.req_to_token_pool.req_to_token, batch.kv_lens, fmt, layer.scaling,
                pool.k_scale(layer.layer_id), list_index=batch.lists, page=pool.page_stride,
            )  # fmt: skip
            return out.reshape(tokens, heads * rank)
        query = query.float()
        out, lse = self.reader.attend(
            query, rows, self._kv_indices, self._plan, layer.scaling, k_scale=pool.k_scale(layer.layer_id)
        )
        if attend_fresh:
            query = query.float()
            key = (
                torch.cat([k_nope, k_rope.reshape(tokens, 1, fmt.qk_rope_head_dim)], dim=-1)
                .squeeze(1)
                .float()
            )
            for request in self._requests:
                own = slice(request.query_start, request.query_start + request.query_count)
                fresh_out, fresh_lse = attend(
                    query[own], key[own], rank, layer.scaling, limits=causal_limits(0, request.query_count)
                )
                merge(out[own], lse[own], fresh_out, fresh_lse)
        return out.to(q.dtype).reshape(tokens, heads * rank)
