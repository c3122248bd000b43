"""Prefill and decode servers behind sglang-router, over transfer engines that work without a network card."""

import signal
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from cluster_questions import PROMPTS, failures, server
from programs import python_path

from sgl_kvpool.commands.evaluate.measure import ask
from sgl_kvpool.commands.processes.local_server import free_port, running
from sgl_kvpool.demo.cluster.servers import metric_sum, peer_arguments, peer_environment, router, until

HERE = Path(__file__).parent


def prefill_server(folder, name, layout, transfer="mooncake_tcp", *arguments, **environment):
    """A prefill server that is not started, and its bootstrap port."""
    port = free_port()
    peer = [*peer_arguments("prefill", transfer, port), *arguments]
    return server(folder, name, layout, *peer, environment={**peer_environment(), **environment}), port


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


def stock_peers(_model_path, folder):
    """Servers without a layout and servers with `bf16`, in pairs, and a decode server with `fp4`."""
    folder.mkdir()
    package = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "stock_models", "PYTHONPATH": python_path(HERE)}
    stock = prefill_server(folder, "stock", "auto", **package)
    bf16 = prefill_server(folder, "bf16", "bf16")
    to_bf16, to_stock, to_fp4 = (
        decode_server(folder, f"to-{layout}", layout) for layout in ("bf16", "auto", "fp4")
    )
    answers = {}
    for name, prefill, decode in (("bf16", stock, to_bf16), ("stock", bf16, to_stock)):
        front = router(folder / f"router-{name}.log", prefill=[prefill], decode=[decode])
        with running(prefill[0], decode), front:
            answers[name] = [attempt(front, text) for text in PROMPTS[:2]]
            if name == "bf16":
                wrong = router(folder / "router-fp4.log", prefill=[prefill], decode=[to_fp4])
                with to_fp4, wrong:
                    answers["refused"] = attempt(wrong, PROMPTS[0])
    answers["log"] = to_bf16.log.read_text(errors="replace")
    return answers


JOBS = {"peers": peers, "stock-peers": stock_peers}
