"""Models as users name them: a checkpoint's folder, a config.json, or a name on Hugging Face."""

import contextlib
import hashlib
import json
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_GIB = 1 << 30
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
#: Bytes of weights in `metadata` of a checkpoint's index, and of the file that a pointer of git-lfs replaces.
_TOTAL_SIZE = re.compile(rb'"total_size"\s*:\s*(\d{1,18})')
_FILE = re.compile(rb'"([^"/]+\.safetensors)"')
_LFS_POINTER = re.compile(rb"version https://git-lfs.*^size (\d{1,18})$", re.DOTALL | re.MULTILINE)
#: Time limit for fetching a configuration from Hugging Face, in seconds.
FETCH_LIMIT_S = 20.0
#: Files that decide what a server computes.
_COMPUTING = ("*config.json", "*.py", "*.index.json", "*token*", "*.safetensors", "*.bin", "*.pt", "*.gguf")


@dataclass(frozen=True)
class NamedModel:
    """A model that is an argument of a command."""

    named: str
    #: Text of its config.json; None for a name on Hugging Face, for which `sglang_path` fetches it.
    config: str | None
    #: Size of all its safetensors files, in units of 2^30 bytes; None without such files.
    weights_gib: float | None

    @property
    def launch_path(self) -> str:
        """Value of --model-path; MODEL if the user named a file with another name than config.json."""
        path = Path(self.named)
        if not path.is_file():
            return self.named
        return str(path.parent) if path.name == "config.json" else "MODEL"

    @contextlib.contextmanager
    def sglang_path(self, trust_remote_code: bool = False) -> Iterator[str]:
        """Folder in which SGLang finds the configuration; with SGLANG_USE_MODELSCOPE the name on that hub.

        For a name on Hugging Face this is a folder of Hugging Face's cache, fetched now: without a network
        SGLang itself would retry for minutes, once per server. For a file with another name than config.json
        a temporary folder is made. Code is fetched with `trust_remote_code` only.

        ValueError if Hugging Face does not send the configuration, and its cache does not have it.
        """
        path = Path(self.named)
        if path.is_dir():
            yield str(path.resolve())
            return
        if self.config is None:
            # SGLang can be configured to use another hub.
            elsewhere = os.environ.get("SGLANG_USE_MODELSCOPE", "").lower() in ("1", "true")
            yield self.named if elsewhere else _fetched(self.named, trust_remote_code)
            return
        if path.name == "config.json":  # files that it names, such as code, lie beside it
            yield str(path.resolve().parent)
            return
        with tempfile.TemporaryDirectory(prefix="sgl-kvpool-model-") as folder:
            (Path(folder) / "config.json").write_text(self.config, encoding="utf-8")
            yield folder


def weights_gib(folder: Path) -> float | None:
    """Size of a checkpoint's safetensors files, in units of 2^30 bytes; None without such files.

    Files that are not here yet count: pointers of git-lfs with the size that they name, and missing ones by
    the index.
    """
    size_bytes = sum(map(_size_bytes, folder.glob("*.safetensors")))
    index = folder / "model.safetensors.index.json"
    text = index.read_bytes() if index.is_file() else b""
    total = _TOTAL_SIZE.search(text)
    if total and not all((folder / name.decode()).is_file() for name in set(_FILE.findall(text))):
        size_bytes = max(size_bytes, int(total[1]))
    return size_bytes / _GIB if size_bytes else None


def fingerprint(words: Sequence[str]) -> str:
    """Digest of the files and checkpoints among the words of a command, by size and time of change."""
    parts = (part for word in words for part in (word, word.partition("=")[2]) if os.path.exists(part))
    files = {x for part in parts for x in (Path(part), *(f for p in _COMPUTING for f in Path(part).glob(p)))}
    found = [(str(x), x.stat().st_size, x.stat().st_mtime_ns) for x in sorted(files) if x.is_file()]
    return hashlib.sha256(repr(found).encode(errors="replace")).hexdigest()


def _size_bytes(file: Path) -> int:
    size_bytes = file.stat().st_size
    pointer = size_bytes < 1024 and _LFS_POINTER.match(file.read_bytes())
    return int(pointer[1]) if pointer else size_bytes


def _fetched(name: str, with_code: bool) -> str:
    """Folder with the configuration of a repository on Hugging Face; ValueError if it is not available."""
    print(
        f"fetching config.json of {name} from Hugging Face, {FETCH_LIMIT_S:g} s at most ...",
        file=sys.stderr,
        flush=True,
    )
    from huggingface_hub import snapshot_download

    found: list[str] = []
    # What SGLang reads before it loads weights: configurations, and code that they name.
    wanted = ["*config.json", *["*.py"] * with_code]
    reasons = [f"no answer in {FETCH_LIMIT_S:g} s"]

    def fetch(**options: bool) -> None:
        try:
            found.append(snapshot_download(name, allow_patterns=wanted, **options))
        except Exception as error:  # of the library, the network or the disk: reported as the reason
            lines = [line for line in str(error).splitlines() if line.strip()]
            reasons.append(lines[0].removeprefix("Got: ") if lines else type(error).__name__)

    # A daemon thread: the library has no time limit for name resolution and connection.
    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    thread.join(FETCH_LIMIT_S)
    reason = reasons[-1]
    if not found:
        fetch(local_files_only=True)
    if found and (Path(found[0]) / "config.json").is_file():
        return found[0]
    reason = "the repository has no config.json" if found else reason
    raise ValueError(
        f"config.json of {name} is neither available from Hugging Face nor in its cache ({reason}); "
        "name a checkpoint's folder or a config.json instead"
    )


def find_model(named: str) -> NamedModel:
    """The model of a folder with a config.json, of such a file under any name, or `owner/name` on the hub.

    ValueError if `named` is not a folder, file or name as above, or the file is not a JSON object.
    """
    path = Path(named)
    if not named or not path.exists():  # Path("") is the current folder
        if _HUB_NAME.fullmatch(named):
            return NamedModel(named, None, None)
        raise ValueError(
            f"{named!r} does not exist; name a checkpoint's folder, a config.json, or a model as owner/name"
        )
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{named} has no config.json; name a checkpoint's folder or the file itself")
    text = file.read_text(encoding="utf-8", errors="replace")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} is not a model configuration: it contains a {type(config).__name__}")
    return NamedModel(named, text, weights_gib(path) if path.is_dir() else None)
