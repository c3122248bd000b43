#!/usr/bin/env python3
"""Copy pages between the byte views of all arrangements on a device, and check every byte.

    python -m regression.canonical --device cuda|cpu --out FOLDER

The expected places of bytes are computed from axes in numpy, independently of the package. Needs only torch
and numpy.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from regression.records import Measurement, write_measurements
from sgl_kvpool import KVArrangement, MLAKVCacheLayout
from sgl_kvpool.memory.allocation import allocate_cross_layer, as_canonical
from sgl_kvpool.memory.canonical import (
    CanonicalGroup,
    CanonicalKVCaches,
    LayerReference,
    TensorList,
    byte_pages,
)
from sgl_kvpool.memory.cross_layer import LayerPages
from sgl_kvpool.memory.page_copy import copy_pages
from sgl_kvpool.memory.runs import PageRuns

LAYERS, PAGES, PAGE_SIZE = 5, 23, 64
#: Axes of memory from the outermost: pages B, layers L, tokens X, bytes of a row C.
ORDERS = {"layer_major": "LBXC", "token_major": "BXLC", "page_major": "BLXC"}
AXES = "LBXC"


def contents(row_bytes: int, seed: int) -> np.ndarray:
    """Bytes [layer, page, token, byte of the row]."""
    shape = (LAYERS, PAGES, PAGE_SIZE, row_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def in_memory(values: np.ndarray, order: str) -> np.ndarray:
    """The same bytes in the memory order of an arrangement, flat."""
    return np.ascontiguousarray(values.transpose([AXES.index(axis) for axis in ORDERS[order]])).reshape(-1)


def from_memory(flat: np.ndarray, order: str, row_bytes: int) -> np.ndarray:
    """The inverse of `in_memory`."""
    sizes = {"L": LAYERS, "B": PAGES, "X": PAGE_SIZE, "C": row_bytes}
    stored = flat.reshape([sizes[axis] for axis in ORDERS[order]])
    return stored.transpose([ORDERS[order].index(axis) for axis in AXES])


class Pool:
    """Memory of one arrangement and its byte view."""

    def __init__(self, order: str, row_bytes: int, device: str):
        page_bytes = PAGE_SIZE * row_bytes
        self.order, self.row_bytes = order, row_bytes
        self.memory: list[torch.Tensor]
        if KVArrangement(order).has_contiguous_layers:
            tensors = TensorList()
            self.memory = [
                torch.zeros(PAGES, page_bytes, dtype=torch.uint8, device=device) for _ in range(LAYERS)
            ]
            layers = tuple(
                LayerReference(
                    layer_id=layer,
                    part="kv",
                    runs=PageRuns(
                        tensor_index=tensors.add(byte_pages(memory, 1, "kv")),
                        offset_bytes=0,
                        run_bytes=page_bytes,
                    ),
                    content="bytes",
                )
                for layer, memory in enumerate(self.memory)
            )
            group = CanonicalGroup(name="kv", layers=layers, num_pages=PAGES, page_size_tokens=PAGE_SIZE)
            self.caches = CanonicalKVCaches(tuple(tensors.tensors), (group,))
            return
        members = [
            LayerPages(
                name=layer, page_bytes=page_bytes, backend="x", page_size_tokens=PAGE_SIZE, content="bytes"
            )
            for layer in range(LAYERS)
        ]
        groups = allocate_cross_layer([members], pages=PAGES, arrangement=order, device=device)
        self.memory = [groups[0].tensor.view(-1).view(torch.uint8)]
        self.caches = as_canonical(groups, ["kv"])

    def fill(self, values: np.ndarray) -> None:
        flat = torch.from_numpy(in_memory(values, self.order))
        for memory, part in zip(self.memory, flat.chunk(len(self.memory)), strict=True):
            memory.view(-1).copy_(part)

    def read(self) -> np.ndarray:
        flat = torch.cat([memory.view(-1).cpu() for memory in self.memory]).numpy()
        return from_memory(flat, self.order, self.row_bytes)


def wrong_bytes(source: Pool, target: Pool, device: str) -> int:
    """Number of wrong bytes after half of the pages, in random order, were copied to random pages."""
    there, here = contents(source.row_bytes, 1), contents(source.row_bytes, 2)
    source.fill(there)
    target.fill(here)
    order = np.random.default_rng(3)
    sources, targets = (order.permutation(PAGES)[: PAGES // 2] for _ in range(2))
    expected = here.copy()
    expected[:, targets] = there[:, sources]
    pages = [torch.from_numpy(numbers).to(device) for numbers in (sources, targets)]
    copy_pages(source.caches, target.caches, "kv", *pages)
    return int((target.read() != expected).sum()) + int((source.read() != there).sum())


def copy_ratio(source: Pool, target: Pool, device: str) -> float:
    """Median time of copying all pages divided by that of one contiguous copy of as many bytes."""
    pages = torch.arange(PAGES, device=device)
    flat = torch.zeros(LAYERS * PAGES * PAGE_SIZE * source.row_bytes, dtype=torch.uint8, device=device)
    other = torch.zeros_like(flat)

    def seconds(call) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    rounds = [
        (
            seconds(lambda: copy_pages(source.caches, target.caches, "kv", pages, pages)),
            seconds(lambda: other.copy_(flat)),
        )
        for _ in range(12)
    ][2:]
    ours, peer = (statistics.median(column) for column in zip(*rounds, strict=True))
    return ours / peer


def main() -> int:
    """Check, measure, write; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    device = arguments.device
    total = 0
    for layout in MLAKVCacheLayout:
        row_bytes = layout.row_format(512, 64).row_bytes
        for first in ORDERS:
            for second in ORDERS:
                source, target = (Pool(order, row_bytes, device) for order in (first, second))
                wrong = wrong_bytes(source, target, device)
                total += wrong
                what = f"{layout.value}, {first} to {second}"
                print(f"{what}: {wrong} wrong bytes", flush=True)
                found = [Measurement(f"{what}: wrong bytes", wrong, "bytes", "count", "lower", at_most=0)]
                if second == "page_major":
                    ratio = copy_ratio(source, target, device)
                    name = f"{what}: time of a torch copy of all pages, ratio to one contiguous copy"
                    # Launches dominate at this size, so the number is reported but not compared.
                    found.append(Measurement(name, round(ratio, 3), "x", "fact", "lower"))
                write_measurements(arguments.out, [replace(one, layout=layout.value) for one in found])
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
