"""SGLang's Engine with a random checkpoint of one of its model classes, in a fork: its answers as JSON."""

import faulthandler
import json
import random
import signal
import sys

from emulated_cuda.byte_engine import Printed

VOCAB = 512
COMMON = {
    "skip_tokenizer_init": True, "context_length": 4096, "chunked_prefill_size": 256, "page_size": 64,
    "mem_fraction_static": 0.3, "max_total_tokens": 4096, "max_running_requests": 8, "random_seed": 0,
    "cuda_graph_bs_decode": [1, 4], "enable_cache_report": True, "decode_log_interval": 1,
    "log_level": "info",
}  # fmt: skip


def tokens(seed, count):
    return random.Random(seed).choices(range(3, VOCAB), k=count)


def allow_short_lists():
    """Let top-k lists of prefills be shorter than 2048, which sgl_kernel's operator does not."""
    import sgl_kernel
    import torch

    from sgl_kvpool.sglang_plugin.rules import attention

    attention.PAGED_TOP_K = range(2049)

    def fused(score, lengths, page_table_size_1, cu_seqlens_q, topk, row_starts=None):
        lists = score.new_empty((len(score), topk), dtype=torch.int32)
        operator = torch.ops.sgl_kernel.fast_topk_transform_fused
        operator(score, lengths, lists, page_table_size_1, cu_seqlens_q, row_starts)
        return lists

    sgl_kernel.fast_topk_transform_fused = fused


def main(model, questions, **options):
    """Answers to `questions`, of one Engine with `options` beside its own.

    A question is (name, input ids or a list of them, tokens to generate, first token with a log-probability).
    """
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    from emulated_cuda import memory
    from sgl_kvpool.commands.processes import forks

    memory.ALLOCATOR.problems = Printed()
    if options.get("dcp_size", 1) > 1:
        allow_short_lists()
    forks.fork_children()
    import sglang

    engine = sglang.Engine(model_path=model, device="cuda", **COMMON | options)
    answers = {}
    for name, ids, count, first in questions:
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        scored = {"return_logprob": True, "top_logprobs_num": 20, "logprob_start_len": first}
        answers[name] = engine.generate(input_ids=ids, sampling_params=sampling, **scored)
        print("answered", name, file=sys.stderr, flush=True)
    answers["info"] = {name: str(value) for name, value in engine.get_server_info().items()}
    engine.shutdown()
    print("\n" + json.dumps(answers))
