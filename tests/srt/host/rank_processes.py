"""Runs processes that are the ranks of a server; together, over gloo, they go through the same cases."""

import json
import os
import signal
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

HERE = Path(__file__).resolve().parent


def run(fresh, script, ranks, folder, cases):
    """`found[case]`: the results of the ranks, in order.

    Forks `python script RANK FOLDER` once per rank from a process with SGLang imported; see `go_through`.
    A rank that waits for others in vain ends after a minute.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = []
    try:
        for rank in range(ranks):
            command = [sys.executable, str(HERE / script), str(rank), str(folder)]
            processes.append(fresh.start(command, environment, folder / f"{rank}.log", children_fork=False))
        statuses = [process.wait(timeout=400) for process in processes]
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
    logs = [(folder / f"{rank}.log").read_text() for rank in range(ranks)]
    assert statuses == [0] * ranks, "\n\n".join(log[-3000:] for log in logs)
    return {
        case: [json.loads((folder / f"{case}-{rank}.json").read_text()) for rank in range(ranks)]
        for case in cases
    }


class Rank:
    """This process, one rank of a server. A subclass has `result_of(case)`."""

    def __init__(self, rank, folder, ranks):
        self.rank, self.folder, self.failures, self.details = rank, folder, Counter(), {}
        meet, limit = dist.FileStore(str(folder / "meet"), ranks), timedelta(seconds=60)
        dist.init_process_group("gloo", store=meet, rank=rank, world_size=ranks, timeout=limit)
        self.all, self.alone = dist.group.WORLD, [dist.new_group([one]) for one in range(ranks)][rank]

    def run(self, case):
        """The result of a case on this rank, with the failures that were counted."""
        from sgl_kvpool import metrics

        self.failures.clear()
        with pytest.MonkeyPatch.context() as self.patch:
            self.patch.setattr(metrics, "failed", self.failed)
            found = self.result_of(case)
        dist.barrier()
        return {**found, "failures": dict(self.failures)}

    def failed(self, kind, detail=None, **_):
        self.failures[kind] += 1
        self.details[kind] = detail


def go_through(make_rank, cases):
    """Run cases in this process; command-line arguments are rank, folder and, for some cases only, these.

    `make_rank(rank, folder)` is an object whose `run(case)` result is written to the folder.
    """
    from sglang.srt.mem_cache.pool_host import base

    from sgl_kvpool.sglang_plugin import hook_groups

    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    hook_groups.apply(hook_groups.named("host tier, host tier of hybrid models"))
    this = make_rank(rank, folder)
    for case in sys.argv[3:] or cases:
        (folder / f"{case}-{rank}.json").write_text(json.dumps(this.run(case)))
    # If a rank ends while others still communicate with it, gloo aborts them; and sometimes it aborts a rank
    # that destroys its process group ("terminate called without an active exception").
    dist.barrier()
    (folder / f"ended-{rank}").touch()
    deadline = time.monotonic() + 60
    while len(list(folder.glob("ended-*"))) < dist.get_world_size() and time.monotonic() < deadline:
        time.sleep(0.01)
    sys.stdout.flush()
    os._exit(0)
