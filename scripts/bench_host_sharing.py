#!/usr/bin/env python3
"""Cost of a host tier that ranks share: storing and loading pages, and the digest in every step.

    python scripts/bench_host_sharing.py [--pages 1024] [--rounds 8] [--json PATH]

Two processes on this machine's CPU act as the ranks of a server with `--tp-size 2`: pools of 61 layers of
`fp4` rows with one tier per rank, and with one tier that both share. Each round measures in turn: rank 0
alone, both ranks with tiers of their own, both with the shared tier. A time is that of the slowest rank after
a barrier. The limit is torch's copy of as many contiguous bytes by both ranks at once. The collective of
SGLang's tree is timed with and without the ranks' digest.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sgl_kvpool.commands.bench.outputs import machine, replace_file, require_writable

SCHEMA = 1
RANKS, LAYERS, PAGE_SIZE = 2, 61, 64
#: Collectives per timing, and the number of values in SGLang's collective with a store.
COLLECTIVES, NUMBERS = 200, 8
#: Number of copies that form the contiguous copy; a single one would need twice the pool's bytes per rank.
COPIES = 4


def device_pool(pages: int) -> Any:
    """Device pool of one rank."""
    from sgl_kvpool.srt.pool import LayoutMLATokenToKVPool

    return LayoutMLATokenToKVPool(
        size=pages * PAGE_SIZE,
        page_size=PAGE_SIZE,
        dtype=torch.bfloat16,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
        kv_cache_layout="fp4",
    )


def timed(call: Callable[[], object]) -> float:
    """Seconds of the slowest rank after a barrier; every rank must call it."""
    dist.barrier()
    began = time.perf_counter()
    call()
    took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def run(rank: int, folder: str, pages: int, rounds: int, results: Any) -> None:
    """Body of one rank; rank 0 sends the results."""
    from sglang.srt.mem_cache.pool_host import base
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    from sgl_kvpool.srt.host.node_ranks import NodeRanks
    from sgl_kvpool.srt.host.rows import HierarchicalMLAHostPool

    torch.set_num_threads(1)
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    meet = dist.FileStore(f"{folder}/meet", RANKS)
    dist.init_process_group("gloo", store=meet, rank=rank, world_size=RANKS)
    publish(ServerArgs(model_path="dummy", device="cpu"), role="scheduler", ranks=SpawnRanks(0, None, 0))
    ranks = NodeRanks.of(dist.group.WORLD)
    pool = device_pool(pages)
    for layer in pool.kv_buffer:
        layer.view(torch.uint8).fill_(1)
    # With a ratio of 0.5 per rank, the shared tier has the size of the pool and takes the memory of one
    # rank's tier.
    tiers = {
        "alone": HierarchicalMLAHostPool(pool, 1.0, 0, PAGE_SIZE, "page_first"),
        "shared": HierarchicalMLAHostPool(pool, 1.0 / RANKS, 0, PAGE_SIZE, "page_first", node_ranks=ranks),
    }
    slots = torch.arange(PAGE_SIZE, (pages + 1) * PAGE_SIZE)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(pages, generator=generator)
    slots = slots.view(pages, PAGE_SIZE)[order].reshape(-1)
    kept = {name: tier.alloc(pages * PAGE_SIZE) for name, tier in tiers.items()}

    def store(name: str) -> None:
        tiers[name].backup_from_device_all_layer(pool, kept[name], slots, "kernel")

    def load(name: str) -> None:
        for layer in range(LAYERS):
            tiers[name].load_to_device_per_layer(pool, kept[name], slots, layer, "kernel")

    page_bytes = PAGE_SIZE * LAYERS * pool.row_format.row_bytes
    contiguous = torch.ones(2, pages * page_bytes // COPIES, dtype=torch.uint8)

    def copy() -> None:
        for _ in range(COPIES):
            contiguous[1].copy_(contiguous[0])

    numbers = torch.zeros(NUMBERS, dtype=torch.int64)

    def minimum(data: torch.Tensor) -> None:
        dist.all_reduce(data, op=dist.ReduceOp.MIN)

    def nothing() -> None:
        pass

    times: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        calls: dict[str, Callable[[], object]] = {"copy": copy}
        for what, move in (("store", store), ("load", load)):
            calls[f"{what}_by_one"] = (lambda m=move: m("alone")) if rank == 0 else nothing
            calls[f"{what}_apart"] = lambda m=move: m("alone")
            calls[f"{what}_shared"] = lambda m=move: m("shared")
        calls["collective"] = lambda: [minimum(numbers) for _ in range(COLLECTIVES)]
        calls["collective_with_digest"] = lambda: [
            tiers["shared"].shared.compare_in(numbers, minimum) for _ in range(COLLECTIVES)
        ]
        for name, call in calls.items():
            took = timed(call)
            if number:  # the first round warms up and does not count
                times.setdefault(name, []).append(took)
    if rank == 0:
        own, _ = tiers["shared"].shared.own_part(torch.arange(pages).numpy(), torch.arange(pages).numpy())
        median = {name: statistics.median(found) for name, found in times.items()}
        results.put(
            {
                "pages": pages,
                "page_bytes": page_bytes,
                "stored_bytes_per_page_and_rank": page_bytes * len(own) / pages,
                "tier_tokens": {name: tier.size for name, tier in tiers.items()},
                "tier_bytes_per_rank": {
                    "alone": tiers["alone"].kv_buffer.nbytes,
                    "shared": tiers["shared"].kv_buffer.nbytes // RANKS,
                },
                "seconds": {name: round(median[name], 5) for name in median if "collective" not in name},
                "shared_of_apart": of_peer(times, "apart"),
                "shared_of_one": of_peer(times, "by_one"),
                "step_us": {
                    name: round(median[name] / COLLECTIVES * 1e6, 1)
                    for name in ("collective", "collective_with_digest")
                },
            }
        )
    dist.barrier()
    dist.destroy_process_group()


def of_peer(times: dict[str, list[float]], peer: str) -> dict[str, float]:
    """Median over rounds of the shared tier's time divided by a peer's, by operation."""
    return {
        what: round(
            statistics.median(
                a / b for a, b in zip(times[f"{what}_shared"], times[f"{what}_{peer}"], strict=True)
            ),
            3,
        )
        for what in ("store", "load")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pages", type=int, default=1024, help="pages of a transfer, and of the pool (1024)")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of all measurements (8)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    if options.pages < RANKS or options.rounds < 1:
        parser.error(
            f"--pages {options.pages} --rounds {options.rounds}: give at least {RANKS} pages and 1 round"
        )
    require_writable(parser, options.json)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=run, args=(rank, folder, options.pages, options.rounds, results))
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit("a rank failed, see above")
    found = results.get(timeout=10)
    for name, value in found.items():
        print(f"{name:32} {value}")
    if options.json:
        replace_file(
            options.json,
            json.dumps({"schema": SCHEMA, "machine": machine(), "sharing": found}, indent=1) + "\n",
        )


if __name__ == "__main__":
    main()
