"""Prefill and decode servers behind sglang-router, over transfer engines that work without a network card."""

import signal
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from cluster_questions import PROMPTS, failures, server

from sgl_kvpool.demo.cluster.servers import (
    ask,
    metric_sum,
    peer_arguments,
    peer_environment,
    router,
    until,
)
from sgl_kvpool.demo.local_server import free_port, running


def prefill_server(folder, name, layout, transfer="mooncake_tcp", *arguments):
    """A prefill server that is not started, and its bootstrap port."""
    port = free_port()
    peer = [*peer_arguments("prefill", transfer, port), *arguments]
    return server(folder, name, layout, *peer, environment=peer_environment()), port


def decode_server(folder, name, layout, transfer="mooncake_tcp", *arguments):
    """A decode server that is not started."""
    peer = [*peer_arguments("decode", transfer), *arguments]
    return server(folder, name, layout, *peer, environment=peer_environment())


def attempt(front, text):
    """Answer to a request, or status, body and seconds of its failure."""
    began = time.monotonic()
    try:
        return {"status": 200, "answer": ask(front, text)}
    except urllib.error.HTTPError as error:
        return {"status": error.code, "body": error.read().decode(), "seconds": time.monotonic() - began}


def peers(_model_path, folder):
    """Two prefill servers and one of another layout, a decode server, and routers between them."""
    folder.mkdir()
    with ExitStack() as stack:
        one, two, other = (
            prefill_server(folder, name, layout)
            for name, layout in (("one", "fp4"), ("two", "fp4"), ("other", "fp8"))
        )
        decode = decode_server(folder, "decode", "fp4")
        stack.enter_context(running(one[0], decode))
        front = stack.enter_context(router(folder / "router.log", prefill=[one], decode=[decode]))
        answers = {"first": [ask(front, text) for text in PROMPTS]}
        answers["transferred_mb"] = metric_sum(one[0], "sglang:kv_transfer_total_mb_sum")

        wrong = router(folder / "router-other.log", prefill=[other], decode=[decode])
        with other[0], wrong:
            answers["refused"] = [attempt(wrong, text) for text in PROMPTS[:2]]
        answers["failures"] = failures(decode)
        answers["after_refusal"] = ask(front, PROMPTS[0])

        stack.enter_context(two[0])
        both = stack.enter_context(router(folder / "router-both.log", prefill=[one, two], decode=[decode]))
        with ThreadPoolExecutor(4) as pool:
            traffic = [pool.submit(attempt, both, PROMPTS[n % len(PROMPTS)]) for n in range(24)]
            until(lambda: sum(each.done() for each in traffic) >= 4, "four answers")
            answers["killed_after"] = sum(each.done() for each in traffic)
            one[0].process.send_signal(signal.SIGKILL)
            answers["traffic"] = [each.result() for each in traffic]
        answers["after_kill"] = [attempt(both, text) for text in PROMPTS]
        answers["decode_failures"] = failures(decode)
    answers["log"] = decode.log.read_text(errors="replace")
    return answers


JOBS = {"peers": peers}
