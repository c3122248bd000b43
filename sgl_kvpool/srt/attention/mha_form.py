"""The MHA form of MLA on CUDA: FlashInfer's kernels, with the natural log-sum-exp that SGLang merges by."""

from __future__ import annotations

import math

from sglang.srt.layers.attention.flashinfer_mla_backend import FlashInferMhaChunkKVRunner

__all__ = ["NaturalLSEChunkRunner"]


class NaturalLSEChunkRunner(FlashInferMhaChunkKVRunner):
    """SGLang's runner for chunks of prefixes, with the natural logarithm in its LSE.

    FlashInfer's `forward_return_lse` returns base 2, but SGLang's `merge_state` expects base e, so that
    SGLang 0.5.23 weights the chunks of a long prefix wrongly (its issue 40903).
    """

    def forward(self, q, k, v, layer, forward_batch):
        """As SGLang's: `out`, or `(out, lse)` if the batch requests it or a prefix is attended."""
        result = super().forward(q, k, v, layer, forward_batch)
        if not isinstance(result, tuple):
            return result
        out, lse = result
        return out, lse * math.log(2.0)  # -inf of a request without rows in a chunk stays -inf
