"""What a user names as a model: a checkpoint's folder, a config.json, or a name on Hugging Face."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["NamedModel", "find_model", "weights_gib"]

_GIB = 1 << 30
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class NamedModel:
    """A model that a command is told to look at.

    Attributes
    ----------
    named : str
        What the user wrote, which the launch command repeats.
    config : str or None
        Text of its config.json; None for a name on Hugging Face, which SGLang looks up itself.
    weights_gib : float or None
        Of all its safetensors files, in units of 2^30 bytes; None where there are none.
    """

    named: str
    config: str | None
    weights_gib: float | None

    @property
    def launch_path(self) -> str:
        """What --model-path would be; MODEL for a file that is no checkpoint's."""
        path = Path(self.named)
        if not path.is_file():
            return self.named
        return str(path.parent) if path.name == "config.json" else "MODEL"

    @contextlib.contextmanager
    def sglang_path(self) -> Iterator[str]:
        """What SGLang finds the configuration by; of a file under another name, a folder made for it."""
        path = Path(self.named)
        if self.config is None or path.is_dir():
            yield str(path.resolve()) if path.is_dir() else self.named
            return
        if path.name == "config.json":  # what it names, as code of its own, lies beside it
            yield str(path.resolve().parent)
            return
        with tempfile.TemporaryDirectory(prefix="sgl-kvpool-model-") as folder:
            (Path(folder) / "config.json").write_text(self.config, encoding="utf-8")
            yield folder


def weights_gib(folder: Path) -> float | None:
    """Size of a checkpoint's safetensors files, in units of 2^30 bytes; None without any."""
    size_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return size_bytes / _GIB if size_bytes else None


def find_model(named: str) -> NamedModel:
    """Find a model.

    Parameters
    ----------
    named : str
        Folder with a config.json, such a file under any name, or `owner/name` on Hugging Face.

    Raises
    ------
    ValueError
        None of these, or the file is no JSON object.
    """
    path = Path(named)
    if not path.exists():
        if _HUB_NAME.fullmatch(named):
            return NamedModel(named, None, None)
        raise ValueError(
            f"{named} does not exist; name a checkpoint's folder, a config.json, or a model as owner/name"
        )
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{named} has no config.json; name a checkpoint's folder or the file itself")
    text = file.read_text(encoding="utf-8", errors="replace")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} is no configuration of a model: it holds a {type(config).__name__}")
    return NamedModel(named, text, weights_gib(path) if path.is_dir() else None)
