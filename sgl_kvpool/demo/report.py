"""The demo's results as a table, as JSON and as a plot. Imports neither torch nor SGLang."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from sgl_kvpool.demo.measure import Difference, Greedy, HostHit
from sgl_kvpool.layout import MLAKVCacheLayout

__all__ = ["NO_HOST_TIER", "SCHEMA", "Result", "answers", "table", "write_json", "write_plot"]

SCHEMA = 1

#: Why a machine shows no host tier.
NO_HOST_TIER = (
    "host tier: not shown, SGLang keeps 10 GiB of memory free and this machine has too little beyond that"
)
#: What the table cannot show.
_LIMITS = (
    "fp8 has one scale per layer (k_scale), here 1, which suits the values of this model; smaller latents",
    "lose bits. docs/accuracy.md has what others measured on DeepSeek and GLM models.",
)


@dataclass(frozen=True)
class Result:
    """Results of one layout's server.

    Attributes
    ----------
    pool_bytes : int
        Bytes for rows, the same for all servers.
    tokens : int
        Tokens that fit into these bytes, as the server reports.
    perplexity : float
        Perplexity per token over the windows.
    difference : Difference or None
        Difference to BF16; None for BF16 itself and if BF16 was not served.
    host_hit : HostHit or None
        Hit of a prompt that was evicted from the pool; None on a machine without enough memory.
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


def table(results: Sequence[Result], token: str) -> str:
    """The results as a table, and what it cannot show; `token` is the name of the model's tokens."""
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
    return "\n".join([*lines, "", *_LIMITS])


def answers(results: Sequence[Result], question: str | None = None) -> str:
    """Hits in the host tier, and the greedy answers to a question."""
    lines = _host_lines(results)
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
            lines[result.layout] = NO_HOST_TIER.partition(": ")[2]
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


def write_plot(path: Path, results: Sequence[Result], title: str, facts: Mapping[str, Any]) -> None:
    """Draw tokens in the same memory beside perplexity as PNG; ImportError without matplotlib.

    Parameters
    ----------
    facts : mapping
        Machine, versions and date of the measurement, as for `write_json`; an older file may lack `cpu` and
        `date`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.9 + 0.5 * len(results)), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    places = range(len(results))
    bars = left.barh(places, [result.tokens for result in results], color="tab:blue")
    left.bar_label(bars, [f"{result.tokens}" for result in results], padding=3)
    left.set_xlabel(f"tokens in {results[0].pool_bytes / 1e6:.1f} MB of KV cache")
    left.set_yticks(places, [f"{result.layout}\n{result.row_bytes}-byte rows" for result in results])
    left.invert_yaxis()
    if any(result.difference is not None for result in results):
        _draw_changes(right, results)
        right.set_xlabel("change of perplexity to bf16, %")
        right.set_title("lower is better; lines: standard error", fontsize="small")
    else:
        right.barh(places, [result.perplexity for result in results], color="tab:orange")
        right.set_xlabel(f"perplexity per {facts['token']}, lower is better")
    # Room for the numbers behind the bars.
    for axes, margin in ((left, 0.2), (right, 0.5)):
        axes.margins(x=margin)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    versions = facts["versions"]
    where = [
        facts.get("cpu", facts["machine"]),
        f"{facts['cores']} cores",
        f"SGLang {versions['sglang']}",
        f"{facts['held_out_tokens_scored']} {facts['token']}s scored",
        facts.get("date", ""),
    ]
    figure.suptitle(f"{title}, served once per layout\n{', '.join(filter(None, where))}", fontsize="medium")
    figure.savefig(path, dpi=120)


def _draw_changes(axes: Any, results: Sequence[Result]) -> None:
    """A bar per layout with its standard error and both numbers; bf16, which has no change, gets 0."""
    changes = [result.difference or Difference(0.0, 0.0, 1.0) for result in results]
    percent = [100 * change.perplexity_change for change in changes]
    errors = [100 * change.standard_error for change in changes]
    axes.barh(range(len(results)), percent, color="tab:orange", xerr=errors, capsize=4)
    for place, (result, value, error) in enumerate(zip(results, percent, errors, strict=True)):
        text = "reference" if result.difference is None else f"{_percent(result.difference)} ({error:.2f})"
        axes.annotate(text, (max(value, 0) + error, place), (6, 0), textcoords="offset points", va="center")


def main() -> int:
    """Draw a committed JSON again: `python -m sgl_kvpool.demo.report demo.json demo.png TITLE`."""
    source, path, title = sys.argv[1:]
    facts = json.loads(Path(source).read_text(encoding="utf-8"))
    results = []
    for fields in facts["results"]:
        difference = fields["difference"] and Difference(**fields["difference"])
        results.append(Result(**{**fields, "difference": difference}))
    write_plot(Path(path), results, title, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
