"""Choice of a host tier's transfer engine, by the tier's options and rates that are measured at start."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sgl_kvpool.transfer.gpu_engine import CopyJob, RegisteredChunks
from sgl_kvpool.transfer.plan import CopyRun

#: Share of the link's rate that the copy engine has to reach with a server's runs to be chosen.
_WORTH = 0.95
#: Run sizes that are measured, and the size of the long copy whose rate stands for the link's.
_RUN_BYTES = tuple(1 << n for n in range(13, 21))
_LONGEST_BYTES = 64 << 20
_COPIES = 2048
_ROUNDS = 3


@dataclass(frozen=True)
class LinkRates:
    """Rates of the copy engine between a GPU and pinned memory in one direction.

    `link_gb_per_s` is that of one long copy, in 1e9 bytes per second, and `gb_per_s` those of scattered runs
    by run size in bytes.
    """

    link_gb_per_s: float
    gb_per_s: Mapping[int, float]

    @property
    def crossover_bytes(self) -> int | None:
        """Smallest measured run size from which on every size reaches 95 % of the link's rate, or None."""
        shortest = None
        for run_bytes in sorted(self.gb_per_s, reverse=True):
            if self.gb_per_s[run_bytes] < _WORTH * self.link_gb_per_s:
                break
            shortest = run_bytes
        return shortest


def choose(
    requested: str,
    *,
    run_bytes: int,
    converts: bool,
    io_backend: str,
    is_pinned: bool,
    rates: LinkRates | None,
) -> tuple[str, str]:
    """Engine of one direction, and the reason for it; `run_bytes` is the shortest run of a page."""
    if not is_pinned:
        return "torch", "the host tier is not pinned"
    if requested != "auto":
        return requested, "requested"
    if converts:
        return "staged", "rows change their layout on the way"
    if io_backend != "direct":
        # The copy engine needs page indices on the CPU; with `direct`, SGLang has already waited for them.
        return "staged", f"page indices stay on the GPU with io backend {io_backend}"
    crossover = None if rates is None else rates.crossover_bytes
    if crossover is not None and run_bytes >= crossover:
        return "copy_engine", f"runs of {run_bytes} bytes; the link is saturated from {crossover} on"
    if crossover is None:
        return "staged", f"runs of {run_bytes} bytes; no measured run size reaches 95 % of the link"
    return "staged", f"runs of {run_bytes} bytes; the link needs at least {crossover}"


def measure(
    calls: Any, host: torch.Tensor, chunks: RegisteredChunks, device: torch.device
) -> dict[str, LinkRates]:
    """Measure the rates of the copy engine in both directions, "to_host" and "to_device" (0.3 s).

    `host` is pinned memory of a tier that is still unused; its beginning is overwritten.
    """
    flat = host.view(-1)
    size_bytes = min(_LONGEST_BYTES, flat.nbytes)
    if chunks.chunk_bytes:
        size_bytes = min(size_bytes, chunks.chunk_bytes)
    scratch = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # which clears the scratch memory
    found = {}
    for direction in ("to_host", "to_device"):
        ends = (scratch, flat) if direction == "to_host" else (flat, scratch)

        def rate(run_bytes: int, copies: int, ends: Any = ends, direction: str = direction) -> float:
            run = CopyRun(
                source_address=ends[0].data_ptr(), target_address=ends[1].data_ptr(),
                source_page_stride=run_bytes, target_page_stride=run_bytes, run_bytes=run_bytes,
            )  # fmt: skip
            return _timed(calls, CopyJob([run], chunks), copies, run_bytes, direction == "to_device", stream)

        link = rate(size_bytes, 1)
        tried = {n: rate(n, min(_COPIES, size_bytes // n)) for n in _RUN_BYTES if n <= size_bytes}
        found[direction] = LinkRates(link, tried)
    del scratch
    torch.cuda.empty_cache()  # return the 64 MB block to the device
    return found


def _timed(
    calls: Any, job: CopyJob, copies: int, run_bytes: int, to_device: bool, stream: torch.cuda.Stream
) -> float:
    """Median of the rate in 1e9 bytes per second."""
    pages = np.random.default_rng(0).permutation(copies).astype(np.int64)
    rates = []
    for _ in range(_ROUNDS + 1):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            began.record()
            calls.copy_pages(
                job.address, pages.ctypes.data, pages.ctypes.data, copies, int(to_device), stream.cuda_stream
            )
            ended.record()
        ended.synchronize()
        rates.append(copies * run_bytes / began.elapsed_time(ended) / 1e6)
    return statistics.median(rates[1:])
