#!/usr/bin/env python3
"""Tables of ``docs/accuracy.md``: errors of each layout on random latents, and perplexity of the models.

    python -m scripts.accuracy.tables [--write | --check]

The errors are computed here, on a CPU, through the codec that servers use, in about ten seconds; the
perplexities are read from the JSON files under ``docs/benchmarks/``. `--write` puts the tables into the page,
`--check` fails if they differ from it. Needs SGLang, whose FP4 rows are one of the peers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from scripts import ROOT
from scripts.figures import page_tables
from sgl_kvpool.codec import decode_rows, encode_rows
from sgl_kvpool.layout import MLAKVCacheLayout

PAGE = ROOT / "docs" / "accuracy.md"
BENCHMARKS = ROOT / "docs" / "benchmarks"
ROWS, RANK = 4096, 512
#: Values that share a scale in 4-bit formats.
BLOCK = 16
#: Largest number of e2m1 and of e4m3.
E2M1_MAX, E4M3_MAX = 6.0, 448.0
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
#: Channels of a latent that are 30 times as large as the others.
OUTLIERS, OUTLIER_FACTOR = 8, 30.0


# -------------------------------------------------------------------- latents


def _normal(sigma: float) -> Callable[[torch.Generator, int], torch.Tensor]:
    return lambda generator, rows: sigma * torch.randn(rows, RANK, generator=generator)


def _student(generator: torch.Generator, rows: int) -> torch.Tensor:
    squares = sum(torch.randn(rows, RANK, generator=generator).square() for _ in range(3))
    return torch.randn(rows, RANK, generator=generator) / (squares / 3).sqrt()


def _log_normal_channels(generator: torch.Generator, rows: int) -> torch.Tensor:
    channels = torch.randn(RANK, generator=generator).exp()
    return torch.randn(rows, RANK, generator=generator) * channels


def _outlier_channels(generator: torch.Generator, rows: int) -> torch.Tensor:
    channels = torch.ones(RANK)
    channels[torch.randperm(RANK, generator=generator)[:OUTLIERS]] = OUTLIER_FACTOR
    return torch.randn(rows, RANK, generator=generator) * channels


#: Name in the table to a function of a generator and a number of rows.
DISTRIBUTIONS = {
    "N(0, 0.003)": _normal(0.003),
    "N(0, 0.02)": _normal(0.02),
    "N(0, 1)": _normal(1.0),
    "N(0, 10)": _normal(10.0),
    "Student's t, 3 degrees": _student,
    "log-normal channels": _log_normal_channels,
    f"{OUTLIERS} channels x{OUTLIER_FACTOR:.0f}": _outlier_channels,
}


def latents(name: str, rows: int = ROWS) -> torch.Tensor:
    """Random latents [rows, 512], bfloat16; the same for the same arguments.

    `name`: Name in `DISTRIBUTIONS`.
    """
    generator = torch.Generator().manual_seed(list(DISTRIBUTIONS).index(name))
    return DISTRIBUTIONS[name](generator, rows).bfloat16()


# -------------------------------------------------------------------- forms


def stored_as(
    layout: MLAKVCacheLayout, *, fitted_scale: bool = False
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that encodes latents in a layout and decodes them, to float32.

    `fitted_scale`: Whether k_scale is the largest magnitude divided by 448 instead of 1.
    """
    fmt = layout.row_format(RANK, 0)

    def through_rows(values: torch.Tensor) -> torch.Tensor:
        k_scale = values.abs().max().item() / E4M3_MAX if fitted_scale else 1.0
        rows = encode_rows(values, None, fmt, k_scale=k_scale)
        return decode_rows(rows, fmt, torch.float32, k_scale=k_scale)

    return through_rows


def sglang_fp4(values: torch.Tensor) -> torch.Tensor:
    """Latents encoded and decoded by SGLang's FP4 functions (``--kv-cache-dtype fp4_mx_block16``)."""
    from sglang.srt.layers.quantization.kvfp4_tensor import FP4MXBlock16KVQuantizeUtil as Law

    # Use the functions without torch.compile, which takes 20 s and gives the same numbers.
    with torch.compiler.set_stance("force_eager"):
        codes, scales = Law.batched_quantize(values.unsqueeze(1))
        return Law.batched_dequantize(codes, scales, torch.float32).squeeze(1)


def nvfp4_without_global_scale(values: torch.Tensor) -> torch.Tensor:
    """NVFP4 in torch, since its kernels need a GPU: e2m1 values, 16 to an e4m3 scale of amax / 6."""
    blocks = values.float().view(len(values), -1, BLOCK)
    scales = (blocks.abs().amax(-1, keepdim=True) / E2M1_MAX).clamp(max=E4M3_MAX)
    scales = scales.to(torch.float8_e4m3fn).float()
    scaled = torch.where(scales > 0, blocks / scales, torch.zeros(()))
    # Nearest of the eight magnitudes; ties hardly affect a sum of squares.
    middles = (E2M1[1:] + E2M1[:-1]) / 2
    nearest = E2M1[torch.bucketize(scaled.abs(), middles)]
    return (nearest * scaled.sign() * scales).view(values.shape)


