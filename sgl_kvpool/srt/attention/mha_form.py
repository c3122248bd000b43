"""The MHA form of MLA on CUDA: FlashInfer's kernels, planned on the host, with a natural log-sum-exp."""

import math
from typing import Any

import torch
from sglang.srt.layers.attention.flashinfer_mla_backend import FlashInferMhaChunkKVRunner

from sgl_kvpool.srt import overrides
from sgl_kvpool.srt.attention.extend import bounds


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
