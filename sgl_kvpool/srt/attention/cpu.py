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
from sgl_kvpool.attention import cpu
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.refusal import Refusal
from sgl_kvpool.srt import overrides
from sgl_kvpool.srt.attention.decode_verify import is_deterministic
from sgl_kvpool.srt.attention.layers import check_layers, pool_of
from sgl_kvpool.srt.facts.readers import KVPOOL_BACKEND
from sgl_kvpool.srt.pool.row_pool import RowsToWrite

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

logger = logging.getLogger(__name__)


class KVPoolMLABackend(AttentionBackend):
    """MLA attention over a pool of rows (`RowPool`), on the CPU.

    Serves prefill with and without a stored prefix, chunked prefill and decode, for batches of unequal
    lengths. With `KVPOOL_PREFILL_READS_ROWS=1` a prefill also reads its new tokens back from the pool. A
    deterministic server attends every token by itself. ValueError as `pool_of` and `check_layers`.
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
        cpu.module()  # compiled now, not by the first request
        self.deterministic = is_deterministic()
        self.row_format = fmt = pool.row_format
        #: New tokens' keys are attended as rows that are not rounded further than to bfloat16.
        self._new_format = MLAKVCacheLayout.BF16.row_format(fmt.kv_lora_rank, fmt.qk_rope_head_dim)
        # `lists` and `kv_lens` of `attend_lists`: of stored rows, and of the keys of new tokens.
        self._stored: tuple[torch.Tensor, torch.Tensor] | None = None
        self._new: tuple[torch.Tensor, torch.Tensor] | None = None
        self._rows_to_write = RowsToWrite(pool)
        if self.prefill_reads_rows:
            logger.info("sgl-kvpool: prefill attends stored rows (%s=1)", env.PREFILL_READS_ROWS)

    @overrides
    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Divide the batch into lists of rows; they are the same for every layer."""
        self._rows_to_write.forget()
        lens = forward_batch.seq_lens_cpu.long()
        decodes = forward_batch.forward_mode.is_decode_or_idle()
        new = torch.ones_like(lens) if decodes else torch.tensor(forward_batch.extend_seq_lens_cpu).long()
        first = new.cumsum(0) - new
        request = torch.repeat_interleave(new)  # of each token
        token = torch.arange(len(request))
        after = token - first[request] + 1  # new tokens of the request up to this one
        before = (lens - new)[request]
        table = self.req_to_token_pool.req_to_token
        tables = forward_batch.req_pool_indices.long() * table.stride(0)
        self._new = None
        if self.deterministic:  # a list per token
            each = torch.stack([tables[request], token, torch.ones_like(token)], 1)
            self._stored = each, before + after
            return
        self._stored = torch.stack([tables, first, new], 1), before + after
        if not decodes and not self.prefill_reads_rows:
            self._stored = (self._stored[0], before) if before.any() else None
            self._new = torch.stack([first, first, new], 1), after

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

    @overrides
    def forward_extend(
        self, q, k, v, layer: RadixAttention, forward_batch, save_kv_cache=True, **kwargs
    ) -> torch.Tensor:
        """Absorbed prefill or decode; see `_forward`."""
        return self._forward(q, k, layer, forward_batch, save_kv_cache, **kwargs)

    forward_decode = forward_extend

    def _forward(
        self, q, k, layer, forward_batch, save_kv_cache: bool, q_rope=None, k_rope=None
    ) -> torch.Tensor:
        """Store the batch's keys, then attend the lists of this step.

        `q` is `[tokens, heads * (R + P)]`, or `[tokens, heads * R]` beside `q_rope`; `k` is
        `[tokens, 1, R + P]`, or `[tokens, 1, R]` beside `k_rope`. Returns `[tokens, heads * R]`.
        """
        pool, fmt, tokens, heads = self.token_to_kv_pool, self.row_format, q.shape[0], layer.tp_q_head_num
        rank, rope = fmt.kv_lora_rank, fmt.qk_rope_head_dim
        k_nope = k[..., :rank]
        if k_rope is None:
            k_rope = k[..., rank:]
        if save_kv_cache:
            pool.set_mla_kv_buffer(layer, self._rows_to_write.of(forward_batch), k_nope, k_rope)

        if q_rope is None:
            q_nope, q_rope = q.reshape(tokens, heads, rank + rope).split([rank, rope], dim=-1)
        else:
            q_nope, q_rope = q.reshape(tokens, heads, rank), q_rope.reshape(tokens, heads, rope)

        merged = self._stored is not None and self._new is not None

        def attended(rows, kv_indices, lists, kv_lens, fmt, k_scale=1.0, page=None):
            out = q.new_empty((tokens, heads, rank), dtype=torch.float32 if merged else q.dtype)
            lse = q.new_empty((tokens, heads), dtype=torch.float32)
            cpu.attend_lists(
                out, lse, q_nope, q_rope, rows, kv_indices, lists, kv_lens, fmt, layer.scaling, k_scale,
                page, batch_invariant=self.deterministic,
            )  # fmt: skip
            return out, lse

        parts = []
        if self._stored is not None:
            rows = pool.get_row_buffer(layer.layer_id).squeeze(1)
            table, k_scale = self.req_to_token_pool.req_to_token, pool.k_scale(layer.layer_id)
            parts.append(attended(rows, table, *self._stored, fmt, k_scale, pool.page_stride))
        if self._new is not None:
            values = [k_nope.reshape(tokens, rank), k_rope.reshape(tokens, rope)]
            rows = torch.cat(values, dim=-1).bfloat16().view(torch.uint8)
            parts.append(attended(rows, torch.arange(tokens), *self._new, self._new_format))
        if merged:
            cpu.merge(*parts[0], *parts[1])
        return parts[0][0].to(q.dtype).reshape(tokens, heads * rank)
