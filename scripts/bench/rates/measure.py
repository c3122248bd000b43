"""Micro-benchmarks of a Hopper GPU: rates per SM clock of the operations of decode attention.

* instructions that decode rows: lanes per clock and SM, alone and alternating with others; and whole decoders
  of e2m1 and e4m3, the present ones and alternatives, in values per clock and SM;
* wgmma of 8, 16 and 32 columns with A in registers or in shared memory: SM clocks per wgmma, with the wgmma
  of all warp groups counted;
* whether products use the exact values of bf16 subnormals;
* gathers of rows from memory by one bulk copy per row, by copies or by loads of 16 bytes: bytes per second.

Needs torch and nvcc, but neither Triton nor SGLang. The benchmark has not run on a GPU yet, where it should
take about half a minute; on an emulator its kernels give the expected results
(tests/ptxrun/test_ptx_rates.py).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from scripts.bench.attention.device import CudaDevice
from scripts.bench.rates.library import OPERATIONS, Library, compile_library
from scripts.bench.sweep import Benchmark
from sgl_kvpool.layout import MLAKVCacheLayout

__all__ = ["KINDS", "Measurer", "Rates", "jobs"]

#: Places of the operands of a product, in the order of kernels.cu's `Kind`.
KINDS = ("A in registers", "A in shared memory", "A in shared memory, transposed")
#: Ways of gathering rows, in the order of kernels.cu's `How`.
HOWS = ("one bulk copy per row", "cp.async of 16 bytes", "loads of 16 bytes")
#: Order of the row numbers: ascending; pages of 64 in random order, as a context; random rows, as top-k.
ORDERS = ("in order", "pages", "any order")
PAGE_ROWS = 64
#: Widths of DeepSeek's rows in all layouts; kernels.cu has a kernel for each.
ROW_BYTES = tuple(sorted(layout.row_format(512, 64).row_bytes for layout in MLAKVCacheLayout))
#: Programs per SM, of one warp each, by index in `HOWS`. Copies in flight take shared memory; loads in flight
#: take registers, so they need more warps.
PER_SM = {0: (1, 2, 4), 1: (1, 2, 4), 2: (8, 32)}
_SM_SHARED_BYTES = 227 << 10
#: K of a round of 16 wgmma.
_K = 256


def _shared_bytes(row_bytes: int, how: int) -> int:
    """Shared memory of one program of `gather`: four stages of 32 rows."""
    return 0 if how == 2 else 4 * 32 * (-(-row_bytes // 32) * 32 + 16)


def jobs() -> list[dict[str, Any]]:
    """All measurements, most important first."""
    products = [
        {"what": "products", "n": n, "kind": kind, "sums": sums, "warp_groups": groups}
        for sums, groups, n, kind in itertools.product((1, 2), (1, 2), (16, 8, 32), range(len(KINDS)))
    ]
    gathers = [
        {"what": "gather", "row_bytes": row_bytes, "how": how, "order": order, "per_sm": per_sm}
        for row_bytes, how, order in itertools.product(ROW_BYTES, range(len(HOWS)), range(len(ORDERS)))
        for per_sm in PER_SM[how]
        if per_sm * _shared_bytes(row_bytes, how) <= _SM_SHARED_BYTES
    ]
    return [
        {"what": "peaks"},
        *({"what": "instructions", "op": op} for op in range(len(OPERATIONS))),
        {"what": "subnormals"},
        *products,
        *gathers,
    ]


class Measurer:
    """Measurements on the current GPU.

    `rounds`, `threads`, `pool_bytes`: Repetitions of a block's instructions, threads per block, and size of
      the pool from which rows are gathered: far larger than the L2 cache. An emulator uses smaller values.
    """

    def __init__(
        self,
        library: Library,
        device: Any,
        *,
        rounds: int = 500,
        threads: int = 512,
        pool_bytes: int = 2 << 30,
    ) -> None:
        self.library, self.device = library, device
        self._rounds, self._threads, self._pool_bytes = rounds, threads, pool_bytes
        self._pool: tuple[int, torch.Tensor] | None = None

    def measure(self, job: dict[str, Any]) -> dict[str, Any]:
        """Result of a job of `jobs`."""
        arguments = {name: value for name, value in job.items() if name != "what"}
        if job["what"] == "peaks":
            return self.device.peaks()
        return getattr(self, f"_{job['what']}")(**arguments)

    def _instructions(self, op: int) -> dict[str, Any]:
        blocks = self.device.sm_count
        out = self._new(torch.int32, blocks * self._threads)
        clocks = self._new(torch.int64, blocks)

        def call(rounds: int) -> None:
            self.library.instructions(op, out, clocks, rounds, blocks, self._threads)

        name, per_round, of = OPERATIONS[op]
        per_clock = self._threads * per_round / self._clocks_per_round(call, clocks)
        return {"name": name, f"{of}_per_clock_and_sm": round(per_clock, 2)}

    def _products(self, n: int, kind: int, sums: int, warp_groups: int) -> dict[str, Any]:
        blocks = self.device.sm_count
        operands = torch.randn((warp_groups + 1) * 64 * _K, device=self.device.device).bfloat16()
        out = self._new(torch.float32, blocks * 128 * warp_groups * (n // 2))
        clocks = self._new(torch.int64, blocks)

        def call(rounds: int) -> None:
            self.library.products(n, kind, sums, operands, out, clocks, rounds, blocks, warp_groups)

        per_round = self._clocks_per_round(call, clocks)
        return {
            "name": f"m64n{n}k16, {KINDS[kind]}",
            "clocks_per_product_of_the_sm": round(per_round / (16 * warp_groups), 2),
        }

    def _subnormals(self) -> dict[str, Any]:
        """Whether products use the exact values of bf16 below 2**-126; decoded e4m3 then needs no scaling."""
        n, tiny, large = 16, 2.0**-130, 2.0**100
        # A and B; swizzling has no effect, because all values of A are equal, and all values of B.
        operands = torch.cat([torch.full((64 * _K,), x).bfloat16() for x in (tiny, large)])
        operands = operands.to(self.device.device)
        found = {}
        for kind, name in enumerate(KINDS[:2]):
            out, clocks = self._new(torch.float32, 128 * n // 2), self._new(torch.int64, 1)
            out.fill_(float("nan"))
            self.library.products(n, kind, 1, operands, out, clocks, 1, 1, 1)
            found[name] = bool((out == _K * tiny * large).all())
        return {"name": "bf16 subnormals are multiplied at their value", **found}

    def _gather(self, row_bytes: int, how: int, order: int, per_sm: int) -> dict[str, Any]:
        pool = self._pool_of(row_bytes)
        blocks = self.device.sm_count * per_sm
        rows = len(pool) // (blocks * 32) * (blocks * 32)
        out = self._new(torch.int32, blocks * 32)
        ids = self._order(order, len(pool))[:rows].int()

        def call() -> torch.Tensor:
            self.library.gather(row_bytes, how, pool, ids, rows, out, blocks)
            return out

        call()
        us = self.device.median_us([call])
        return {
            "name": f"rows of {row_bytes} bytes, {ORDERS[order]}, {HOWS[how]}, {per_sm} programs per SM",
            "us": round(us, 1),
            "gb_per_s": round(rows * row_bytes / us / 1e3, 1),
        }

    def _order(self, order: int, count: int) -> torch.Tensor:
        where = self.device.device
        generator = torch.Generator(device=where).manual_seed(order)
        if order == 0:
            return torch.arange(count, device=where)
        if order == 2:
            return torch.randperm(count, generator=generator, device=where)
        pages = torch.randperm(count // PAGE_ROWS, generator=generator, device=where)
        return (pages[:, None] * PAGE_ROWS + torch.arange(PAGE_ROWS, device=where)).flatten()

    def _pool_of(self, row_bytes: int) -> torch.Tensor:
        """A pool of random rows, far larger than the L2 cache; kept for the next job."""
        if self._pool is None or self._pool[0] != row_bytes:
            self._pool = None
            count = self._pool_bytes // row_bytes // PAGE_ROWS * PAGE_ROWS
            memory = torch.randint(
                -(2**31), 2**31, (count, row_bytes // 4), dtype=torch.int32, device=self.device.device
            )
            self._pool = row_bytes, memory
        return self._pool[1]

    def _clocks_per_round(self, call: Callable[[int], None], clocks: torch.Tensor) -> float:
        """Median clocks per round over SMs and launches, without the constant cost of a launch."""
        few, many = -(-self._rounds // 10), self._rounds
        call(few)  # load the kernel

        def median(rounds: int) -> float:
            times = []
            for _ in range(5):
                clocks.zero_()
                call(rounds)
                times += clocks.tolist()
            return statistics.median(times)

        return (median(many) - median(few)) / (many - few)

    def _new(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device=self.device.device)


class Rates(Benchmark):
    """Every operation, product and gather."""

    schema = 2
    devices = ("cuda",)
    case_limit_s = 20.0

    def prepare(self, folder: Path) -> None:
        compile_library(folder)

    def start(self, folder: Path) -> dict[str, Any]:
        device = CudaDevice(seconds_per_timing=0.05, min_rounds=5)
        self._measurer = Measurer(Library(folder / "librates.so"), device)
        return device.facts()

    def cases(self, machine: dict[str, Any]) -> list[dict[str, Any]]:
        return jobs()

    def measure(self, case: dict[str, Any]) -> dict[str, Any]:
        return self._measurer.measure(case)
