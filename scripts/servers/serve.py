#!/usr/bin/env python3
"""One server: start, all requests, stop, and comparison with peers that were served before.

    python -m scripts.servers.serve FOLDER

FOLDER contains request.json (a `Request`), and gets measurements.jsonl, answers.json and server.log. Results
of a part are written immediately; a part that fails does not stop the others. GPU and CPU share this code.
"""

import re
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from scripts.kit.records import Measurement, write_lines
from scripts.servers.limits import BASELINE, LIMITS, SAME_TOKENS, SAME_TOKENS_SPARSE
from scripts.servers.request import PARTS, Answers, Request
from scripts.servers.shapes import PAGE_SIZE
from sgl_kvpool.commands.evaluate.measure import Scores, ask, compare_scores, score
from sgl_kvpool.commands.processes.server import FAILURES, Server, ServerFailed, free_port
from sgl_kvpool.layout import MLAKVCacheLayout

_HIT_PROMPTS, _THROUGHPUT_ROUNDS = 3, 4
#: Tokens generated after hits, to check the rows that were found.
_AFTER_HIT = 16


class Asked:
    """Measurements and failures of one server's run."""

    def __init__(self, request: Request, folder: Path):
        self.request, self.folder = request, folder
        self.answers = Answers()
        self.failures: list[str] = []
        self.peers = {
            name: Answers.read(Path(path)) for name, path in request.peers.items() if Path(path).is_file()
        }

    def tell(
        self, metric: str, value: float | None, unit: str, kind: str, better: str = "higher", **more
    ) -> None:
        if value is not None:
            value = float(f"{value:.6g}")
            self.answers.values[metric] = value
        found = Measurement(metric, value, unit, kind, better, layout=self.request.layout or "", **more)
        write_lines(self.folder / "measurements.jsonl", [asdict(found)])
        print(found.verdict, flush=True)

    def ratio(self, metric: str, better: str) -> None:
        """Write the ratio of a metric to that of stock SGLang in the same run, if both exist."""
        mine, stock = self.answers.values.get(metric), self.peers.get("stock")
        if mine is None or "stock" not in self.request.peers:
            return
        name = f"{metric}, ratio to stock"
        theirs = stock.values.get(metric) if stock is not None else None
        if not theirs:
            self.tell(name, None, "x", "server_ratio", better, note="stock SGLang was not measured")
        else:
            self.tell(name, mine / theirs, "x", "server_ratio", better)

    def part(self, name: str, ask: Callable[[], None]) -> None:
        """Run one part; a failure is recorded, and the next part runs."""
        if name not in self.request.parts:
            return
        began = time.monotonic()
        try:
            ask()
        except FAILURES as error:
            traceback.print_exc()
            self.failures.append(f"{name}: {type(error).__name__}: {error}")
        print(f"-- {name}: {time.monotonic() - began:.1f} s", flush=True)

    def accuracy(self, server: Server) -> None:
        """Score the prompts: each token is predicted from the text before it, whatever the server answers."""
        self.answers.prompts = list(self.request.load.prompts)
        self.answers.scores = score(server, self.answers.prompts)
        self.tell("perplexity", self.answers.scores.perplexity, "", "fact", "lower")

    def compare_accuracy(self) -> None:
        """Compare the scores with each peer's; the server has ended."""
        scores, layout = self.answers.scores, self.request.layout
        if scores is None or layout is None:
            return
        limits = LIMITS[self.request.model][layout]
        # The same rows in another arrangement, or computed by two ranks, have the limit of BF16 rows.
        same_rows = LIMITS[self.request.model][BASELINE]
        for name in self.request.peers:
            peer = self.peers.get(name)
            distance, share = f"distance of log-probabilities to {name}", f"same top token as {name}"
            if peer is None or peer.scores is None:
                note = f"{name} was not served, or not scored"
                self.tell(distance, None, "nats", "distance", "lower", note=note)
                self.tell(share, None, "", "agreement", note=note)
                continue
            if peer.prompts != self.answers.prompts:
                raise ValueError("two servers got different prompts: delete the output folder and run again")
            near = limits if name in ("stock", BASELINE) else same_rows
            far = near.far if name == "stock" else None
            note = "if below the lower limit: rows of this layout were not read" if far else ""
            self.tell(
                distance, mean_distance(scores, peer.scores), "nats", "distance", "lower",
                at_most=near.near, at_least=far or None, note=note,
            )  # fmt: skip
            difference = compare_scores(scores, peer.scores)
            self.tell(share, difference.same_top_token, "", "agreement", at_least=near.same_top)
            self.tell(f"perplexity, change to {name}", difference.perplexity_change, "", "fact", "lower")

    def memory(self, server: Server) -> None:
        info, log = server.info(), server.log.read_text(errors="replace")
        served = info.get("kv_cache_layout")
        if served != self.request.layout:
            raise ValueError(f"the server says it serves {served!r}, not {self.request.layout!r}")
        self.tell("tokens in the pool", info["max_total_num_tokens"], "tokens", "size")
        state = info["internal_states"][0]
        self.tell("memory of the pool", state["memory_usage"]["kvcache"], "GB", "fact", "lower")
        if self.request.layout is not None:
            said = re.search(r"KV cache layout \S+: (\d+) bytes per token and layer, (\d+) layers", log)
            if said is None:
                raise ValueError("the server's log does not say how many bytes a row has")
            exact = MLAKVCacheLayout(self.request.layout).row_format(512, 64).row_bytes
            self.tell(
                "bytes per token and layer", int(said[1]), "bytes", "size", "lower", at_least=exact,
                at_most=exact,
            )  # fmt: skip
            self.tell("layers with rows", int(said[2]), "layers", "size")
        self.ratio("tokens in the pool", "higher")

    def throughput(self, server: Server) -> None:
        """Generated tokens per second with concurrent requests, all different to avoid cache hits."""
        request, load = self.request, self.request.load
        sampling = {"temperature": 0, "max_new_tokens": load.new_tokens, "ignore_eos": True}

        def answer(ids: list[int]) -> int:
            said = server.generate(input_ids=ids, sampling_params=sampling)
            return said["meta_info"]["completion_tokens"]

        rates = []
        with ThreadPoolExecutor(load.concurrency) as threads:
            for seed in range(1000, 1000 * (_THROUGHPUT_ROUNDS + 1), 1000):
                prompts = [request.tokens(seed + i, load.request_tokens) for i in range(load.concurrency)]
                began = time.perf_counter()
                count = sum(threads.map(answer, prompts))
                rates.append(count / (time.perf_counter() - began))
        # The first round compiles; the best other round counts.
        note = f"{load.concurrency} requests at once"
        self.tell("throughput", max(rates[1:]), "tokens/s", "server_time", note=note)
        self.ratio("throughput", "higher")

    def hits(self, server: Server) -> None:
        """Time the first token of prompts: cold, repeated, and again after others have evicted them."""
        request, length = self.request, self.request.load.hit_tokens
        prompts = [request.tokens(100 + i, length) for i in range(_HIT_PROMPTS)]

        def first_tokens(name: str) -> list[dict[str, Any]]:
            answers, times = [], []
            for ids in prompts:
                began = time.perf_counter()
                answers.append(ask(server, ids, new_tokens=1))
                times.append((time.perf_counter() - began) * 1e3)
            metric, note = f"time to first token, {name}", f"prompt of {length} tokens"
            self.tell(metric, statistics.median(times), "ms", "server_time", "lower", note=note)
            self.ratio(metric, "lower")
            return answers

        def after_hits() -> list[int]:
            return [token for ids in prompts for token in ask(server, ids, _AFTER_HIT)["ids"]]

        def found(answers: list[dict[str, Any]], place: str) -> None:
            # Full pages without the last token; without --enable-cache-report only their sum is known.
            whole = (length - 1) // PAGE_SIZE * PAGE_SIZE
            hits = [(one["details"] or {"device": one["cached"]}).get(place, 0) for one in answers]
            self.tell(f"found on the {place}", min(hits) / whole, "", "agreement", at_least=1.0)

        for _ in range(2):  # compiles the kernels of that length
            ask(server, request.tokens(99, length), new_tokens=1)
        first_tokens("cold")
        found(first_tokens("device hit"), "device")
        tokens = after_hits()
        if not request.evict_tokens:
            note = "no host tier on this server"
            self.tell("time to first token, host hit", None, "ms", "server_time", "lower", note=note)
            return
        time.sleep(1.0)  # backups are written after the answers
        for i in range(-(-request.evict_tokens // length)):
            ask(server, request.tokens(200 + i, length), new_tokens=1)
        found(first_tokens("host hit"), "host")
        # Values that are not deterministic in a run are not compared between runs.
        kind, least = ("fact", SAME_TOKENS_SPARSE) if request.load.is_sparse else ("agreement", SAME_TOKENS)
        same = statistics.fmean(a == b for a, b in zip(tokens, after_hits(), strict=True))
        self.tell("same tokens after a host hit as after a device hit", same, "", kind, at_least=least)


def mean_distance(scores: Scores, other: Scores) -> float:
    """Mean absolute difference of log-probabilities, nats."""
    pairs = zip(scores.log_probabilities, other.log_probabilities, strict=True)
    return statistics.fmean(abs(a - b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))


def run(request: Request, folder: Path) -> list[str]:
    """Serve, send requests, compare; returns the failures."""
    asked = Asked(request, folder)
    arguments = [*request.arguments, "--port", str(free_port())]
    began = time.monotonic()
    try:
        with Server(arguments, folder / "server.log", request.environment, request.wait_s) as server:
            asked.tell("start of the server", time.monotonic() - began, "s", "fact", "lower")
            for name in PARTS:
                asked.part(name, partial(getattr(asked, name), server))
    except ServerFailed as error:
        asked.failures.append(str(error))
    asked.answers.write(folder)
    asked.part("accuracy", asked.compare_accuracy)
    return asked.failures


def _short(failure: str) -> str:
    """First and last line of a failure; the last line of a server's failure is the end of its log."""
    lines = [line.strip()[:200] for line in failure.strip().splitlines() if line.strip()]
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"


def main() -> int:
    """Read the request and run it; the last printed line names the failures."""
    # The server runs in its own session, so it must be stopped by leaving the `with` block.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))
    folder = Path(sys.argv[1])
    request = Request.from_json((folder / "request.json").read_text("utf-8"))
    for stale in ("measurements.jsonl", "answers.json"):
        (folder / stale).unlink(missing_ok=True)
    failures = run(request, folder)
    if failures:
        print("failed: " + "; ".join(map(_short, failures)))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
