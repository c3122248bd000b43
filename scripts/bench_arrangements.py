#!/usr/bin/env python3
"""Effect of an arrangement on a reader of one layer, and on a copy of whole pages.

    python scripts/bench_arrangements.py [--quick] [--device cpu|cuda] [--json PATH]

The same rows of 61 layers are stored layer-major, token-major and page-major. One run measures in turn:

* decoding half of the rows of one layer in random order (`gather_rows`), as a ratio to layer-major: rows of a
  layer are further apart in the other two, so that fewer of them share a page of virtual memory;
* collecting scattered pages of all layers into one buffer with torch, as a ratio to layer-major, where a page
  is 61 runs of bytes instead of one. The limit beside it is one contiguous copy of as many bytes.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import torch

from sgl_kvpool import KVArrangement, MLAKVCacheLayout
from sgl_kvpool.codec import gather_rows
from sgl_kvpool.memory.arrangement import RowPlacement

SCHEMA = 1
LAYERS, PAGE_SIZE = 61, 64


def microseconds(call, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e6


def measure(layout: MLAKVCacheLayout, *, pages: int, moved: int, rounds: int, device: str):
    """Medians of one layout in every arrangement, microseconds."""
    fmt = layout.row_format(512, 64)
    generator = torch.Generator().manual_seed(0)
    slots = torch.randperm(pages * PAGE_SIZE, generator=generator)[: pages * PAGE_SIZE // 2].to(device)
    chosen = torch.randperm(pages, generator=generator)[:moved].to(device)
    out = torch.empty(len(slots), fmt.head_dim, dtype=torch.bfloat16, device=device)
    page_bytes = LAYERS * PAGE_SIZE * fmt.row_bytes
    collected = torch.empty(moved, page_bytes, dtype=torch.uint8, device=device)

    calls = {}
    for arrangement in KVArrangement.of_rows():
        placement = RowPlacement(arrangement, LAYERS, pages, PAGE_SIZE, fmt.row_bytes)
        buffer = torch.zeros(placement.total_bytes, dtype=torch.uint8, device=device)
        layer, rows = placement.layer_view(buffer, LAYERS // 2), placement.slot_to_row(slots)
        calls[f"decode {arrangement}"] = lambda layer=layer, rows=rows: gather_rows(layer, rows, fmt, out=out)
        if not arrangement.has_contiguous_layers:
            by_page = buffer.view(pages, page_bytes)
            calls[f"pages {arrangement}"] = lambda b=by_page: torch.index_select(b, 0, chosen, out=collected)
        else:
            per_layer = list(buffer.view(LAYERS, pages, -1))
            parts = list(collected.view(LAYERS, moved, -1))
            calls[f"pages {arrangement}"] = lambda p=per_layer, c=parts: [
                torch.index_select(source, 0, chosen, out=target) for source, target in zip(p, c, strict=True)
            ]
    whole = torch.zeros_like(collected)
    calls["copy"] = lambda: collected.copy_(whole)

    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(microseconds(call, device))
    medians = {name: statistics.median(values) for name, values in times.items()}
    row = {"layout": layout.value, "pool_pages": pages, "decoded_rows": len(slots), "moved_pages": moved}
    for kind in ("decode", "pages"):
        base = medians[f"{kind} layer_major"]
        found = {str(a): medians[f"{kind} {a}"] for a in KVArrangement.of_rows()}
        row[kind] = {
            name: {"us": round(median, 1), "to_layer_major": round(median / base, 3)}
            for name, median in found.items()
        }
    row["runs_of_bytes_per_page"] = {
        str(a): LAYERS if a.has_contiguous_layers else 1 for a in KVArrangement.of_rows()
    }
    row["contiguous_copy_us"] = round(medians["copy"], 1)
    return row


def main() -> int:
    """Measure, print, write; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer pages and rounds")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.touch()  # fails before the measurement
    size = (
        {"pages": 16, "moved": 4, "rounds": 5}
        if arguments.quick
        else {"pages": 64, "moved": 16, "rounds": 25}
    )
    if arguments.device == "cuda" and not arguments.quick:
        size = {"pages": 2048, "moved": 256, "rounds": 50}

    results = []
    print(f"{'to layer_major':16} {'reader: token':>14} {'page':>6}   {'pages: token':>13} {'page':>6}")
    for layout in MLAKVCacheLayout:
        row = measure(layout, device=arguments.device, **size)
        results.append(row)
        shown = [row[kind][name]["to_layer_major"] for kind in ("decode", "pages")
                 for name in ("token_major", "page_major")]  # fmt: skip
        print(
            f"{layout.value:16} {shown[0]:14.2f} {shown[1]:6.2f}   {shown[2]:13.2f} {shown[3]:6.2f}",
            flush=True,
        )
    if arguments.json:
        report = {
            "schema": SCHEMA,
            "script": "scripts/bench_arrangements.py",
            "machine": platform.machine(),
            "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "layers": LAYERS,
            "page_size_tokens": PAGE_SIZE,
            "results": results,
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
