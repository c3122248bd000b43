"""Servers of two processes: what they are started with, and asked."""

import os
import re
import signal
import time
from pathlib import Path

import foreign_version
import host_tier_servers as host_tier
import psutil
from programs import FLUSH, clean_environment, python_path
from tiny_model import NEW_TOKENS, PROMPTS

from sgl_kvpool.commands.processes.server import Server, cpu_arguments, free_port

HERE = Path(__file__).resolve().parent

GREEDY = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
#: A prompt that no store has, and the page of the first filler that rank 1 cannot read.
LOST, UNREADABLE_PAGE = "lost: " + PROMPTS[3], 5
#: Servers that are not started unless this variable is set: each takes two minutes on two cores.
ALL_RANKS = "TEST_ALL_RANKS"


def environment(folder, cores):
    return {
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "ranked_models",
        "PYTHONPATH": python_path(foreign_version.write(folder / "foreign"), HERE),
        # SGLang looks like an untested version, so that ranks check themselves when they start.
        "KVPOOL_ALLOW_UNTESTED": "1",
        "OMP_NUM_THREADS": "1",
        "KVPOOL_PREFILL_READS_ROWS": "1",
        "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder / "store"),
        "RANK_1_FAULTS": str(folder / "faults"),
        # A core for each process; SGLang looks for a NUMA node for each otherwise.
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, cores)),
        # No NCCL: where there is one, SGLang makes a communicator of it for CPU ranks too, which fails
        # (`distributed/parallel_state.py:464`). Without one it goes on, over gloo.
        "SGLANG_NCCL_SO_PATH": str(folder / "no-nccl.so"),
        # SGLang compares what ranks do, step by step, and ends the server when they differ.
        "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1",
    }


def serve(arguments, ask_more=None, *faults):
    """A job of conftest's: `job(model_path, folder)` starts the server, and returns its answers."""

    def job(model_path, folder):
        (folder / "faults").mkdir(parents=True)
        for fault in faults:
            (folder / "faults" / fault).touch()
        cores = sorted(os.sched_getaffinity(0))
        log = folder / "server.log"
        command = [*cpu_arguments(model_path, free_port()), "--kv-cache-layout", "fp4"]
        command += [*host_tier.ARGUMENTS, *host_tier.STORE_ARGUMENTS, *arguments]
        variables = clean_environment(**environment(folder, (cores[0], cores[-1])))
        with Server(command, log, variables) as server:
            answers = ask(server, folder)
            if ask_more is not None:
                ask_more(server, folder, answers)
        return {**answers, "log": log.read_text(errors="replace")}

    return job


def generate(server, text):
    return server.generate(text=text, sampling_params=GREEDY, return_logprob=True)


def ask(server, folder):
    """Prompts, a hit on the device, one on the host, and one in the store."""
    answers = {"info": server.info(), "first": [generate(server, prompt) for prompt in PROMPTS]}
    answers["host_tier"] = host_tier.ask(server, PROMPTS[3], GREEDY)
    host_tier.wait_for_store(folder / "store")
    answers["stored"] = len(host_tier.stored(folder / "store", "fp4"))
    server.get(FLUSH)
    answers["store_hit"] = generate(server, PROMPTS[3])
    return answers


def ask_with_faults(server, folder, answers):
    """A page of the store that rank 1 alone cannot read, and a backup that it alone has lost."""
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    server.get(FLUSH)
    text = host_tier.FILLERS[0]
    key = get_storage_hash_str(list(text.encode()), None, page_size=host_tier.PAGE_SIZE)[UNREADABLE_PAGE]
    fault = folder / "faults" / key
    fault.touch()
    answers["unreadable"] = generate(server, text)
    fault.unlink()

    server.get(FLUSH)
    fault = folder / "faults" / "lose_backups"
    fault.touch()
    answers["lost"] = [generate(server, LOST)]
    deadline = time.monotonic() + 60
    while 'kind="backup_lost"} 0' in server.get("/metrics").decode() and time.monotonic() < deadline:
        time.sleep(0.2)
    fault.unlink()
    answers["lost"].append(generate(server, LOST))
    # The fillers come from the store and the host, and push the prompt out of the pool.
    answers["between"] = [generate(server, filler) for filler in host_tier.FILLERS]
    answers["lost"].append(generate(server, LOST))
    answers["after"] = generate(server, PROMPTS)
    answers["metrics_after"] = server.get("/metrics").decode()


def mappings(server):
    """(process, inode, bytes) of each mapping of a shared host tier, of the server's processes."""
    found = []
    for process in psutil.Process(server.process.pid).children(recursive=True):
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        for begin, end, inode in re.findall(r"(?m)^(\w+)-(\w+) .* (\d+) +/memfd:sgl-kvpool-host-tier", maps):
            found.append((process.pid, int(inode), int(end, 16) - int(begin, 16)))
    return found


def kill_a_rank(server, pid):
    """Names of the server's processes that are left half a minute after one rank was killed."""
    processes = psutil.Process(server.process.pid).children(recursive=True)
    os.kill(pid, signal.SIGKILL)
    _, left = psutil.wait_procs(processes, timeout=30)
    return [f"{process.pid} {process.name()}" for process in left]


def ask_with_more_faults(server, folder, answers):
    """`ask_with_faults`; a rank that stores slowly, one that gives out other pages, one that is killed."""
    ask_with_faults(server, folder, answers)
    server.get(FLUSH)
    fault = folder / "faults" / "slow_backups"
    fault.touch()
    # Each is pushed out of the pool by the next ones, and comes from the host.
    answers["slow"] = [generate(server, filler) for filler in (*host_tier.FILLERS, *host_tier.FILLERS)]
    fault.unlink()
    fault = folder / "faults" / "move_allocator"
    fault.touch()
    answers["moved"] = [generate(server, "moved: " + PROMPTS[3])]
    fault.unlink()
    answers["moved"] += [generate(server, filler) for filler in (*host_tier.FILLERS, *host_tier.FILLERS)]
    answers["at_last"] = generate(server, PROMPTS)
    answers["last_metrics"] = server.get("/metrics").decode()
    answers["mappings"] = mappings(server)
    answers["left"] = kill_a_rank(server, answers["mappings"][-1][0])


def update(server, folder, answers):
    """Load the weights once more, without a version: keys in the store change, on all ranks alike."""
    server.get(FLUSH)  # waits until the last answer's batches have left all pipeline stages
    model = server.arguments[server.arguments.index("--model-path") + 1]
    answers["update"] = server.post("/update_weights_from_disk", model_path=model)
    answers["updated"] = [generate(server, PROMPTS[3])]
    host_tier.wait_for_store(folder / "store")
    server.get(FLUSH)
    # Replicas answer in turn.
    answers["updated"].append(generate(server, PROMPTS[3]))


def ask_with_faults_and_update(server, folder, answers):
    """`ask_with_faults`, then `update`."""
    ask_with_faults(server, folder, answers)
    update(server, folder, answers)


JOBS = {
    "two-ranks": serve(["--tp-size", "2"], ask_with_more_faults),
    "two-ranks-apart": serve(["--tp-size", "2"], ask_with_faults_and_update, "open_memory"),
    "two-stages": serve(["--pp-size", "2"], update),
    "two-replicas": serve(["--dp-size", "2"], update),
}
