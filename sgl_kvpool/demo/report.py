"""The demo's results as a table, as JSON and as a plot. Imports neither torch nor SGLang."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from sgl_kvpool.demo.measure import Difference, Greedy, HostHit
from sgl_kvpool.layout import MLAKVCacheLayout

__all__ = ["SCHEMA", "Result", "table", "write_json", "write_plot"]

SCHEMA = 1


@dataclass(frozen=True)
class Result:
    """What one layout's server did.

    Attributes
    ----------
    layout : str
        As the server reports it.
    row_bytes : int
        Bytes of one token in one layer.
    pool_bytes : int
        Bytes all servers were given for rows.
    tokens : int
        Tokens that the server says fit into them.
    attention_backend : str
        As the server reports it.
    start_seconds, scoring_seconds : float
        Until the server answered; until all held-out text was scored.
    perplexity : float
        Per token, over the windows.
    difference : Difference or None
        To BF16; None for BF16 itself and if BF16 was not served.
    greedy : list of Greedy
        What follows each of the prompts for greedy text.
    host_hit : HostHit or None
        A prompt that other requests had pushed out of the pool; None on a machine without the memory.
    answer : str or None
        To the question that a chat model is asked.
    """

    layout: str
    row_bytes: int
    pool_bytes: int
    tokens: int
    attention_backend: str
    start_seconds: float
    scoring_seconds: float
    perplexity: float
    difference: Difference | None
    greedy: list[Greedy]
    host_hit: HostHit | None = None
    answer: str | None = None


def table(results: Sequence[Result], token: str, question: str | None = None) -> str:
    """The results as text: a table, what came back from the host tier, what was answered to a question.

    `token` is what the model's tokens are called.
    """
    lines = [
        f"{'layout':16} {'bytes per token':>15} {'tokens in':>11} {'perplexity':>11} {'change to bf16':>18} "
        f"{f'top {token}':>9}",
        f"{'':16} {'and layer':>15} {'same memory':>11} {f'per {token}':>11} {'(standard error)':>18} "
        f"{'as bf16':>9}",
    ]
    for result in results:
        change, same = "-", "-"
        if result.difference is not None:
            error = f"{100 * result.difference.standard_error:.2f}"
            change = f"{_percent(result.difference)} ({error})"
            same = f"{100 * result.difference.same_top_token:.2f} %"
        lines.append(
            f"{result.layout:16} {result.row_bytes:15} {result.tokens:11} {result.perplexity:11.4f} "
            f"{change:>18} {same:>9}"
        )
    if not any(result.layout == MLAKVCacheLayout.BF16.value for result in results):
        lines.append("(no differences: bf16 was not among --layouts)")
    lines += ["", *_host_lines(results)]
    if question is not None:
        lines += ["", f"{question!r} is answered, greedily:", ""]
        for result in results:
            indented = textwrap.wrap(result.answer or "", 90) or [""]
            lines += [
                f"{name:16} {line}" for name, line in zip_longest([result.layout], indented, fillvalue="")
            ]
    return "\n".join(lines)


def _host_lines(results: Sequence[Result]) -> list[str]:
    """What the host tier gave back, in one line if it is the same for all layouts."""
    lines = {}
    for result in results:
        hit = result.host_hit
        if hit is None:
            lines[result.layout] = (
                "not shown, SGLang keeps 10 GiB of memory free and this machine has not as much"
            )
            continue
        verdict = "as" if hit.same_tokens else "NOT as"
        lines[result.layout] = (
            f"{hit.host_tokens} of {hit.prompt_tokens} tokens of an evicted prompt came back from host "
            f"memory; the next {hit.generated_tokens} are {verdict} after a hit on the device"
        )
    if len(set(lines.values())) == 1:
        which = ", every layout" if len(lines) > 1 else ""
        return [f"host tier{which}: {next(iter(lines.values()))}"]
    return [f"host tier, {layout}: {line}" for layout, line in lines.items()]


def _percent(difference: Difference) -> str:
    """Change of the perplexity; never "-0.00"."""
    return f"{round(100 * difference.perplexity_change, 2) + 0.0:+.2f} %"


def write_json(path: Path, results: Sequence[Result], facts: dict[str, Any]) -> None:
    """Write everything that was measured; `facts` say where and on what."""
    fields = {"schema": SCHEMA, **facts, "results": [asdict(result) for result in results]}
    path.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")


def write_plot(path: Path, results: Sequence[Result], title: str, token: str) -> None:
    """Plot capacity against perplexity as PNG; ImportError without matplotlib.

    `title` is the model's; `token` is what its tokens are called.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for index, result in enumerate(sorted(results, key=lambda result: result.tokens)):
        label, error = f"{result.layout}\n{result.row_bytes}-byte rows", 0.0
        if result.difference is not None:
            label += f"\n{_percent(result.difference)}"
            error = result.difference.standard_error * result.perplexity
        point, _, _ = axes.errorbar(
            result.tokens, result.perplexity, yerr=error, fmt="o", markersize=9, capsize=5
        )
        # Above and below in turn: neighbours are narrower apart than their names are wide.
        above = index % 2 == 0
        axes.annotate(
            label,
            (result.tokens, result.perplexity),
            xytext=(0, 14 if above else -14),
            textcoords="offset points",
            ha="center",
            va="bottom" if above else "top",
            fontsize="small",
            color=point.get_color(),
        )
    megabytes = results[0].pool_bytes / 1e6
    axes.set_xlabel(f"tokens in {megabytes:.1f} MB of KV cache")
    axes.set_ylabel(f"perplexity per {token} (lower is better)")
    # 3 % of perplexity at least, so that nothing looks like a cliff that is none.
    middle = sum(result.perplexity for result in results) / len(results)
    low = min(min(result.perplexity for result in results), middle * 0.985)
    high = max(max(result.perplexity for result in results), middle * 1.015)
    axes.set_ylim(low - 0.2 * (high - low), high + 0.2 * (high - low))
    axes.set_xlim(0, 1.15 * max(result.tokens for result in results))
    axes.grid(alpha=0.3)
    figure.suptitle(f"Tokens that fit, and what they cost:\n{title}", fontsize="medium")
    axes.set_title("percent: change of the perplexity to bf16; bars: its standard error", fontsize="small")
    figure.savefig(path, dpi=120)
