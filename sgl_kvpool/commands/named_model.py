"""What a user names as a model: a checkpoint's folder, a config.json, or a name on Hugging Face."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["NamedModel", "find_model", "weights_gib"]

_GIB = 1 << 30
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
#: Seconds that Hugging Face may take to send a configuration.
FETCH_LIMIT_S = 20.0
#: All that SGLang reads of a repository before it loads weights: configurations, and the code that they name.
_CONFIGURATION = ("*config.json", "*.py")


@dataclass(frozen=True)
class NamedModel:
    """A model that a command is told to look at.

    Attributes
    ----------
    named : str
        What the user wrote, which the launch command repeats.
    config : str or None
        Text of its config.json; None for a name on Hugging Face, whose is fetched by `sglang_path`.
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
        """Folder in which SGLang finds the configuration.

        Of a name on Hugging Face it is one of Hugging Face's cache, fetched now: SGLang itself would try for
        minutes without a network, once for each server. Of a file under another name than config.json it is
        made for the file.

        Raises
        ------
        ValueError
            Hugging Face does not send the configuration, and its cache does not have it.
        """
        path = Path(self.named)
        if path.is_dir():
            yield str(path.resolve())
            return
        if self.config is None:
            # SGLang looks the name up elsewhere if it is told to.
            elsewhere = os.environ.get("SGLANG_USE_MODELSCOPE", "").lower() in ("1", "true")
            yield self.named if elsewhere else _fetched(self.named)
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


def _fetched(name: str) -> str:
    """Folder with the configuration of a repository on Hugging Face; ValueError if there is none."""
    print(
        f"fetching config.json of {name} from Hugging Face, {FETCH_LIMIT_S:g} s at most ...",
        file=sys.stderr,
        flush=True,
    )
    from huggingface_hub import snapshot_download

    found: list[str] = []
    reasons = [f"no answer in {FETCH_LIMIT_S:g} s"]

    def fetch(**options: bool) -> None:
        try:
            found.append(snapshot_download(name, allow_patterns=list(_CONFIGURATION), **options))
        except Exception as error:  # the library's, the network's and the disk's: each is the reason
            lines = [line for line in str(error).splitlines() if line.strip()]
            reasons.append(lines[0].removeprefix("Got: ") if lines else type(error).__name__)

    # A thread that nothing waits for: the library limits neither a name's look-up nor a connection.
    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    thread.join(FETCH_LIMIT_S)
    reason = reasons[-1]
    if not found:
        fetch(local_files_only=True)
    if found and (Path(found[0]) / "config.json").is_file():
        return found[0]
    reason = "the repository has none" if found else reason
    raise ValueError(
        f"config.json of {name} is neither to be had from Hugging Face nor in its cache here ({reason}); "
        "name a checkpoint's folder or a config.json instead"
    )


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
