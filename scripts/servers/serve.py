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
from dataclasses import asdict
from functools import partial
from pathlib import Path

from scripts.kit.records import Measurement, write_lines
from scripts.servers.limits import BASELINE, LIMITS, SAME_TOKENS, SAME_TOKENS_SPARSE
from scripts.servers.questions import throughput, wait_for_hits
from scripts.servers.request import PARTS, Answers, Request
from sgl_kvpool.commands.evaluate.measure import Scores, compare_scores, score
from sgl_kvpool.commands.processes.server import FAILURES, Server, ServerFailed, free_port
from sgl_kvpool.layout import MLAKVCacheLayout

_HIT_PROMPTS, _THROUGHPUT_ROUNDS = 3, 4


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
        request, load = self.request, self.request.load
        rounds = [
            [request.tokens(1000 * (number + 1) + i, load.request_tokens) for i in range(load.concurrency)]
            for number in range(_THROUGHPUT_ROUNDS)
        ]
        rate = throughput(server, rounds, load.new_tokens)
        self.tell("throughput", rate, "tokens/s", "server_time", note=f"{load.concurrency} requests at once")
        self.ratio("throughput", "higher")

    def hits(self, server: Server) -> None:
        request, length = self.request, self.request.load.hit_tokens
        prompts = [request.tokens(100 + i, length) for i in range(_HIT_PROMPTS)]
        fillers = [request.tokens(200 + i, length) for i in range(-(-request.evict_tokens // length))]
        found = wait_for_hits(server, prompts, request.tokens(99, length), fillers)
        times = {"cold": found.cold_ms, "device hit": found.device_ms, "host hit": found.host_ms}
        for name, ms in times.items():
            metric = f"time to first token, {name}"
            if ms is None:
                note = "no host tier on this server"
                self.tell(metric, None, "ms", "server_time", "lower", note=note)
                continue
            self.tell(metric, ms, "ms", "server_time", "lower", note=f"prompt of {length} tokens")
            self.ratio(metric, "lower")
        self.tell("found on the device", found.device_share, "", "agreement", at_least=1.0)
        if found.host_ms is not None:
            self.tell("found on the host", found.host_share, "", "agreement", at_least=1.0)
            same = "same tokens after a host hit as after a device hit"
            # Values that are not deterministic in a run are not compared between runs.
            kind, least = (
                ("fact", SAME_TOKENS_SPARSE) if request.load.is_sparse else ("agreement", SAME_TOKENS)
            )
            self.tell(same, found.same_tokens, "", kind, at_least=least)


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
