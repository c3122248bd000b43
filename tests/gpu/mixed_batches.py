"""Prompts that arrive at a server while others decode, which SGLang serves in one batch."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException

from sgl_kvpool.commands.processes.local_server import ServerFailed


def serve(server, log, running, many, prompts, parameters):
    """Answers to prompts that arrive while others decode (None if the server ended), and the log meanwhile.

    `running` are answered with the parameters `many`, `prompts` with `parameters`.

    Without log-probabilities: SGLang does not mix a batch with a request for them (scheduler.py:4379).
    """
    server.get("/flush_cache?timeout=30")
    before = len(log.read_text(errors="replace"))

    def said():
        return log.read_text(errors="replace")[before:]

    try:
        with ThreadPoolExecutor(len(running) + len(prompts)) as threads:
            asked = [threads.submit(server.generate, input_ids=i, sampling_params=many) for i in running]
            while "Decode batch" not in said() and not any(one.done() for one in asked):
                time.sleep(0.02)
            for ids in prompts:
                asked.append(threads.submit(server.generate, input_ids=ids, sampling_params=parameters))
                time.sleep(0.1)
        return [one.result() for one in asked], said()
    except (ServerFailed, OSError, HTTPException):
        time.sleep(2)  # the reason is logged after the connection is gone
        return None, said()


def decoded_with_prompts(said):
    """Tokens that came out of mixed batches: all but each answer's first token and those of decode batches.

    The log has a line for each batch that only decodes, with its number of requests.
    """
    alone = re.findall(r"Decode batch[^\n]*?#running-req: (\d+)", said["mixed_log"])
    return sum(len(answer["output_ids"]) - 1 for answer in said["mixed"]) - sum(map(int, alone))
