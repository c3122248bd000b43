"""Time of one call: on a GPU between two events, without its launches; on a CPU by the clock."""

import time
from collections.abc import Callable

import torch

#: Cycles that a GPU waits before its clock starts, some 0.5 ms. All launches of a call must be in the queue
#: by then: Triton's launch alone takes tens of microseconds, and a later launch would be timed as waiting.
_HEAD_START_CYCLES = 1_000_000


def seconds(call: Callable[[], object], device: str = "cpu") -> float:
    """Seconds of one call on "cuda" or "cpu"."""
    if device == "cuda":
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_HEAD_START_CYCLES)
        began.record()
        call()
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) * 1e-3
    before = time.perf_counter()
    call()
    return time.perf_counter() - before
