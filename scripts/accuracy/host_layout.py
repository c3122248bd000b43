#!/usr/bin/env python3
"""Perplexity cost of a narrower host tier: text after a prefix that was loaded from the host.

    python -m scripts.accuracy.host_layout [--json docs/benchmarks/host_layout_cpu.json]

The demo's model is served once per pair of layouts (device, host). Each server gets the first half of
every held-out window, which the device pool is too small to keep, and then, window by window, a request for
the log-probabilities of the second half: SGLang finds the first half in the host tier, and every byte is
predicted from rows that were loaded from the host. For comparison, each narrow layout is also served on the
device.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.bench.sweep import line
from scripts.kit.outputs import Report, commit, require_writable
from sgl_kvpool import env
from sgl_kvpool.demo.measure import Scores, compare_scores
from sgl_kvpool.demo.model import Window, held_out_windows, model_path
from sgl_kvpool.demo.server import Server, cpu_arguments, free_port
from sgl_kvpool.transfer.host_options import HOST_LAYOUTS, SAME

PAIRS = [("bf16", host) for host in HOST_LAYOUTS] + [(device, SAME) for device in HOST_LAYOUTS[1:]]
DEVICE_TOKENS, PAGE_SIZE, PREFIX_TOKENS = 2048, 64, 512


def ask(server: Server, window: Window) -> tuple[list[float], list[int], int]:
    """Log-probabilities and best tokens of a window's second half, and number of tokens found on the host."""
    (answer,) = server.generate(
        input_ids=[window.token_ids],
        sampling_params={"temperature": 0, "max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=PREFIX_TOKENS,
        top_logprobs_num=1,
    )
    found = answer["meta_info"]
    tokens = found["input_token_logprobs"]
    # The first token, which the prefix's last row would predict, has no log-probability.
    if [token[1] for token in tokens[1:]] != window.token_ids[PREFIX_TOKENS + 1 :]:
        raise ValueError("the server scored other tokens than were sent")
    top = [best[0][1] for best in found["input_top_logprobs"][1:]]
    return [token[0] for token in tokens[1:]], top, (found["cached_tokens_details"] or {}).get("host", 0)


def measure(device: str, host: str, windows: list[Window], log: Path) -> tuple[dict[str, Any], Scores]:
    """Serve one pair of layouts and ask for all windows."""
    arguments = [
        *cpu_arguments(model_path(), free_port(), max_total_tokens=DEVICE_TOKENS),
        *("--kv-cache-layout", device, "--kv-host-layout", host, "--page-size", str(PAGE_SIZE)),
        *("--enable-hierarchical-cache", "--hicache-ratio", "16", "--enable-cache-report"),
        *("--random-seed", "0"),
    ]
    sampling = {"temperature": 0, "max_new_tokens": 1}
    with Server(arguments, log, {env.PREFILL_READS_ROWS: "1"}) as server:
        for window in windows:
            server.generate(input_ids=[window.token_ids[:PREFIX_TOKENS]], sampling_params=sampling)
        # Each window evicts an earlier one; the last windows may still be on the device.
        answers = [ask(server, window) for window in windows]
        info = server.info()
    log_probabilities, top_tokens, hits = (list(column) for column in zip(*answers, strict=True))
    scores = Scores(log_probabilities, top_tokens)
    row = {
        "job": {"device_layout": info["kv_cache_layout"], "host_layout": info["kv_host_layout"]},
        "status": "measured",
        "windows": len(windows),
        "scored_tokens": sum(map(len, scores.log_probabilities)),
        "host_hit_tokens": sum(hits),
        "windows_without_a_hit": sum(hit < PREFIX_TOKENS - PAGE_SIZE for hit in hits),
        "perplexity": scores.perplexity,
    }
    return row, scores


def main() -> int:
    """Measure, print, write; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    require_writable(parser, arguments.json)
    facts = {"script": "scripts.accuracy.host_layout", "schema": 2, "commit": commit()}
    facts |= {"prefix_tokens": PREFIX_TOKENS, "page_size_tokens": PAGE_SIZE}
    report, reference = Report(arguments.json, facts), None
    with tempfile.TemporaryDirectory() as folder:
        for device, host in PAIRS:
            row, scores = measure(device, host, held_out_windows(), Path(folder) / f"{device}-{host}.log")
            reference = reference or scores
            row["difference"] = vars(compare_scores(scores, reference))
            report.add(row)
            print(line(row), flush=True)
    # A prefix that was recomputed or found on the device does not test the host's rows.
    missed = [row["job"] for row in report.rows if row["windows_without_a_hit"] > 4]
    if missed:
        print(f"too few hits in the host tier: {missed}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
