"""Servers of the hybrid model: what they are started with, and asked."""

import sys
from pathlib import Path

import codec_oracle as oracle
import host_tier_servers as host_tier
import hybrid_model
from programs import FLUSH, clean_environment, python_path, scored
from tiny_model import NEW_TOKENS, PROMPTS, TEXT

from sgl_kvpool.commands.processes.server import Server, cpu_arguments, free_port

HERE = Path(__file__).resolve().parent

#: States are tracked every 64 tokens: SGLang takes the larger of its kernels' chunk and the page.
GRID, PAGE_SIZE = 64, 16
ARGUMENTS = [
    *("--page-size", str(PAGE_SIZE), "--attention-backend", "torch_native"),
    # A running request holds its state and one that is tracked, the radix cache one per tracked prefix.
    *("--max-mamba-cache-size", "64"),
    # Pages of more than one token, and states that are kept while a request goes on.
    *("--mamba-radix-cache-strategy", "extra_buffer", "--mamba-track-interval", str(GRID)),
    # The longest prompt is prefilled in two parts: the second begins with a state.
    *("--chunked-prefill-size", "192"),
]
ENVIRONMENT = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "hybrid_models", "OMP_NUM_THREADS": "1"}
PROGRAM = (sys.executable, str(HERE / "hybrid_launch.py"))

#: Every layout and every arrangement, and one whose host tier is narrower: server to arguments.
LAYOUTS = {
    **{f"hybrid-{layout}": ["--kv-cache-layout", layout] for layout in oracle.LAYOUTS},
    "hybrid-fp8": ["--kv-cache-layout", "fp8", "--kv-cache-arrangement", "page_major"],
    "hybrid-fp8_block_scale": [
        *("--kv-cache-layout", "fp8_block_scale", "--kv-cache-arrangement", "token_major"),
        *("--hicache-io-backend", "direct"),
    ],
    "hybrid-fp4_fp8_rope": ["--kv-cache-layout", "fp4_fp8_rope", "--kv-cache-arrangement", "token_major"],
    "hybrid-bf16-on-fp4": ["--kv-cache-layout", "bf16", "--kv-host-layout", "fp4"],
}
DEVICE_TOKENS = 2048
#: Arguments of servers with a layout, after ARGUMENTS; rows and states of the host tier are sized by the
#: ratio.
WITH_LAYOUT = [
    *("--attention-backend", "kvpool_mla", "--max-total-tokens", str(DEVICE_TOKENS)),
    *("--enable-hierarchical-cache", "--hicache-ratio", "4"),
    *("--enable-metrics", "--enable-cache-report"),
]
#: Prefill attends stored rows, as decode does, so that log-probabilities of a prompt show how rows are
#: rounded.
READS_ROWS = {"KVPOOL_PREFILL_READS_ROWS": "1"}
#: Push everything else out of a pool of DEVICE_TOKENS.
FILLERS = [text[n:] + text[:n] for n, text in enumerate(host_tier.FILLERS * 2)]

GREEDY = {"temperature": 0, "ignore_eos": True}
#: Prompts that share no beginning with any other.
APART = [f"{n}: {TEXT[31 * n : 31 * n + 40 + 23 * n]}" for n in range(6)]
LONG = 120


def serve(arguments=(), environment=None):
    """A job of conftest's: `job(model_path, folder)` starts the server, and returns its answers.

    `arguments` come after those of the stock server, `environment` is added to its own.
    """

    def job(_model_path, folder):
        folder.mkdir()
        model_path = hybrid_model.write(folder / "hybrid")
        log = folder / "server.log"
        with Server(
            [*cpu_arguments(model_path, free_port()), *ARGUMENTS, *arguments],
            log,
            clean_environment(**{**ENVIRONMENT, "PYTHONPATH": python_path(HERE), **(environment or {})}),
            program=PROGRAM,
        ) as server:
            answers = ask(server)
        return {**answers, "model_path": model_path, "log": log.read_text(errors="replace")}

    return job


def ask(server):
    """Everything that is asked of a server of the hybrid model."""

    def generate(text, new_tokens=NEW_TOKENS):
        sampling = {**GREEDY, "max_new_tokens": new_tokens}
        return server.generate(text=text, sampling_params=sampling, return_logprob=True)

    answers = {
        "info": server.info(),
        "first": [generate(prompt) for prompt in PROMPTS],
        # Now as much of each prompt is reused as has a state.
        "again": [generate(prompt) for prompt in PROMPTS],
        "long": generate(PROMPTS[0], LONG),
    }
    # A prompt whose state was tracked while it was decoded.
    answers["continued"] = generate(PROMPTS[0] + answers["long"]["text"])
    answers["alone"] = [generate(prompt) for prompt in APART]
    server.get(FLUSH)
    answers["together"] = generate(APART)
    # Log-probabilities of a prompt: one prefill without a cached prefix.
    answers["prompt"] = scored(server, text=PROMPTS[3])
    if answers["info"]["enable_hierarchical_cache"]:
        server.get(FLUSH)
        answers["filled"] = generate(PROMPTS[3])
        answers["device_hit"] = generate(PROMPTS[3])
        answers["fillers"] = [generate(text) for text in FILLERS]
        answers["host_hit"] = generate(PROMPTS[3])
        answers["metrics"] = server.get("/metrics").decode()
    return answers


#: What conftest starts by name.
JOBS = {
    "hybrid": serve(),
    **{name: serve([*WITH_LAYOUT, *argv], READS_ROWS) for name, argv in LAYOUTS.items()},
}
