"""SGLang's Engine with the demo's byte model, in a fork, on one of two devices: its answers as JSON.

The device pool holds two prompts, so that the fillers push a prompt out to the host.
"""

import json
import os
import sys
from pathlib import Path

PAGE_SIZE, DEVICE_TOKENS, HOST_TOKENS = 16, 512, 4096
GREEDY = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
#: Texts of their own that need more than the device pool.
FILLERS = ["".join(chr(33 + (i * (7 + k) + k) % 90) for i in range(300)) for k in range(2)]
COMMON = {
    "page_size": PAGE_SIZE, "max_total_tokens": DEVICE_TOKENS, "mem_fraction_static": 0.3,
    "enable_hierarchical_cache": True, "hicache_ratio": HOST_TOKENS // DEVICE_TOKENS,
    "enable_cache_report": True, "decode_log_interval": 1, "log_level": "info", "random_seed": 0,
}  # fmt: skip
ON = {
    "cuda": {
        # A batch of three replays the graph of four. Prefill graphs need a class of another form.
        "cuda_graph_bs_decode": [1, 4],
        "cuda_graph_backend_prefill": "disabled",
        "max_running_requests": 4,
    },
    "cpu": {"disable_overlap_schedule": True, "disable_cuda_graph": True},
}


class Printed(list):
    """Faults that the device finds where it cannot raise: they are in the process's log."""

    def append(self, fault):
        print(f"FAULT {fault}", file=sys.stderr, flush=True)
        super().append(fault)


def aborted(engine, text):
    """The end of a request that is aborted after its first token."""
    answers = engine.generate(text, GREEDY | {"max_new_tokens": 99}, stream=True, routed_dp_rank=0)
    next(answers)
    engine.tokenizer_manager.abort_request(abort_all=True)
    *_, last = answers
    return last["meta_info"]["finish_reason"]["type"]


def main(device, layout, **options):
    """Answers of an Engine with `options` beside its own; of several ranks with `tp_size`."""
    from sgl_kvpool.commands.processes import forks

    if device == "cuda":
        from emulated_cuda import memory

        memory.ALLOCATOR.problems = Printed()
    forks.fork_children()
    os.environ["SGLANG_EXTERNAL_MODEL_PACKAGE"] = "ranked_models" if "tp_size" in options else "roomy_models"
    os.environ.setdefault("KVPOOL_PREFILL_READS_ROWS", "1")
    import sglang

    from sgl_kvpool.layout import MLAKVCacheLayout

    root = Path(__file__).resolve().parents[2]
    prompts = json.loads((root / "tests/engine/goldens.json").read_text())["prompts"][:3]
    model = root / "sgl_kvpool/demo/byte_mla_python"
    options = COMMON | ON[device] | options
    if device == "cuda" and not MLAKVCacheLayout(layout).is_packed:
        # `layer_major` rows have SGLang's own host tier there, whose kernels the device does not run.
        options["kv_cache_arrangement"] = "page_major"
    engine = sglang.Engine(model_path=str(model), device=device, kv_cache_layout=layout, **options)

    def ask(text, **more):
        return engine.generate(text, GREEDY, return_logprob=True, routed_dp_rank=0, **more)

    long = prompts[2]
    answers = {
        "first": [ask(prompt) for prompt in prompts],
        "prompt": ask(prompts[0], logprob_start_len=0),
        "batch": engine.generate(prompts, GREEDY, return_logprob=True),  # of all groups
        "device_hit": ask(long),
        "fillers": [ask(text) for text in FILLERS],
        "host_hit": ask(long),
        "aborted": aborted(engine, long),
        "after": ask(long),
        "info": {name: str(value) for name, value in engine.get_server_info().items()},
    }
    engine.shutdown()
    print("\n" + json.dumps(answers))
