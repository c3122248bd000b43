"""GSM8K through SGLang's own evaluator.

Uses `sglang.test.run_eval` of 0.5.23, which is deprecated in favour of the package `sgl-eval`. For long
contexts SGLang ships data sets for its benchmark (`longbench_v2`) but no evaluator, so retrieval uses the
hidden number of questions.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

__all__ = ["gsm8k"]

#: Examples in the prompt, SGLang's default; they are the first lines of the data.
_SHOTS = 5
_LIMIT_S = 3600


def gsm8k(port: int, questions: int, data: str | None, log: Path) -> float:
    """Share of correctly answered questions.

    `port`: Port of a running server on this machine.
    `questions`: Largest number of questions.
    `data`: GSM8K's test.jsonl; without it SGLang downloads it.
    `log`: File for the evaluator's output.
    ValueError: if the evaluator failed, printed no score, or got no answer.
    """
    command = [
        *(sys.executable, "-m", "sglang.test.run_eval", "--base-url", f"http://127.0.0.1:{port}"),
        *("--eval-name", "gsm8k", "--api", "completion", "--num-examples", str(questions)),
        *("--num-shots", str(_SHOTS), "--num-threads", "64", "--max-tokens", "512", "--temperature", "0"),
        *(("--gsm8k-data-path", str(data)) if data is not None else ()),
    ]
    # The server is local and needs no proxy, unlike the data.
    past = ",".join(filter(None, (os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), "127.0.0.1")))
    environment = {**os.environ, "no_proxy": past, "NO_PROXY": past}
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment,
                timeout=_LIMIT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise ValueError(
                f"SGLang's evaluator took more than {_LIMIT_S} s; its output is in {log}"
            ) from None
    text = log.read_text(errors="replace")
    found = re.search(r"^Score: ([0-9.]+)$", text, re.MULTILINE)
    if done.returncode != 0 or found is None:
        last = (text.strip().splitlines() or ["no output"])[-1][:300]
        hint = "" if data is not None else "; without a network, give the data with --gsm8k-data FILE"
        raise ValueError(f"SGLang's evaluator ended with status {done.returncode}: {last}{hint}")
    # A failed request is scored as a wrong answer, so a server without any answer has a score too.
    if not re.search(r"^Output throughput: ", text, re.MULTILINE):
        raise ValueError(f"SGLang's evaluator got no answer from the server; its output is in {log}")
    return float(found[1])
