"""A server of two ranks that share a host tier over Mooncake's store, and its requests until it is killed.

Clients send twelve prompts, together 4320 distinct tokens, four times as many as the host tier holds; some
clients leave in the middle.
"""

import http.client
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import psutil
from cluster_questions import failures
from programs import FLUSH, clean_environment
from ranked_servers import environment, mappings
from tiny_model import TEXT

from sgl_kvpool.commands.processes.server import Server, cpu_arguments, free_port
from sgl_kvpool.demo.cluster.mooncake_store import MooncakeStore
from sgl_kvpool.demo.cluster.servers import metric_sum, until

PAGE_SIZE, DEVICE_TOKENS, HOST_RATIO = 16, 1024, 0.5
#: Each shares its first pages with one other.
PROMPTS = [f"{number % 6}: {TEXT[:150]}" + TEXT[number * 20 :][:240] + "=" * 40 for number in range(12)]
PROMPT_TOKENS = [len(prompt.encode()) for prompt in PROMPTS]
CLIENTS, SECONDS = 4, 60
ADMIN = "secret"
STORE_CONFIG = '{"prefetch_threshold": 16}'
SAMPLING = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
#: Difference of log-probabilities below which batches of other shapes may decide between two tokens.
TIE = 0.05


def ask(server, prompt):
    asked = {"text": prompt, "sampling_params": SAMPLING, "return_logprob": True, "top_logprobs_num": 2}
    answer = server.post("/generate", **asked)
    meta = answer["meta_info"]
    return {
        "ids": answer["output_ids"],
        "margins": [best[0] - second[0] for best, second in meta["output_top_logprobs"]],
        "cached": meta.get("cached_tokens_details") or {"device": 0, "host": 0, "storage": 0},
    }


def differs(answer, cold):
    """Whether an answer differs from a cold server's in more than a choice between two about equal tokens."""
    for place, (found, wanted) in enumerate(zip(answer["ids"], cold["ids"], strict=True)):
        if found != wanted:
            return cold["margins"][place] > TIE
    return False


def leave(server, prompt, seconds):
    """Ask for a long answer, and close the connection once the server has sent nothing for `seconds`."""
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=seconds)
    sampling = {**SAMPLING, "max_new_tokens": 200}
    body = json.dumps({"text": prompt, "sampling_params": sampling, "stream": True})
    try:
        client.request("POST", "/generate", body, {"Content-Type": "application/json"})
        answer = client.getresponse()
        while answer.readline():
            pass
    except TimeoutError:
        pass
    finally:
        client.close()


def traffic(server, cold):
    """What clients saw in a minute."""
    seen = {"answers": 0, "left": 0, "wrong": [], "errors": [], "tiers": {}}
    lock, until_then = threading.Lock(), time.monotonic() + SECONDS

    def client(number):
        generator = np.random.default_rng(number)
        while time.monotonic() < until_then:
            which = int(generator.integers(len(PROMPTS)))
            try:
                if generator.integers(4) == 0:
                    leave(server, PROMPTS[which], float(generator.uniform(0.05, 1.5)))
                    with lock:
                        seen["left"] += 1
                    continue
                answer = ask(server, PROMPTS[which])
            except Exception as error:  # reported to the test, which expects none
                with lock:
                    seen["errors"].append(f"{type(error).__name__}: {error}")
                return
            with lock:
                seen["answers"] += 1
                for tier in ("device", "host", "storage"):
                    found = answer["cached"].get(tier, 0)
                    seen["tiers"][tier] = seen["tiers"].get(tier, 0) + found
                if differs(answer, cold[which]):
                    seen["wrong"].append((which, answer))

    clients = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    return seen


def administer(server, method, path, **fields):
    """Status and text of an answer to a request that needs the administrator's key."""
    request = urllib.request.Request(
        server.url + path, method=method, data=json.dumps(fields).encode() if fields else None,
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN}"},
    )  # fmt: skip
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def flush(server):
    until(lambda: metric_sum(server, "sglang:num_running_reqs") == 0, "no running request")
    status, text = administer(server, "GET", FLUSH)
    assert status == 200, text


def mapped_by(inode):
    """Processes of this machine that map the file of a host tier."""
    found = []
    for process in psutil.process_iter():
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
        except OSError:
            continue
        if any(f" {inode} " in line and "memfd:sgl-kvpool-host-tier" in line for line in maps.splitlines()):
            found.append(process.pid)
    return found


def kill_all(server):
    """Kill the server's processes at once; the names of those that are left."""
    processes = [server.process, *psutil.Process(server.process.pid).children(recursive=True)]
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    _, left = psutil.wait_procs(processes[1:], timeout=30)
    server.process.wait(timeout=30)
    return [process.name() for process in left]


def drive(server, store, folder):
    """What is asked of the server, which is killed at last."""
    answers = {"info": server.info(), "cold": [ask(server, prompt) for prompt in PROMPTS]}
    answers |= traffic(server, answers["cold"])
    flush(server)
    answers["stored"] = [ask(server, prompt) for prompt in PROMPTS[:3]]
    flush(server)
    path, mooncake = "/hicache/storage-backend", {"hicache_storage_backend": "mooncake"}
    policy = {**mooncake, "hicache_write_policy": "write_back"}
    answers["write_back"] = [administer(server, "PUT", path, **policy)]
    answers["detached"] = administer(server, "DELETE", path)
    answers["write_back"].append(administer(server, "PUT", path, **policy))
    configured = {**mooncake, "hicache_storage_backend_extra_config_json": STORE_CONFIG}
    answers["attached"] = administer(server, "PUT", path, **configured)
    answers["stored_again"] = [ask(server, prompt) for prompt in PROMPTS[:3]]
    answers["rows"] = [(folder / f"rows-{rank}").read_text().splitlines() for rank in (0, 1)]
    answers["failures"] = failures(server)
    answers["keys"] = len(store.page_keys())
    answers["mappings"] = mappings(server)
    answers["left_processes"] = kill_all(server)
    answers["still_mapped_by"] = mapped_by(answers["mappings"][0][1])
    return answers


def over_mooncake(model_path, folder):
    """A job of conftest's."""
    (folder / "faults").mkdir(parents=True)
    cores = sorted(os.sched_getaffinity(0))
    log = folder / "server.log"
    arguments = [
        *cpu_arguments(model_path, free_port()),
        *("--kv-cache-layout", "bf16", "--tp-size", "2", "--enable-hierarchical-cache"),
        *("--hicache-ratio", str(HOST_RATIO), "--max-total-tokens", str(DEVICE_TOKENS)),
        *("--page-size", str(PAGE_SIZE), "--enable-metrics", "--enable-cache-report"),
        *("--hicache-storage-backend", "mooncake", "--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", STORE_CONFIG, "--served-model-name", "tiny"),
        *("--admin-api-key", ADMIN),
    ]
    with MooncakeStore(folder) as store:
        variables = {**environment(folder, (cores[0], cores[-1])), "ROWS_SEEN": str(folder)}
        with Server(arguments, log, clean_environment(**variables, **store.environment)) as server:
            answers = drive(server, store, folder)
    return {**answers, "log": log.read_text(errors="replace")}


JOBS = {"two-ranks-pressure": over_mooncake}
