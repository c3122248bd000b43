"""Real SGLang servers on this machine, each started once and put through the same requests.

Tests do not hold servers: `record("fp4")` returns what the server of that configuration answered. Jobs that
the selected tests name run two at a time, in the background, from the first of these tests on. Most servers
are forked from a process that has imported SGLang: a start takes 5 s of CPU time instead of 50 s.
"""

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import cluster_servers
import demo_runs
import foreign_version
import grpc_server
import host_tier_servers as host_tier
import hybrid_servers
import peer_servers
import psutil
import pytest
import ranked_pressure
import ranked_servers
import regression_run
import smollm2_server
import soak_runs
import store_servers
import torch
import weight_servers
from live_processes import ran
from programs import clean_environment, printed_by, python_path, scored
from tiny_model import NEW_TOKENS, PROMPTS

from sgl_kvpool.commands.processes.forks import Forks
from sgl_kvpool.commands.processes.server import Server, cpu_arguments, free_port, serve_command
from sgl_kvpool.demo.cluster.mooncake_store import library_path
from sgl_kvpool.transfer.host_options import RESERVED_BYTES

HERE = Path(__file__).resolve().parent

GREEDY = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}

#: The longest jobs: 7 minutes of a run of all tests on two cores at 2.5 GHz.
NOT_ON_CI = {"soak", "soak-broken"}
ON_CI = os.environ.get("CI", "").lower() not in ("", "0", "false")

MODELS = "sgl_kvpool.demo.models"
LAYOUT, ARRANGEMENT = "--kv-cache-layout", "--kv-cache-arrangement"
DETERMINISTIC, CHUNKS = "--enable-deterministic-inference", ("--chunked-prefill-size", "48")
NATIVE = ("--attention-backend", "torch_native")
READS_ROWS = {"KVPOOL_PREFILL_READS_ROWS": "1"}

#: The demo model, saying what pool it is served from.
WATCHED = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "watched_models", "PYTHONPATH": str(HERE)}

INVARIANT = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "invariant_models", "PYTHONPATH": str(HERE)}

#: Prefills are sampled, and rows damaged on purpose.
SAMPLED = ("--enable-metrics", "--kv-error-sample", "64")
FAULTY = {
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "faulty_models",
    "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent / "codec")]),
    "TEST_VALUES": "{tmp}/values.pt",
}