#: One layout per latent encoding: the first of those that share an encoding.
LATENTS = {layout.latent: layout for layout in reversed(MLAKVCacheLayout)}.values()

#: Columns of the table: functions from latents to decoded latents.
FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{f"`{layout}`": stored_as(layout) for layout in reversed(LATENTS)},
    **{
        f"`{layout}`, k_scale fitted": stored_as(layout, fitted_scale=True)
        for layout in LATENTS
        if layout.latent.uses_k_scale
    },
    "SGLang's `fp4_mx_block16`": sglang_fp4,
    "NVFP4, no global scale": nvfp4_without_global_scale,
}


def relative_error(values: torch.Tensor, back: torch.Tensor) -> float:
    """Root of the sum of squared errors divided by that of squared values, in float64."""
    wanted = values.double()
    return ((back.double() - wanted).norm() / wanted.norm()).item()


# -------------------------------------------------------------------- tables


def errors_table() -> str:
    """Relative error of every form for every distribution, as Markdown."""
    lines = ["| latents | " + " | ".join(FORMS) + " |", "|---" * (1 + len(FORMS)) + "|"]
    for name in DISTRIBUTIONS:
        values = latents(name)
        errors = [relative_error(values, form(values)) for form in FORMS.values()]
        lines.append(f"| {name} | " + " | ".join(f"{error:.3f}" if error else "0" for error in errors) + " |")
    return "\n".join(lines)


#: Forms of SmolLM2's rows that the page shows, of those in `llm_cpu.json`.
LLM_FORMS = (
    *(f"`{layout}`" for layout in reversed(LATENTS) if layout.is_narrow),
    "SGLang's `fp4_mx_block16`",
    "`fp4`, keys alone",
    "`fp4`, values alone",
    "scales amax / 6 and amax / 4",
    "scale amax / 6 alone",
    "`fp4` after Hadamard 64",
    "NVFP4, a global scale per layer",
    "`fp8`, k_scale fitted",
)


def llm_table() -> str:
    """SmolLM2 for some forms of its rows, and per layout through the server, as Markdown."""
    served = {f"`{one['layout']}`": one for one in _results("demo_smollm2_cpu.json")}
    found = {one["name"]: one for one in _results("llm_cpu.json")}
    titles = ["keys, values stored as", "perplexity", "same top token", "error of rows", "through a server"]
    lines = [_line(titles), "|---" * len(titles) + "|"]
    for name in LLM_FORMS:
        top = f"{100 * found[name]['difference']['same_top_token']:.1f} %"
        error = f"{found[name]['relative_error']:.4f}"
        lines.append(_line([name, _change(found[name]), top, error, _change(served.get(name))]))
    return "\n".join(lines)


def bytes_table() -> str:
    """The byte model per layout on the device, and on the host under `bf16`, as Markdown."""
    on_host = {
        one["host_layout"]: one
        for one in _results("host_layout_cpu.json")
        if one["device_layout"] == MLAKVCacheLayout.BF16
    }
    titles = ["layout", "perplexity", "same top byte", "prefix from such a host tier under `bf16`"]
    lines = [_line(titles), "|---" * len(titles) + "|"]
    for one in _results("demo_cpu.json"):
        if one["difference"] is not None:
            top = f"{100 * one['difference']['same_top_token']:.2f} %"
            host = _change(on_host.get(one["layout"]), 3)
            lines.append(_line([f"`{one['layout']}`", _change(one, 3), top, host]))
    return "\n".join(lines)


def rope_table() -> str:
    """The byte model with latent, rotary values or both in 4 bits, from `rope_cpu.json`, as Markdown."""
    titles = ["latent", "rotary values", "perplexity"]
    lines = [_line(titles), "|---" * len(titles) + "|"]
    for one in _results("rope_cpu.json"):
        if one["difference"] is not None:
            lines.append(_line([one["latent"], one["rotary"], _change(one)]))
    return "\n".join(lines)


def _results(file: str) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = json.loads((BENCHMARKS / file).read_text())["results"]
    return results


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _change(result: Mapping[str, Any] | None, digits: int = 2) -> str:
    """Change of perplexity relative to `bf16`, and its standard error; empty without a result."""
    if result is None or result["difference"] is None:
        return ""
    of = result["difference"]
    change, error = 100 * of["perplexity_change"] + 0.0, 100 * of["standard_error"]
    return f"{change:+.{digits}f} % ({error:.{digits}f})"


TABLES = {"llm": llm_table, "errors": errors_table, "bytes": bytes_table, "rope": rope_table}


def updated(text: str) -> str:
    """The page's text with all tables as they are computed now."""
    return page_tables.updated(text, TABLES)


if __name__ == "__main__":
    sys.exit(page_tables.main(__doc__, PAGE, TABLES, "scripts.accuracy.tables"))
