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
    """Results of one layout's server.

    Attributes
    ----------
    layout : str
        Layout that the server reports.
    row_bytes : int
        Bytes of one token in one layer.
    pool_bytes : int
        Bytes for rows, the same for all servers.
    tokens : int
        Tokens that fit into these bytes, as the server reports.
    attention_backend : str
        Backend that the server reports.
    start_seconds, scoring_seconds : float
        Time until the server answered, and time to score all held-out text.
    perplexity : float
        Perplexity per token over the windows.
    difference : Difference or None
        Difference to BF16; None for BF16 itself and if BF16 was not served.
    greedy : list of Greedy
        Greedy text after each prompt.
    host_hit : HostHit or None
        Hit of a prompt that was evicted from the pool; None on a machine without enough memory.
    answer : str or None
        Answer to the question for a chat model.
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
    """The results as text: a table, the hits in the host tier, and the answers to a question.

    `token` is the name of the model's tokens.
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
        lines += ["", f"greedy answers to {question!r}:", ""]
        for result in results:
            indented = textwrap.wrap(result.answer or "", 90) or [""]
            lines += [
                f"{name:16} {line}" for name, line in zip_longest([result.layout], indented, fillvalue="")
            ]
    return "\n".join(lines)


def _host_lines(results: Sequence[Result]) -> list[str]:
    """Hits in the host tier, in one line if they are the same for all layouts."""
    lines = {}
    for result in results:
        hit = result.host_hit
        if hit is None:
            lines[result.layout] = "not shown, SGLang keeps 10 GiB of memory free and this machine has less"
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
    """Write all results, with the `facts` of the measurement."""
    fields = {"schema": SCHEMA, **facts, "results": [asdict(result) for result in results]}
    path.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")


def write_plot(path: Path, results: Sequence[Result], title: str, token: str) -> None:
    """Plot capacity against perplexity as PNG; ImportError without matplotlib.

    `title` describes the model; `token` is the name of its tokens.
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
        # Labels alternate above and below, because they are wider than the distance of neighbours.
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
    # The axis spans at least 3 % of perplexity, so that small differences look small.
    middle = sum(result.perplexity for result in results) / len(results)
    low = min(min(result.perplexity for result in results), middle * 0.985)
    high = max(max(result.perplexity for result in results), middle * 1.015)
    axes.set_ylim(low - 0.2 * (high - low), high + 0.2 * (high - low))
    axes.set_xlim(0, 1.15 * max(result.tokens for result in results))
    axes.grid(alpha=0.3)
    figure.suptitle(f"Capacity and perplexity of each layout:\n{title}", fontsize="medium")
    axes.set_title("percent: change of the perplexity to bf16; bars: its standard error", fontsize="small")
    figure.savefig(path, dpi=120)
