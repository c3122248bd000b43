#!/usr/bin/env python3
"""Perplexity of the demo's model with its latents, its rotary values, or both stored in 4 bits.

    python -m scripts.accuracy.rope [--json docs/benchmarks/rope_cpu.json]

Our layouts never store rotary values in 4 bits, unlike SGLang's own FP4 rows, so servers cannot measure all
cases. This script runs the model in float32, in the absorbed form of a server, and attends rows that were
encoded and decoded. Latents and rotary values go through the same functions, our codec's or SGLang's: blocks
of 16 values are independent, so functions for latents also serve rotary values. The script takes two minutes
on one core and needs SGLang.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts.accuracy.forms import RANK, Form, sglang_fp4, stored_as
from scripts.bench.sweep import line
from scripts.kit.outputs import Report, commit, require_writable
from sgl_kvpool.demo.checkpoint import read_model
from sgl_kvpool.demo.measure import Scores, compare_scores
from sgl_kvpool.demo.model import held_out_windows, model_path
from sgl_kvpool.demo.net import ByteMLA, CausalRows
from sgl_kvpool.layout import MLAKVCacheLayout

#: Windows per batch.
BATCH = 4


def bfloat16(values: Tensor) -> Tensor:
    """Values [rows, any] rounded to bf16, as float32."""
    return values.bfloat16().float()


def padded(form: Form, columns: int) -> Form:
    """A form for narrower rows, padded with zeros, which do not affect the blocks before them."""

    def of_narrow(values: Tensor) -> Tensor:
        wide = torch.zeros(len(values), columns, dtype=values.dtype)
        wide[:, : values.shape[1]] = values
        return form(wide)[:, : values.shape[1]]

    return of_narrow


#: Forms by their names in the table.
FORMS: dict[str, Form] = {
    "bf16": bfloat16,
    "e2m1, ue5m3 (`fp4`)": padded(stored_as(MLAKVCacheLayout.FP4), RANK),
    "e2m1, E8M0 (`fp4_mx_block16`)": sglang_fp4,
}
BF16, OURS, SGLANG = FORMS
#: Forms of the latent and of the rotary values. The first case is the reference of the others.
CASES = (
    (BF16, BF16),
    (OURS, BF16),
    (BF16, OURS),
    (OURS, OURS),
    (SGLANG, BF16),
    (BF16, SGLANG),
    (SGLANG, SGLANG),
)


class StoredRows(CausalRows):
    """Causal attention over rows that were encoded in two forms and decoded."""

    def __init__(self, net: ByteMLA, latent: Form, rotary: Form) -> None:
        super().__init__(net.config)
        self._latent, self._rotary = latent, rotary

    def __call__(self, layer: int, q: Tensor, k: Tensor) -> Tensor:
        rows = k.flatten(0, -2).bfloat16()
        rank = self.config.kv_lora_rank
        stored = torch.cat([self._latent(rows[:, :rank]), self._rotary(rows[:, rank:])], -1)
        return super().__call__(layer, q, stored.view_as(k))


@torch.inference_mode()
def scores(net: ByteMLA, attend: CausalRows, windows: list[list[int]]) -> Scores:
    """Teacher-forced predictions of a model for windows of equal length."""
    found: list[list[float]] = []
    top: list[list[int]] = []
    for first in range(0, len(windows), BATCH):
        ids = torch.tensor(windows[first : first + BATCH])
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        logits = net.lm_head(net.hidden_states(ids, positions, attend))[:, :-1]
        predicted = logits.log_softmax(-1)
        found += predicted.gather(-1, ids[:, 1:, None]).squeeze(-1).tolist()
        top += predicted.argmax(-1).tolist()
    return Scores(found, top)


def main() -> None:
    """Score the cases, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file too")
    arguments = parser.parse_args()
    windows = [window.token_ids for window in held_out_windows()]
    scored = sum(len(window) - 1 for window in windows)
    require_writable(parser, arguments.json)
    facts = {"script": "scripts.accuracy.rope", "schema": 2, "commit": commit(), "scored_tokens": scored}
    report = Report(arguments.json, {**facts, "torch": torch.__version__})
    net, reference = read_model(model_path()), None
    for latent, rotary in CASES:
        found = scores(net, StoredRows(net, FORMS[latent], FORMS[rotary]), windows)
        difference = None if reference is None else vars(compare_scores(found, reference))
        reference = reference or found
        row: dict[str, Any] = {"job": {"latent": latent, "rotary": rotary}, "status": "measured"}
        row |= {"perplexity": found.perplexity, "difference": difference}
        report.add(row)
        print(line(row), flush=True)


if __name__ == "__main__":
    main()
