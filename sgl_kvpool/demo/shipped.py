"""The demo's trained model, and its held-out text.

``byte_mla_python/`` is a checkpoint like any other (:mod:`sgl_kvpool.demo.checkpoint`); its README.md
describes the training. A wheel of the package lacks the weights, which are a distribution of their own,
``sgl-kvpool-demo-model``. Importing this module imports neither torch nor SGLang.
"""

import json
from pathlib import Path
from typing import NamedTuple

_FOLDER = Path(__file__).resolve().parent / "byte_mla_python"


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