#: name: (arguments, environment). "{tmp}" is a folder of the server's own.
CONFIGURATIONS = {
    # SGLang as it is: without the plugin, with it, and on another version of SGLang with it.
    "disabled": ([], {"SGLANG_PLUGINS": "nothing", **WATCHED}),
    "stock": ([], WATCHED),
    "foreign": ([], {**WATCHED, "PYTHONPATH": "{tmp}/foreign" + os.pathsep + str(HERE)}),
    # HTTP is served by processes in which SGLang loads no plugins.
    "bf16": ([LAYOUT, "bf16", "--tokenizer-worker-num", "2"], {}),
    "fp4": ([LAYOUT, "fp4"], READS_ROWS),
    # Our pool, read by a stock backend.
    "fp8-native": ([LAYOUT, "fp8", *NATIVE], {}),
    "bf16-token_major-native": ([LAYOUT, "bf16", ARRANGEMENT, "token_major", *NATIVE], {}),
    # One layout each, with a host tier and a store. An argument, a variable or a file requests the layout.
    **{name: ([LAYOUT, layout], READS_ROWS) for layout, name in host_tier.FIRST.items()},
    host_tier.FIRST["fp8"]: ([], {"KVPOOL_KV_CACHE_LAYOUT": "fp8", **READS_ROWS}),
    # The same for page_major and token_major pools.
    **{
        name: ([LAYOUT, layout, ARRANGEMENT, host_tier.AGAIN_ARRANGEMENT[layout]], READS_ROWS)
        for layout, name in host_tier.AGAIN.items()
    },
    host_tier.AGAIN["fp8"]: ([LAYOUT, "fp8"], {"KVPOOL_KV_CACHE_ARRANGEMENT": "page_major", **READS_ROWS}),
    host_tier.AGAIN["fp4"]: (["--config", "{tmp}/arranged.yaml"], READS_ROWS),
    host_tier.LOSSY: (
        [LAYOUT, "fp4", *host_tier.ARGUMENTS],
        {"SGLANG_EXTERNAL_MODEL_PACKAGE": "lossy_models", "PYTHONPATH": str(HERE), **READS_ROWS},
    ),
    # Deterministic: each prompt in one prefill, or in chunks of 48 tokens.
    "deterministic": ([LAYOUT, "fp4", DETERMINISTIC], INVARIANT),
    "deterministic-chunks": ([LAYOUT, "fp4", DETERMINISTIC, *CHUNKS], INVARIANT),
    "plain-chunks": ([LAYOUT, "fp4", *CHUNKS], {}),
    # A codec that decodes wrong values, to see that stored rows are what is attended.
    "damaged": (
        [LAYOUT, "fp4"],
        {"SGLANG_EXTERNAL_MODEL_PACKAGE": "damaged_models", "PYTHONPATH": str(HERE), **READS_ROWS},
    ),
    "sampled": (
        [LAYOUT, "fp8_block_scale", "--kv-host-layout", "fp4_fp8_rope", *host_tier.ARGUMENTS, *SAMPLED[1:]],
        {**FAULTY, "TEST_FAULTS": '{"doubled": [0], "wide": [1]}'},
    ),
    "sampled-fp8": ([LAYOUT, "fp8", *SAMPLED], {**FAULTY, "TEST_FAULTS": '{"small": [2]}'}),
}
#: Configurations with a host tier and a store.
WITH_HOST_TIER = [*host_tier.FIRST.values(), *host_tier.AGAIN.values()]
#: Started by `python -m sglang.launch_server`, as Dockerfiles and scripts of users still do.
LAUNCHED = {host_tier.FIRST["fp8_block_scale"]: (sys.executable, "-m", "sglang.launch_server")}
#: Servers that start as a user's does, with imports of their own.
FRESH = ("stock", *LAUNCHED)
ARRANGED_YAML = "kv-cache-layout: fp4\nkv-cache-arrangement: token_major\n"


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    import tiny_model

    return tiny_model.write(tmp_path_factory.mktemp("model") / "tiny")


def serve(name, model_path, folder):
    """Start one configuration, ask it everything, stop it; returns the answers."""
    folder.mkdir()
    (folder / "arranged.yaml").write_text(ARRANGED_YAML)
    foreign = foreign_version.write(folder / "foreign")
    arguments, environment = CONFIGURATIONS[name]
    arguments = [a.replace("{tmp}", str(folder)) for a in arguments]
    environment = {k: v.replace("{tmp}", str(folder)) for k, v in environment.items()}
    if "PYTHONPATH" in environment:
        environment["PYTHONPATH"] = python_path(environment["PYTHONPATH"])
    has_host_tier = name in WITH_HOST_TIER
    layout = name.partition("-")[0]
    store = None
    if has_host_tier:
        arguments += [*host_tier.ARGUMENTS, *host_tier.STORE_ARGUMENTS, *host_tier.CHOICES.get(name, [])]
        environment.update(host_tier.environment(HERE, folder.parent, name))
        if name == host_tier.SELF_CHECKED:
            environment["PYTHONPATH"] = os.pathsep.join([str(foreign), environment["PYTHONPATH"]])
            environment["KVPOOL_ALLOW_UNTESTED"] = "1"
        store = environment["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"]
        if name == host_tier.AGAIN[layout]:
            host_tier.damage(store, layout)
    in_store = {layout: len(host_tier.stored(store, layout)) for layout in host_tier.LAYOUTS if store}
    log, greedily = folder / "server.log", {"sampling_params": GREEDY, "return_logprob": True}
    arguments = [*cpu_arguments(model_path, free_port()), *arguments]
    environment = {**clean_environment(), **environment}
    server = Server(arguments, log, environment, program=LAUNCHED.get(name))
    if name in FRESH:
        server.forks = None
    with server:
        answers = {
            "in_store": in_store,
            "info": server.info(),
            # One request after the other: the second finds a part of the first in the radix cache.
            "first": [server.generate(text=prompt, **greedily) for prompt in PROMPTS],
        }
        # All at once, of unequal lengths, now with the whole prompts cached.
        answers["batch"] = server.generate(text=PROMPTS, **greedily)
        # Log-probabilities of a prompt: one prefill without a cached prefix.
        answers["prompt"] = scored(server, text=PROMPTS[3])
        if "TEST_VALUES" in environment:
            answers["values"] = torch.load(environment["TEST_VALUES"])
            answers["metrics"] = server.get("/metrics").decode()
        if store or name == host_tier.LOSSY:
            answers["host_tier"] = host_tier.ask(server, PROMPTS[3], GREEDY)
        if name == host_tier.PAUSED:
            answers["paused"] = host_tier.pause_and_flush(server, GREEDY)
        if store:
            host_tier.wait_for_store(store)
            answers["stored"] = len(host_tier.stored(store, layout))
    answers["log"] = log.read_text(errors="replace")
    return answers


