"""`kvpool_mla` for the steps of a draft: one backend per step, each of which attends one token more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.model_executor.forward_batch_info import ForwardMode, build_inner_fb_view

from sgl_kvpool.srt.attention.cuda import KVPoolMLACudaBackend

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class KVPoolMultiStepDraftBackend:
    """SGLang's container of backends for drafting tokens one after the other, in chains.

    Step `i` attends the stored rows of a request and the `i + 1` tokens drafted so far, whose slots SGLang
    has already written into its request table. Therefore the steps differ only in their kv_lens. There is one
    backend fewer than `speculative_num_steps`: the draft's extend yields the first token.
    """

    needs_cpu_seq_lens: bool = False

    def __init__(self, model_runner, topk: int, speculative_num_steps: int):
        assert topk == 1, topk  # `rules.attention` refuses trees
        self.topk = topk
        self.speculative_num_steps = speculative_num_steps
        self.kv_index_translator = model_runner.kv_index_translator
        self.attn_backends = [
            KVPoolMLACudaBackend(model_runner, skip_prefill=True, draft_step=step + 1)
            for step in range(speculative_num_steps - 1)
        ]

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Prepare all steps of a batch that is run without a CUDA graph."""
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Check that the largest graph fits into the buffer of kv_lens of every step."""
        for backend in self.attn_backends:
            backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Set up views of static buffers for every step."""
        view = build_inner_fb_view(
            forward_batch, bs=forward_batch.batch_size, forward_mode=ForwardMode.DECODE
        )
        for backend in self.attn_backends:
            backend.init_forward_metadata_out_graph(view, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Compute the kv_lens of every step; recorded into the graph."""
        for backend in self.attn_backends:
            backend.init_forward_metadata_in_graph(forward_batch)
