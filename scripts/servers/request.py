"""Requests to a server, and its answers for later comparisons, as JSON between processes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from scripts.servers.questions import Scored
from scripts.servers.shapes import tokens

__all__ = ["PARTS", "Answers", "Request"]

#: Parts of a server's step.
PARTS = ("accuracy", "memory", "throughput", "hits", "gsm8k", "retrieval")


@dataclass(frozen=True)
class Request:
    """Server to start and requests to send, as JSON.

    `model`: Name of the shape, the key of its limits.
    `layout`: None for stock SGLang.
    `arguments`: Server arguments, with the model's path and without the port.
    `parts`: Names in `PARTS`.
    `peers`: Paths of other steps' answers.json, by name: "stock", "bf16", "tp1", "layer_major".
    `prompts`: Prompts that are scored for accuracy: lists of tokens, or texts.
    `vocabulary`, `hit_tokens`, `concurrency`, `request_tokens`, `new_tokens`, `wait_s`: See `shapes.Shape`.
    `evict_tokens`: Tokens that exceed the device's pool; 0 without a host tier.
    `is_sparse`: Whether the model has sparse attention (DSA).
    """

    model: str
    layout: str | None
    arguments: list[str]
    environment: dict[str, str]
    parts: list[str]
    peers: dict[str, str]
    prompts: list
    vocabulary: list[int]
    hit_tokens: int
    concurrency: int
    request_tokens: int
    new_tokens: int
    wait_s: float
    evict_tokens: int = 0
    is_sparse: bool = False
    gsm8k_data: str | None = None
    gsm8k_questions: int = 500
    retrieval_characters: list[int] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    def tokens(self, seed: int, count: int) -> list[int]:
        return tokens(seed, count, (self.vocabulary[0], self.vocabulary[1]))


@dataclass
class Answers:
    """Results of a server for comparisons with later servers.

    `values`: Metric values by name.
    """

    scored: Scored | None = None
    values: dict[str, float] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        (folder / "answers.json").write_text(json.dumps(asdict(self)), "utf-8")

    @classmethod
    def read(cls, path: Path) -> Answers:
        found = json.loads(path.read_text("utf-8"))
        return cls(found["scored"] and Scored(**found["scored"]), found["values"])