def engines(model_path, folder):
    """Engines one after the other in one process: refused, with a layout, without; see engines_script.py."""
    folder.mkdir()
    command = [sys.executable, HERE / "engines_script.py", model_path]
    return json.loads(printed_by(command, 900, SGLANG_EXTERNAL_MODEL_PACKAGE=MODELS).rpartition("\n@@@")[2])


def refused(model_path, folder):
    """A server whose scheduler finds too little memory for its host tier."""
    folder.mkdir()
    env = clean_environment(CUDA_VISIBLE_DEVICES="", SGLANG_EXTERNAL_MODEL_PACKAGE=MODELS)
    command = [*serve_command(), *cpu_arguments(model_path, free_port()), LAYOUT, "fp4"]
    command += ["--enable-hierarchical-cache", "--hicache-size", str(10**6)]
    streams = {"capture_output": False, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = ran(*command, **streams, env={**os.environ, **env})
    return {"status": done.returncode, "log": done.stdout}


def pytest_collection_modifyitems(items):
    """Give tests 3600 s: one start may take 600 s, and the limit of a start ends a server that hangs.

    The first test may wait for all servers requested before its own, beside a worker that runs other tests.
    """
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.timeout(3600))
            if ON_CI and NOT_ON_CI.intersection(_servers(item)):
                item.add_marker(pytest.mark.skip(reason="CI has 90 minutes: run `make test` without CI=true"))


def _servers(item):
    """Names of the configurations and jobs that a test asks for."""
    return [name for marker in item.iter_markers("engine") for name in marker.args]


def pytest_collection_finish(session):
    """Names that the tests to be run ask for, after -k and the like have picked them."""
    names = [n for item in session.items if not item.get_closest_marker("skip") for n in _servers(item)]
    for name in names:  # grows on the way
        if name in host_tier.AFTER:
            names.append(host_tier.AFTER[name])

    def steps(name):
        """Servers that have to have ended before this one."""
        return 1 + steps(host_tier.AFTER[name]) if name in host_tier.AFTER else 0

    # All of `JOBS` come first, because some start several servers one after the other; then the servers that
    # have to end before others start. If these two came last, a test that waits for one would wait for all.
    chained = {*host_tier.AFTER, *host_tier.AFTER.values()}
    names.sort(key=lambda name: (name not in JOBS, name not in chained, steps(name)))
    session.config._kvpool_names = list(dict.fromkeys(names))


