"""What `make test-cluster` starts: stores that servers share, more transfers, a cache-aware router."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import hybrid_model
import hybrid_servers
import psutil
import ranked_servers
from cluster_questions import PAGES, PROMPTS, failures, with_store
from peer_servers import decode_server, prefill_server
from programs import FLUSH, clean_environment, printed_by, python_path
from tiny_model import PROMPTS as SHORT_PROMPTS

from sgl_kvpool.commands.evaluate.measure import ask
from sgl_kvpool.commands.processes.local_server import free_port, running
from sgl_kvpool.commands.processes.server import Server, cpu_arguments
from sgl_kvpool.demo.cluster.mooncake_store import MooncakeStore
from sgl_kvpool.demo.cluster.servers import metric_sum, peer_arguments, peer_environment, router, until

HERE = Path(__file__).resolve().parent


def shared(_model_path, folder):
    """Servers of other layouts, of two ranks and of a narrower host layout over one store."""
    folder.mkdir()
    with MooncakeStore(folder) as store:

        def stored():
            """Keys of the pages that are there now."""
            return sorted(store.page_keys())

        def server(name, layout, *arguments, environment=()):
            given = {**store.environment, **dict(environment)}
            return with_store(folder, name, layout, given, "mooncake", *arguments)

        answers = {}
        with server("first", "fp4") as first:
            answers["first"] = [ask(first, text) for text in PROMPTS[:2]]
            until(lambda: len(stored()) == 2 * PAGES, "two prompts in the store")
        answers["first_keys"] = stored()

        with server("other", "fp8_block_scale") as other:
            answers["other"] = [ask(other, text) for text in PROMPTS[:2]]
            until(lambda: len(stored()) == 4 * PAGES, "two prompts of the other layout in the store")
            answers["other_again"] = [ask(other, text) for text in PROMPTS[:2]]
            answers["other_failures"] = failures(other)
        answers["other_keys"] = sorted(set(stored()) - set(answers["first_keys"]))

        (folder / "faults").mkdir()
        cores = sorted(os.sched_getaffinity(0))
        ranks = ranked_servers.environment(folder, (cores[0], cores[-1]))
        with server("ranks", "fp4", "--tp-size", "2", environment=ranks) as two:
            answers["ranks"] = [ask(two, text) for text in PROMPTS[:2]]
            answers["ranks_failures"] = failures(two)
            # Computed by the same server, because sums over two ranks round differently from sums of one.
            two.get(FLUSH)
            clear = urllib.request.Request(two.url + "/hicache/storage-backend/clear", method="POST")

            def cleared():
                """Mooncake does not remove pages in the first seconds after they were read."""
                two._ask(clear, timeout_seconds=60)  # its answer is no JSON
                return not stored()

            until(cleared, "an empty store")
            answers["ranks_computed"] = [ask(two, text) for text in PROMPTS[:2]]

        before = set(stored())
        narrower = ("--kv-host-layout", "fp4")
        with server("narrow", "bf16", *narrower) as narrow:
            answers["narrow"] = [ask(narrow, text) for text in PROMPTS[:4]]
            until(lambda: len(set(stored()) - before) == 4 * PAGES, "four prompts in the store")
            # Pushed out of the pool by the others, so it comes from the host tier, through `fp4`.
            answers["narrow_host"] = ask(narrow, PROMPTS[0])
        answers["narrow_keys"] = sorted(set(stored()) - before)
        with server("narrow-again", "bf16", *narrower) as narrow:
            answers["narrow_store"] = ask(narrow, PROMPTS[0])
            answers["narrow_failures"] = failures(narrow)
    return answers


def nixl_peers(_model_path, folder):
    """Prefill and decode servers over NIXL and UCX."""
    folder.mkdir()
    prefill = prefill_server(folder, "prefill", "fp4", "nixl")
    decode = decode_server(folder, "decode", "fp4", "nixl")
    with (
        running(prefill[0], decode),
        router(folder / "router.log", prefill=[prefill], decode=[decode]) as front,
    ):
        answers = {"peers": [ask(front, text) for text in PROMPTS]}
        answers["transferred_mb"] = metric_sum(prefill[0], "sglang:kv_transfer_total_mb_sum")
        answers["failures"] = [failures(prefill[0]), failures(decode)]
    return answers


def hybrid_peers(_model_path, folder):
    """Prefill and decode servers of the hybrid model, and one server that does both."""
    folder.mkdir()
    model_path = hybrid_model.write(folder / "hybrid")

    def server(name, *arguments):
        command = [
            *(*cpu_arguments(model_path, free_port()), *hybrid_servers.ARGUMENTS),
            *("--attention-backend", "kvpool_mla", "--max-total-tokens", "2048"),
            *("--kv-cache-layout", "fp4", "--enable-metrics", "--enable-cache-report", *arguments),
        ]
        environment = clean_environment(KVPOOL_PREFILL_READS_ROWS="1", PYTHONPATH=python_path(HERE))
        environment |= {**hybrid_servers.ENVIRONMENT, **peer_environment()}
        return Server(command, folder / f"{name}.log", environment, program=hybrid_servers.PROGRAM)

    texts = [*SHORT_PROMPTS, SHORT_PROMPTS[3]]
    port = free_port()
    prefill = server("prefill", *peer_arguments("prefill", "mooncake_tcp", port))
    decode = server("decode", *peer_arguments("decode", "mooncake_tcp"))
    with (
        running(prefill, decode),
        router(folder / "router.log", prefill=[(prefill, port)], decode=[decode]) as front,
    ):
        answers = {"peers": [ask(front, text) for text in texts]}
        answers["failures"] = [failures(prefill), failures(decode)]
    with server("one") as one:
        answers["one"] = [ask(one, text) for text in texts]
    return answers


def routed(_model_path, folder):
    """Two servers that share a store, behind a router that sends a prompt where its prefix is."""
    folder.mkdir()
    with MooncakeStore(folder) as store:
        two = [with_store(folder, name, "fp4", store.environment, "mooncake") for name in ("left", "right")]
        with running(*two):
            # `PROMPTS[0]` is stored by the left one, and the router does not know of it.
            answers = {"left": [ask(two[0], PROMPTS[0])]}
            until(lambda: len(store.page_keys()) == PAGES, "a prompt in the store")
            with router(folder / "router.log", workers=two) as front:
                # The same prompt several times: the same server each time, from its device after the first.
                answers["same"] = [ask(front, PROMPTS[1]) for _ in range(4)]
                answers["from_left"] = [ask(front, PROMPTS[0]) for _ in range(2)]
            answers["right"] = [ask(two[1], text) for text in PROMPTS[:3]]
            # `PROMPTS[2]` is stored by the right one, and `PROMPTS[1]` by the one that the router chose.
            until(lambda: len(store.page_keys()) == 3 * PAGES, "three prompts in the store")
            answers["left_again"] = ask(two[0], PROMPTS[2])
            answers["failures"] = [failures(each) for each in two]
    return answers


def demo_command(folder, *arguments):
    """`sgl-kvpool demo --cluster`."""
    program = Path(sys.executable).parent / "sgl-kvpool"
    return [program, "demo", "--cluster", "--out", folder / "results", *arguments]


def demo(_model_path, folder):
    """`sgl-kvpool demo --cluster` for all layouts; what it prints, and cluster.json."""
    folder.mkdir()
    from sgl_kvpool.layout import MLAKVCacheLayout

    printed = printed_by(demo_command(folder, "--layouts", ",".join(MLAKVCacheLayout)), 1800)
    results = json.loads((folder / "results" / "cluster" / "cluster.json").read_text())
    return {"printed": printed, **results}


def interrupted(number):
    """A job: a signal ends the demo once a router runs beside its servers; nothing may be left."""

    def job(_model_path, folder):
        folder.mkdir()
        printed = folder / "printed"
        with printed.open("w") as output:
            process = subprocess.Popen(
                demo_command(folder, "--layouts", "fp4"),
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **clean_environment()},
                # A shell's background jobs, and what they start, ignore SIGINT.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        try:

            def answering():
                return any(log.stat().st_size for log in folder.rglob("router-fp4.log"))

            until(lambda: answering() or process.poll() is not None, "a router beside its servers", 300)
            assert process.poll() is None, printed.read_text()
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(number)
            status = process.wait(timeout=120)
        finally:
            process.kill()
        time.sleep(1)
        return {
            "children": len(children),
            "left": [str(child) for child in children if child.is_running()],
            "status": status,
            "printed": printed.read_text(),
        }

    return job


def both_signals(model_path, folder):
    """SIGINT as from Ctrl-C, and SIGTERM."""
    folder.mkdir()
    numbers = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM}
    return {name: interrupted(number)(model_path, folder / name) for name, number in numbers.items()}


JOBS = {
    "cluster-shared": shared,
    "cluster-nixl": nixl_peers,
    "cluster-hybrid": hybrid_peers,
    "cluster-routed": routed,
    "cluster-demo": demo,
    "cluster-interrupted": both_signals,
}
