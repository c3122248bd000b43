"""Clients of a soak: HTTP requests of all kinds, some of them aborted, and their answers."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.soak.prompts import NEW_TOKENS, Prompt

__all__ = ["KINDS", "MANY", "Outcome", "Traffic", "post"]

#: Number of failed requests after which the clients stop.
MANY = 10

#: Kinds of requests, and their relative frequency.
KINDS = {
    "plain": 28,
    "stream": 24,
    "batch": 10,  # several prompts in one request
    "samples": 6,  # one prompt, two samples
    "disconnect_stream": 12,  # the client disconnects after some tokens
    "disconnect": 6,  # the client disconnects while it waits
    "abort": 10,  # by /abort_request
    "too_long": 2,  # the server must refuse it
    "flush": 2,  # mostly refused, because other requests are running
}

_HOST = "127.0.0.1"


@dataclass(frozen=True)
class Outcome:
    """Result of one prompt of one request.

    `prompt`: Number of the prompt.
    `kind`: Name in `KINDS`.
    `log_probabilities`: Log-probabilities of those tokens.
    `complete`: Whether all requested tokens are there; an aborted request has the first tokens, or none.
    `cached`: Tokens of the prompt found on the `device`, `host` and in `storage`.
    """

    prompt: int
    kind: str
    token_ids: list[int]
    log_probabilities: list[float]
    complete: bool
    cached: dict[str, int]


def post(port: int, path: str, body: Any = None, timeout_s: float = 300.0) -> tuple[int, bytes]:
    """Status and body of the answer to a POST request."""
    connection = http.client.HTTPConnection(_HOST, port, timeout=timeout_s)
    try:
        connection.request("POST", path, json.dumps(body or {}), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@dataclass
class Traffic:
    """Concurrent requests of several clients, and their results.

    `port`: Port of the server.
    `seed`: Seed of the clients' requests; their timing is not reproducible.
    `too_long_tokens`: Length of a prompt that the server must refuse.
    `counts`: Requests by kind, and successful flushes as `flushed`.
    `problems`: Violations: failures, and answers that do not fit their request.
    """

    port: int
    prompts: Sequence[Prompt]
    clients: int
    seed: int
    too_long_tokens: int
    outcomes: list[Outcome] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._rngs = [random.Random(f"{self.seed} {client}") for client in range(self.clients)]

    def run(self, seconds: float) -> None:
        """Run all clients for some time, and wait for the last answers."""
        deadline = time.monotonic() + seconds
        threads = [
            threading.Thread(target=self._client, args=(rng, deadline), daemon=True) for rng in self._rngs
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _client(self, rng: random.Random, deadline: float) -> None:
        while time.monotonic() < deadline and len(self.problems) < MANY:
            (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
            with self._lock:
                self.counts[kind] = self.counts.get(kind, 0) + 1
            try:
                getattr(self, f"_{kind}")(rng, kind)
            except Exception as error:  # reported; the other clients continue
                with self._lock:
                    self.problems.append(f"request {kind}: {type(error).__name__}: {error}")

    # ---------------------------------------------------------------- requests

    def _draw(self, rng: random.Random) -> tuple[Prompt, dict[str, Any]]:
        # Two of three requests use a quarter of the prompts, which changes with time and does not fit the
        # pool: some pages are used again soon, others after they were evicted from the device, or from the
        # host.
        if rng.random() < 0.67:
            step = len(self.outcomes) // 20
            span = max(1, len(self.prompts) // 4)
            prompt = self.prompts[(step * span // 2 + rng.randrange(span)) % len(self.prompts)]
        else:
            prompt = rng.choice(self.prompts)
        body = {
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": rng.choice(NEW_TOKENS),
                "ignore_eos": True,
            },
            "return_logprob": True,
            "rid": f"{rng.getrandbits(64):016x}",
        }
        return prompt, body

    def _plain(self, rng: random.Random, kind: str) -> None:
        prompt, body = self._draw(rng)
        status, answer = post(self.port, "/generate", {**body, "input_ids": prompt.token_ids})
        self._take(prompt, kind, body, self._parsed(kind, status, answer))

    def _batch(self, rng: random.Random, kind: str) -> None:
        _, body = self._draw(rng)
        prompts = [self._draw(rng)[0] for _ in range(rng.choice((2, 3, 4)))]
        del body["rid"]  # one id does not fit several prompts
        status, answer = post(self.port, "/generate", {**body, "input_ids": [p.token_ids for p in prompts]})
        answers = self._parsed(kind, status, answer)
        if len(answers) != len(prompts):
            raise ValueError(f"{len(answers)} answers to {len(prompts)} prompts")
        for prompt, one in zip(prompts, answers, strict=True):
            self._take(prompt, kind, body, one)

    def _samples(self, rng: random.Random, kind: str) -> None:
        prompt, body = self._draw(rng)
        del body["rid"]
        body["sampling_params"]["n"] = 2
        status, answer = post(self.port, "/generate", {**body, "input_ids": prompt.token_ids})
        answers = self._parsed(kind, status, answer)
        if len(answers) != 2:
            raise ValueError(f"{len(answers)} samples instead of 2")
        for one in answers:
            self._take(prompt, kind, body, one)

    def _stream(self, rng: random.Random, kind: str) -> None:
        prompt, body = self._draw(rng)
        events = self._events(prompt, body, stop_after=None)
        self._take(prompt, kind, body, events[-1])

    def _disconnect_stream(self, rng: random.Random, kind: str) -> None:
        prompt, body = self._draw(rng)
        body["sampling_params"]["max_new_tokens"] = 64
        events = self._events(prompt, body, stop_after=rng.randrange(0, 12))
        self._take_part(prompt, kind, events[-1] if events else None)

    def _disconnect(self, rng: random.Random, kind: str) -> None:
        prompt, body = self._draw(rng)
        body["sampling_params"]["max_new_tokens"] = 64
        connection = http.client.HTTPConnection(_HOST, self.port, timeout=rng.choice((0.02, 0.1, 0.4, 1.0)))
        try:
            message = json.dumps({**body, "input_ids": prompt.token_ids})
            connection.request("POST", "/generate", message, {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
        except TimeoutError:
            return self._take_part(prompt, kind, None)
        finally:
            connection.close()
        self._take(prompt, kind, body, answer)

    def _abort(self, rng: random.Random, kind: str) -> None:
        prompt, body = self._draw(rng)
        body["sampling_params"]["max_new_tokens"] = 64
        aborter = threading.Timer(
            rng.choice((0.0, 0.05, 0.2, 0.6)), post, (self.port, "/abort_request", {"rid": body["rid"]})
        )
        aborter.start()
        try:
            status, answer = post(self.port, "/generate", {**body, "input_ids": prompt.token_ids})
        finally:
            aborter.join()
        if status != 200:
            if b"bort" not in answer:
                raise ValueError(f"status {status}: {answer[:300]!r}")
            return self._take_part(prompt, kind, None)
        answer = json.loads(answer)
        if answer["meta_info"]["finish_reason"]["type"] == "abort":
            return self._take_part(prompt, kind, answer)
        self._take(prompt, kind, body, answer)

    def _too_long(self, rng: random.Random, kind: str) -> None:
        prompt, body = self._draw(rng)
        ids = (prompt.token_ids * (self.too_long_tokens // len(prompt.token_ids) + 1))[: self.too_long_tokens]
        status, _ = post(self.port, "/generate", {**body, "input_ids": ids})
        if status != 400:
            raise ValueError(f"a prompt of {len(ids)} tokens was not refused but answered {status}")

    def _flush(self, rng: random.Random, kind: str) -> None:
        status, answer = post(self.port, f"/flush_cache?timeout={rng.choice((0, 1))}")
        if status not in (200, 400):
            raise ValueError(f"status {status}: {answer[:300]!r}")
        with self._lock:
            self.counts["flushed"] = self.counts.get("flushed", 0) + (status == 200)

    # ---------------------------------------------------------------- answers

    def _events(self, prompt: Prompt, body: dict[str, Any], stop_after: int | None) -> list[dict[str, Any]]:
        """All events of a stream, or the first ones, after which the client disconnects."""
        connection = http.client.HTTPConnection(_HOST, self.port, timeout=300)
        found: list[dict[str, Any]] = []
        try:
            message = json.dumps({**body, "input_ids": prompt.token_ids, "stream": True})
            connection.request("POST", "/generate", message, {"Content-Type": "application/json"})
            if stop_after == 0:
                return found
            answer = connection.getresponse()
            if answer.status != 200:
                raise ValueError(f"status {answer.status}: {answer.read()[:300]!r}")
            for line in answer:
                if line.startswith(b"data: [DONE]"):
                    return found
                if line.startswith(b"data: "):
                    found.append(self._checked(json.loads(line[6:])))
                    if len(found) == stop_after:
                        connection.sock.shutdown(socket.SHUT_RDWR)
                        return found
        finally:
            connection.close()
        raise ValueError(f"a stream ended after {len(found)} events without saying that it is done")

    def _parsed(self, kind: str, status: int, answer: bytes) -> Any:
        if status != 200:
            raise ValueError(f"status {status}: {answer[:300]!r}")
        return json.loads(answer)

    @staticmethod
    def _checked(answer: dict[str, Any]) -> dict[str, Any]:
        if "error" in answer:
            raise ValueError(f"error {answer['error']}")
        return answer

    def _take(self, prompt: Prompt, kind: str, body: dict[str, Any], answer: dict[str, Any]) -> None:
        """Record a complete answer; ValueError if it is not complete."""
        outcome = _outcome(prompt, kind, answer, complete=True)
        wanted = body["sampling_params"]["max_new_tokens"]
        reason = answer["meta_info"]["finish_reason"]["type"]
        if reason != "length" or len(outcome.token_ids) != wanted:
            raise ValueError(f"{len(outcome.token_ids)} tokens of {wanted}, finished by {reason}")
        with self._lock:
            self.outcomes.append(outcome)

    def _take_part(self, prompt: Prompt, kind: str, answer: dict[str, Any] | None) -> None:
        """Record the partial answer of an aborted request."""
        if answer is None or not answer["output_ids"]:
            # A request that was aborted before its start has no counts.
            outcome = Outcome(prompt.number, kind, [], [], False, {})
        else:
            outcome = _outcome(prompt, kind, answer, complete=False)
        with self._lock:
            self.outcomes.append(outcome)


def _outcome(prompt: Prompt, kind: str, answer: dict[str, Any], *, complete: bool) -> Outcome:
    info = answer["meta_info"]
    scored = info.get("output_token_logprobs") or []
    tokens = answer["output_ids"]
    if [token for _, token, _ in scored] != tokens:
        raise ValueError(f"tokens {tokens} with the log-probabilities of {[t for _, t, _ in scored]}")
    if info["prompt_tokens"] != len(prompt.token_ids):
        raise ValueError(f"{info['prompt_tokens']} prompt tokens of {len(prompt.token_ids)}")
    details = info.get("cached_tokens_details") or {}
    cached = {tier: details.get(tier) or 0 for tier in ("device", "host", "storage")}
    return Outcome(prompt.number, kind, tokens, [value for value, _, _ in scored], complete, cached)
