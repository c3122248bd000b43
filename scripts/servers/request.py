"""Options of a run; requests to a server, and its answers for comparisons, as JSON between processes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scripts.servers.shapes import LAYOUTS, Load, tokens
from sgl_kvpool.commands.evaluate.measure import Scores

#: Parts of a server's step.
PARTS = ("accuracy", "memory", "throughput", "hits")


@dataclass(frozen=True)
class Options:
    """The user's options.

    `models`: Folder for random checkpoints.
    `time_limit_scale`: Factor of the time limits of servers' starts. The runner scales the steps' limits.
    """

    core: bool = False
    quick: bool = False
    thorough: bool = False
    on_gpu: bool = True
    layouts: tuple[str, ...] = LAYOUTS
    models: str = "models"
    time_limit_scale: float = 1.0


@dataclass(frozen=True)
class Request:
    """Server to start and requests to send, as JSON.

    `model`: Name of the shape, the key of its limits.
    `layout`: None for stock SGLang.
    `arguments`: Server arguments, with the model's path and without the port.
    `parts`: Names in `PARTS`.
    `peers`: Paths of other steps' answers.json, by name: "stock", "bf16", "tp1", "layer_major".
    `evict_tokens`: Tokens that exceed the device's pool; 0 without a host tier.
    """

    model: str
    layout: str | None
    arguments: list[str]
    environment: dict[str, str]
    parts: list[str]
    peers: dict[str, str]
    load: Load
    wait_s: float
    evict_tokens: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Request:
        found = json.loads(text)
        return cls(**{**found, "load": Load(**found["load"])})

    def tokens(self, seed: int, count: int) -> list[int]:
        return tokens(seed, count, self.load.vocabulary)


@dataclass
class Answers:
    """Results of a server for comparisons with later servers.

    `prompts`: Tokens of the scored prompts.
    `values`: Metric values by name.
    """

    prompts: list[list[int]] = field(default_factory=list)
    scores: Scores | None = None
    values: dict[str, float] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        (folder / "answers.json").write_text(json.dumps(asdict(self)), "utf-8")

    @classmethod
    def read(cls, path: Path) -> Answers:
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
        return cls(found["prompts"], found["scores"] and Scores(**found["scores"]), found["values"])
