#!/usr/bin/env python3
"""Tables of ``docs/accuracy.md``, ``docs/benchmarks.md`` and ``docs/transfer.md``.

    python -m scripts.figures.tables

Errors of forms are computed here, on a CPU, in about ten seconds; all else is read from the JSON files under
``docs/benchmarks/``. Needs SGLang, whose FP4 rows are one of the forms.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scripts import ROOT
from scripts.accuracy.forms import DISTRIBUTIONS, FORMS, LATENTS, latents, relative_error
from scripts.kit.outputs import updated
from sgl_kvpool.commands.tables import markdown
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.memory.arrangement import KVArrangement

DOCS = ROOT / "docs"
#: Layers of DeepSeek-V3, and bytes of an index key in SGLang: 128 e4m3 values and a float32 scale.
LAYERS, INDEX_KEY_BYTES = 61, 128 + 4
LAYOUTS = [layout.value for layout in MLAKVCacheLayout]
#: Operations of `codec_cpu.json`, and what the page calls them.
CODEC = {
    "gather": "gather rows out of a pool and decode them, of a copy of the same bytes",
    "encode": "encode rows, of the same copy",
    "store": "encode rows and store them in a pool, of the same copy",
}
#: Forms of SmolLM2's rows that the page shows, of those in `llm_cpu.json`.
LLM_FORMS = (
    *(f"`{layout}`" for layout in reversed(LATENTS) if layout.is_narrow),
    "SGLang's `fp4_mx_block16`",
    "`fp4`, keys alone",
    "`fp4`, values alone",
    "`fp4` after Hadamard 64",
    "NVFP4, a global scale per layer",
    "`fp8`, k_scale fitted",
)


def _rows(name: str) -> list[dict[str, Any]]:
    """Result rows of a file, with the fields of their cases."""
    found = json.loads((DOCS / "benchmarks" / f"{name}.json").read_text())["results"]
    return [{**row.get("job", {}), **row} for row in found]


def _change(result: Mapping[str, Any] | None, digits: int = 2) -> str:
    """Change of perplexity relative to `bf16`, and its standard error; empty without a result."""
    if result is None or result["difference"] is None:
        return ""
    of = result["difference"]
    change, error = 100 * of["perplexity_change"] + 0.0, 100 * of["standard_error"]
    return f"{change:+.{digits}f} % ({error:.{digits}f})"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def errors_table() -> str:
    """Relative errors of all forms except `bf16`, which stores values unchanged, for every distribution."""
    forms = {name: form for name, form in FORMS.items() if name != "`bf16`"}
    lines = []
    for name in DISTRIBUTIONS:
        errors = [relative_error(latents(name), form(latents(name))) for form in forms.values()]
        lines.append([name, *(f"{error:.3f}" for error in errors)])
    return markdown(["latents", *forms], *lines)


def llm_table() -> str:
    """SmolLM2 for some forms of its rows, and per layout through the server."""
    served = {f"`{one['layout']}`": one for one in _rows("demo_smollm2_cpu")}
    found = {one["name"]: one for one in _rows("llm_cpu")}
    lines = []
    for name in LLM_FORMS:
        top = f"{100 * found[name]['difference']['same_top_token']:.1f} %"
        error = f"{found[name]['relative_error']:.4f}"
        lines.append([name, _change(found[name]), top, error, _change(served.get(name))])
    titles = ["keys, values stored as", "perplexity", "same top token", "error of rows", "through a server"]
    return markdown(titles, *lines)


def bytes_table() -> str:
    """The byte model per layout."""
    lines = []
    for one in _rows("demo_cpu"):
        if one["difference"] is not None:
            top = f"{100 * one['difference']['same_top_token']:.2f} %"
            lines.append([f"`{one['layout']}`", _change(one, 3), top])
    return markdown(["layout", "perplexity", "same top byte"], *lines)


def cpu_table() -> str:
    """Rows, attention and host tier on a CPU, a column per layout."""
    lines: list[list[str]] = []

    def add(text: str, rows: Sequence[dict[str, Any]], cell: Callable[[dict[str, Any]], str]) -> None:
        cells = {one["layout"]: cell(one) for one in rows}
        lines.append([text, *(cells.get(layout, "") for layout in LAYOUTS)])

    for operation, text in CODEC.items():
        rows = [one for one in _rows("codec_cpu") if one["operation"] == operation]
        add(text, rows, lambda one: _percent(one["ratio_to_copy"]))
    for queries in ("bfloat16", "float32"):
        shape = {"heads": 16, "threads": 1, "queries": queries}
        rows = [one for one in _rows("cpu_attention") if shape.items() <= one.items()]
        text = f"CPU time of decode, 16 heads, {queries} queries: torch's / `torch.matmul`'s, of this"
        add(text, rows, lambda one: "{torch:.1f}x / {matmul:.1f}x".format(**one["times_as_fast_as"]))
    for arrangement in KVArrangement.of_rows():
        rows = [one for one in _rows("transfer_cpu") if one.get("arrangement") == arrangement.value]
        add(
            f"engine `cpu`, `{arrangement.value}` pool, to the host / from it, of a contiguous copy", rows,
            lambda one: f"{_percent(one['to_host_of_copy'])} / {_percent(one['to_device_of_copy'])}",
        )  # fmt: skip
    return markdown(["", *(f"`{layout}`" for layout in LAYOUTS)], *lines)


def token_table() -> str:
    """Bytes of a token per layout, of models with DeepSeek-V3's rows."""
    lines = []
    for layout in MLAKVCacheLayout:
        row, sparse = (layout.pool_row_format(512, 64, is_dsa=is_dsa).row_bytes for is_dsa in (False, True))
        token = LAYERS * row
        counts = token, token + row, LAYERS * (sparse + INDEX_KEY_BYTES), 7 * row
        sums = f"{131072 * token / 1e9:.2f}", f"{1e6 / token:.1f}"
        lines.append([f"`{layout}`", *map(str, counts), *sums])
    titles = (
        f"bytes per token | DeepSeek-V3, R1, Kimi-K2: {LAYERS} layers | with an MTP layer | "
        f"DeepSeek-V3.2: {LAYERS} layers and index keys | Kimi-Linear: 7 of 27 layers | "
        f"{LAYERS} layers: prompt of 131072 tokens, GB | tokens in 1 TB, millions"
    )
    return markdown(titles.split(" | "), *lines)


_ACCURACY = {"llm": llm_table, "errors": errors_table, "bytes": bytes_table}
#: Tables by page.
PAGES = {
    DOCS / "accuracy.md": _ACCURACY,
    DOCS / "benchmarks.md": {"cpu": cpu_table},
    DOCS / "transfer.md": {"bytes per token": token_table},
}


if __name__ == "__main__":
    for page, found in PAGES.items():
        page.write_text(updated(page.read_text(), found))
