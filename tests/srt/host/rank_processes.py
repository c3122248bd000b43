"""Runs processes that are the ranks of a server; each goes through the same cases."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def run(script, ranks, folder, cases):
    """`found[case]`: the results of the ranks, in order.

    Starts `python script RANK FOLDER` once per rank; see `go_through`.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = []
    try:
        for rank in range(ranks):
            with (folder / f"{rank}.log").open("w") as log:
                command = [sys.executable, HERE / script, str(rank), folder]
                processes.append(
                    subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
                )
        statuses = [process.wait(timeout=400) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    logs = [(folder / f"{rank}.log").read_text() for rank in range(ranks)]
    assert statuses == [0] * ranks, "\n\n".join(log[-3000:] for log in logs)
    return {
        case: [json.loads((folder / f"{case}-{rank}.json").read_text()) for rank in range(ranks)]
        for case in cases
    }


def go_through(make_rank, cases):
    """Run cases in this process; rank and folder come from the command line.

    Parameters
    ----------
    make_rank : callable
        Takes rank and folder, and returns an object whose `run(case)` result is written to the folder.
    cases : iterable of str
        All cases; further command-line arguments select some of them.
    """
    import torch.distributed as dist
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
