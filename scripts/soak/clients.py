"""Clients of a soak: HTTP requests of all kinds, some of them aborted, and their answers."""

import contextlib
import http.client
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.soak.prompts import NEW_TOKENS, Prompt

#: Concurrent clients, and failed requests after which they stop.
CLIENTS, MANY = 6, 10

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


@contextlib.contextmanager
def _posted(
    port: int, path: str, body: Any, timeout_s: float = 300.0
) -> Iterator[http.client.HTTPConnection]:
    """A connection over which a request was sent."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        yield connection
    finally:
        connection.close()


def post(port: int, path: str, body: Any = None) -> tuple[int, bytes]:
    """Status and body of the answer to a POST request."""
    with _posted(port, path, body or {}) as connection:
        answer = connection.getresponse()
        return answer.status, answer.read()


def _parsed(status: int, answer: bytes) -> Any:
    if status != 200:
        raise ValueError(f"status {status}: {answer[:300]!r}")
    return json.loads(answer)


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
    seed: int
    too_long_tokens: int
    outcomes: list[Outcome] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._rngs = [random.Random(f"{self.seed} {client}") for client in range(CLIENTS)]

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
                self.counts[kind] += 1
            try:
                getattr(self, f"_{kind}")(rng, kind)
            except Exception as error:  # reported; the other clients continue
                with self._lock:
                    self.problems.append(f"request {kind}: {type(error).__name__}: {error}")

    def _prompt(self, rng: random.Random) -> Prompt:
        # Two of three requests use a quarter of the prompts, which changes with time and does not fit the
        # pool: some pages are used again soon, others after they were evicted from the device, or from the
        # host.
        if rng.random() < 0.67:
            step = len(self.outcomes) // 20
            span = max(1, len(self.prompts) // 4)
            return self.prompts[(step * span // 2 + rng.randrange(span)) % len(self.prompts)]
        return rng.choice(self.prompts)

    def _body(self, rng: random.Random, prompt: Prompt, new_tokens: int | None = None) -> dict[str, Any]:
        count = new_tokens or rng.choice(NEW_TOKENS)
        return {
            "sampling_params": {"temperature": 0, "max_new_tokens": count, "ignore_eos": True},
            "return_logprob": True,
            "rid": f"{rng.getrandbits(64):016x}",
            "input_ids": prompt.token_ids,
        }

    def _plain(self, rng: random.Random, kind: str) -> None:
        prompt = self._prompt(rng)
        body = self._body(rng, prompt)
        self._take(prompt, kind, body, _parsed(*post(self.port, "/generate", body)))

    def _batch(self, rng: random.Random, kind: str) -> None:
        prompts = [self._prompt(rng) for _ in range(rng.choice((2, 3, 4)))]
        body = self._body(rng, prompts[0])
        self._take_all(prompts, kind, {**body, "input_ids": [prompt.token_ids for prompt in prompts]})

    def _samples(self, rng: random.Random, kind: str) -> None:
        prompt = self._prompt(rng)
        body = self._body(rng, prompt)
        body["sampling_params"]["n"] = 2
        self._take_all([prompt, prompt], kind, body)

    def _take_all(self, prompts: Sequence[Prompt], kind: str, body: dict[str, Any]) -> None:
        """Send a request with several answers, one for each of the prompts."""
        del body["rid"]  # one id does not fit several answers
        answers = _parsed(*post(self.port, "/generate", body))
        if len(answers) != len(prompts):
            raise ValueError(f"{len(answers)} answers instead of {len(prompts)}")
        for prompt, one in zip(prompts, answers, strict=True):
            self._take(prompt, kind, body, one)

    def _stream(self, rng: random.Random, kind: str) -> None:
        prompt = self._prompt(rng)
        body = self._body(rng, prompt)
        self._take(prompt, kind, body, self._events(body, stop_after=None)[-1])

    def _disconnect_stream(self, rng: random.Random, kind: str) -> None:
        prompt = self._prompt(rng)
        events = self._events(self._body(rng, prompt, 64), stop_after=rng.randrange(0, 12))
        self._take_part(prompt, kind, events[-1] if events else None)

    def _disconnect(self, rng: random.Random, kind: str) -> None:
        prompt = self._prompt(rng)
        body = self._body(rng, prompt, 64)
        try:
            with _posted(self.port, "/generate", body, rng.choice((0.02, 0.1, 0.4, 1.0))) as connection:
                answer = json.loads(connection.getresponse().read())
        except TimeoutError:
            return self._take_part(prompt, kind, None)
        self._take(prompt, kind, body, answer)

    def _abort(self, rng: random.Random, kind: str) -> None:
        prompt = self._prompt(rng)
        body = self._body(rng, prompt, 64)
        aborter = threading.Timer(
            rng.choice((0.0, 0.05, 0.2, 0.6)), post, (self.port, "/abort_request", {"rid": body["rid"]})
        )
        aborter.start()
        try:
            status, answer = post(self.port, "/generate", body)
        finally:
            aborter.join()
        if status != 200 and b"bort" in answer:
            return self._take_part(prompt, kind, None)
        found = _parsed(status, answer)
        if found["meta_info"]["finish_reason"]["type"] == "abort":
            return self._take_part(prompt, kind, found)
        self._take(prompt, kind, body, found)

    def _too_long(self, rng: random.Random, kind: str) -> None:
        prompt = self._prompt(rng)
        ids = (prompt.token_ids * (self.too_long_tokens // len(prompt.token_ids) + 1))[: self.too_long_tokens]
        status, _ = post(self.port, "/generate", {**self._body(rng, prompt), "input_ids": ids})
        if status != 400:
            raise ValueError(f"a prompt of {len(ids)} tokens was not refused but answered {status}")

    def _flush(self, rng: random.Random, kind: str) -> None:
        status, answer = post(self.port, f"/flush_cache?timeout={rng.choice((0, 1))}")
        if status not in (200, 400):
            raise ValueError(f"status {status}: {answer[:300]!r}")
        with self._lock:
            self.counts["flushed"] += status == 200

    def _events(self, body: dict[str, Any], stop_after: int | None) -> list[dict[str, Any]]:
        """All events of a stream, or the first ones, after which the client disconnects."""
        found: list[dict[str, Any]] = []
        with _posted(self.port, "/generate", {**body, "stream": True}) as connection:
            if stop_after == 0:
                return found
            answer = connection.getresponse()
            if answer.status != 200:
                raise ValueError(f"status {answer.status}: {answer.read()[:300]!r}")
            for line in answer:
                if line.startswith(b"data: [DONE]"):
                    return found
                if line.startswith(b"data: "):
                    found.append(json.loads(line[6:]))
                    if "error" in found[-1]:
                        raise ValueError(f"error {found[-1]['error']}")
                    if len(found) == stop_after:
                        connection.sock.shutdown(socket.SHUT_RDWR)
                        return found
        raise ValueError(f"a stream ended after {len(found)} events without saying that it is done")

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
        """Record the partial answer of an aborted request; one aborted before its start has no counts."""
        outcome = Outcome(prompt.number, kind, [], [], False, {})
        if answer is not None and answer["output_ids"]:
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
