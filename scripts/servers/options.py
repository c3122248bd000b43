"""Options of a run."""

from __future__ import annotations

from dataclasses import dataclass

from scripts.servers.shapes import ARRANGEMENTS, LAYOUTS

__all__ = ["Options"]


@dataclass(frozen=True)
class Options:
    """The user's options.

    `arrangements_named`: Whether the user named arrangements; otherwise a real checkpoint, and every model on
      a CPU, is served only in `layer_major`.
    `models`: Folder for random checkpoints.
    `time_limit_scale`: Factor of the time limits of servers' starts. The runner scales the steps' limits.
    """

    core: bool = False
    quick: bool = False
    thorough: bool = False
    on_gpu: bool = True
    layouts: tuple[str, ...] = LAYOUTS
    arrangements: tuple[str, ...] = ARRANGEMENTS
    arrangements_named: bool = False
    model: str | None = None
    tp: int = 1
    server_arguments: tuple[str, ...] = ()
    server_environment: tuple[tuple[str, str], ...] = ()
    gsm8k_data: str | None = None
    gsm8k_questions: int = 500
    retrieval_characters: tuple[int, ...] = (16_000, 64_000, 200_000)
    models: str = "models"
    time_limit_scale: float = 1.0
