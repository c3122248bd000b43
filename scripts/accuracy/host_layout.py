#!/usr/bin/env python3
"""Perplexity cost of a narrower host tier: text after a prefix that was loaded from the host.

    python -m scripts.accuracy.host_layout [--quick] [--json PATH]

The demo's model is served once per pair of layouts (device, host). Each server gets the first half of
every held-out window, which the device pool is too small to keep, and then, window by window, a request for
the log-probabilities of the second half: SGLang finds the first half in the host tier, and every byte is
predicted from rows that were loaded from the host. For comparison, each narrow layout is also served on the
device.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
import tempfile
from pathlib import Path

import torch

from sgl_kvpool import env
from sgl_kvpool.demo.measure import Scores, compare_scores
from sgl_kvpool.demo.model import Window, held_out_windows, model_path
from sgl_kvpool.demo.server import Server, cpu_arguments, free_port
from sgl_kvpool.transfer.host_options import HOST_LAYOUTS, SAME

SCHEMA = 1
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


def measure(device: str, host: str, windows: list[Window], log: Path) -> tuple[dict, Scores]:
    """Serve one pair of layouts and ask for all windows."""
    arguments = [
        *cpu_arguments(model_path(), free_port(), max_total_tokens=DEVICE_TOKENS),
        *("--kv-cache-layout", device, "--kv-host-layout", host, "--page-size", str(PAGE_SIZE)),
        *("--enable-hierarchical-cache", "--hicache-ratio", "16", "--enable-cache-report"),
        *("--random-seed", "0"),
    ]
    with Server(arguments, log, {env.PREFILL_READS_ROWS: "1"}) as server:
        for window in windows:
            server.generate(
                input_ids=[window.token_ids[:PREFIX_TOKENS]],
                sampling_params={"temperature": 0, "max_new_tokens": 1},
            )
        # Each window evicts an earlier one; the last windows may still be on the device.
        answers = [ask(server, window) for window in windows]
        info = server.info()
    hits = [answer[2] for answer in answers]
    log_probabilities, top_tokens, _ = (list(column) for column in zip(*answers, strict=True))
    scores = Scores(log_probabilities, top_tokens)
    row = {
        "device_layout": info["kv_cache_layout"],
        "host_layout": info["kv_host_layout"],
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
    parser.add_argument("--quick", action="store_true", help="8 windows instead of all")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.touch()  # fails before the measurement
    windows = held_out_windows()[: 8 if arguments.quick else None]

    results = []
    reference = None
    print(
        f"{'device':16} {'host':16} {'host hits':>10} {'perplexity':>11} {'change':>9} {'+-':>8} "
        f"{'same top':>9}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for device, host in PAIRS:
            row, scores = measure(device, host, windows, Path(folder) / f"{device}-{host}.log")
            reference = reference or scores
            difference = compare_scores(scores, reference)
            results.append({**row, "difference": dataclasses.asdict(difference)})
            print(
                f"{row['device_layout']:16} {row['host_layout']:16} {row['host_hit_tokens']:10} "
                f"{row['perplexity']:11.4f} {difference.perplexity_change:+9.3%} "
                f"{difference.standard_error:8.3%} {difference.same_top_token:9.2%}",
                flush=True,
            )
    if arguments.json:
        report = {
            "schema": SCHEMA,
            "script": "scripts/accuracy/host_layout.py",
            "machine": platform.machine(),
            "torch": torch.__version__,
            "prefix_tokens": PREFIX_TOKENS,
            "page_size_tokens": PAGE_SIZE,
            "results": results,
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    # A prefix that was recomputed or found on the device does not test the host's rows.
    missed = [
        f"{row['device_layout']}/{row['host_layout']}" for row in results if row["windows_without_a_hit"] > 4
    ]
    if missed:
        print(f"too few hits in the host tier: {', '.join(missed)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
