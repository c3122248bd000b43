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
import json
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from scripts.accuracy import tables as accuracy_table
from sgl_kvpool.demo.checkpoint import read_model
from sgl_kvpool.demo.measure import Scores, compare_scores
from sgl_kvpool.demo.model import held_out_windows, model_path
from sgl_kvpool.demo.net import ByteMLA, CausalRows
from sgl_kvpool.layout import MLAKVCacheLayout

SCHEMA = 1
#: Windows per batch.
BATCH = 4

Form = Callable[[Tensor], Tensor]


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
    "e2m1, ue5m3 (`fp4`)": padded(accuracy_table.stored_as(MLAKVCacheLayout.FP4), accuracy_table.RANK),
    "e2m1, E8M0 (`fp4_mx_block16`)": accuracy_table.sglang_fp4,
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


def measure(windows: list[list[int]]) -> Iterator[dict]:
    """Results of all cases, in their order."""
    net = read_model(model_path())
    reference = None
    for latent, rotary in CASES:
        ours = scores(net, StoredRows(net, FORMS[latent], FORMS[rotary]), windows)
        reference = reference or ours
        difference = compare_scores(ours, reference)
        yield {
            "latent": latent,
            "rotary": rotary,
            "perplexity": ours.perplexity,
            "difference": None if ours is reference else vars(difference),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file too")
    arguments = parser.parse_args()
    windows = [window.token_ids for window in held_out_windows()]
    results = []
    for result in measure(windows):
        results.append(result)
        text = f"{result['latent']:32} {result['rotary']:32} {result['perplexity']:.4f}"
        if (change := result["difference"]) is not None:
            percent = (100 * change[name] for name in ("perplexity_change", "standard_error"))
            text += "  {:+.3f} % ({:.3f})".format(*percent)
        print(text, flush=True)
    if arguments.json:
        facts = {
            "schema": SCHEMA,
            "script": "scripts/accuracy/rope.py",
            "machine": platform.machine(),
            "torch": torch.__version__,
            "scored_tokens": sum(len(window) - 1 for window in windows),
        }
        arguments.json.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