#: Jobs other than one server of `CONFIGURATIONS`.
JOBS = {
    "engines": engines,
    "refused": refused,
    "regression": regression_run.regression,
    "smollm2": smollm2_server.serve,
    **cluster_servers.JOBS,
    **demo_runs.JOBS,
    **grpc_server.JOBS,
    **hybrid_servers.JOBS,
    **peer_servers.JOBS,
    **ranked_servers.JOBS,
    **ranked_pressure.JOBS,
    **soak_runs.JOBS,
    **store_servers.JOBS,
    **weight_servers.JOBS,
}


#: Jobs with models of their own. A test of any other job has the tiny model trained first.
OWN_MODELS = {
    *("regression", "smollm2"),
    *cluster_servers.JOBS,
    *demo_runs.JOBS,
    *hybrid_servers.JOBS,
    *peer_servers.JOBS,
    *soak_runs.JOBS,
    *store_servers.JOBS,
    *weight_servers.JOBS,
}


#: Schedulers that run at once. Four and the other worker's tests left 9.9 of 23 GB free; SGLang refuses host
#: tiers below 10.7 GB.
SCHEDULERS_AT_ONCE = 3
#: Jobs that serve without a host tier if they find less than 15 GiB of memory free, which the regression
#: script did twice on CI. So no other server runs beside them.
ADAPTING = ("demo", "regression")
#: Jobs of `make test` that have more than one scheduler at a time, or count as more.
SCHEDULERS = {
    **dict.fromkeys(ADAPTING, 3),
    **dict.fromkeys(peer_servers.JOBS, 3),
    **dict.fromkeys([*ranked_servers.JOBS, *ranked_pressure.JOBS], 2),
}
#: Memory of a scheduler and its share of a server's other processes.
SCHEDULER_BYTES = 5 << 29


def wait_for_memory(schedulers, limit_s=600):
    """Wait for memory for the schedulers, two at most, beside what SGLang keeps free for a host tier.

    After the limit the job starts all the same: not every server has a host tier.
    """
    end = time.monotonic() + limit_s
    wanted_bytes = RESERVED_BYTES + min(schedulers, 2) * SCHEDULER_BYTES
    while psutil.virtual_memory().available < wanted_bytes and time.monotonic() < end:
        time.sleep(1)


class Room:
    """`with room(3):` waits until three more schedulers may run."""

    def __init__(self, schedulers):
        self._free = threading.Semaphore(schedulers)
        # One job takes at a time: two that each held a part would wait for each other.
        self._taking = threading.Lock()

    @contextmanager
    def __call__(self, schedulers):
        with self._taking:
            for _ in range(schedulers):
                self._free.acquire()
        try:
            yield
        finally:
            self._free.release(schedulers)


@pytest.fixture(scope="session")
def record(request, tmp_path_factory):
    """`record(name)`: the answers of one configuration, waiting for them."""
    trained = set(request.config._kvpool_names) - OWN_MODELS
    model_path = request.getfixturevalue("model_path") if trained else None
    root = tmp_path_factory.mktemp("servers")
    room = Room(SCHEDULERS_AT_ONCE)
    importing = {k: v for k, v in {**os.environ, **clean_environment()}.items() if v}
    with suppress(ValueError):  # without Mooncake's libraries, its tests are skipped
        importing["LD_LIBRARY_PATH"] = library_path()
    with Forks(environment=importing) as Server.forks, ThreadPoolExecutor(2) as pool:
        futures = {}

        def run(name):
            if name in host_tier.AFTER:
                futures[host_tier.AFTER[name]].result()
            schedulers = SCHEDULERS.get(name, 1)
            with room(schedulers):
                wait_for_memory(schedulers)
                if name in JOBS:
                    return JOBS[name](model_path, root / name)
                return serve(name, model_path, root / name)

        for name in request.config._kvpool_names:
            futures[name] = pool.submit(run, name)
        yield lambda name: futures[name].result()
        for future in futures.values():
            future.cancel()
    Server.forks = None
