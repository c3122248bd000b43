"""The demo's results as a table, as JSON and as a plot. Imports neither torch nor SGLang."""

import importlib.metadata
import json
import platform
import statistics
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from sgl_kvpool import __version__
from sgl_kvpool.commands.doctor.probes import machine
from sgl_kvpool.commands.evaluate.measure import (
    Difference,
    Greedy,
    HostHit,
    Scores,
    compare_scores,
    standard_error,
)
from sgl_kvpool.commands.processes.server import Server, ServerFailed
from sgl_kvpool.commands.tables import aligned
from sgl_kvpool.folders import replace_file
from sgl_kvpool.layout import MLAKVCacheLayout, RowFormat

SCHEMA = 1

#: Why a machine shows no host tier.
NO_ROOM = "SGLang keeps 10 GiB of memory free and this machine has too little beyond that"
NO_HOST_TIER = f"host tier: not shown, {NO_ROOM}"
#: Of a server with --speculative-algorithm.
NO_STEPS = "(no accepted drafts: the server reported no step that verified any)"
#: What the demo's table cannot show.
LIMITS = """\
fp8 has one scale per layer (k_scale), here 1, which suits the values of this model; smaller latents
lose bits. docs/accuracy.md has what others measured on DeepSeek and GLM models."""


@dataclass(frozen=True)
class Result:
    layout: str
    row_bytes: int
    #: Bytes for rows, if they are the same for all servers.
    pool_bytes: int | None
    #: Tokens of the pool, as the server reports.
    tokens: int
    attention_backend: str
    start_seconds: float
    scoring_seconds: float
    #: Perplexity per token over the windows.
    perplexity: float
    #: Difference to BF16; None for BF16 itself and if BF16 was not served.
    difference: Difference | None = None
    greedy: list[Greedy] = field(default_factory=list)
    #: Hit of a prompt that was evicted from the pool; None on a machine without enough memory.
    host_hit: HostHit | None = None
    answer: str | None = None
    #: Whether a number was found that was hidden at each depth of a long text.
    hidden: list[bool] | None = None
    #: Drafts accepted per step, of each answer that had steps; None for a server without drafts.
    accepted_drafts: list[float] | None = None


def info_of(server: Server, layout: MLAKVCacheLayout) -> dict[str, Any]:
    """What a server says of itself; ServerFailed if it serves another layout."""
    info = server.info()
    if info["kv_cache_layout"] != layout.value:
        raise ServerFailed(f"the server says it serves {info['kv_cache_layout']!r}, not {layout}")
    return info


def result_of(
    info: Mapping[str, Any], row: RowFormat, scores: Scores, start_s: float, scoring_s: float,
    pool_bytes: int | None = None, **more: Any,
) -> Result:  # fmt: skip
    return Result(
        layout=info["kv_cache_layout"],
        row_bytes=row.row_bytes,
        pool_bytes=pool_bytes,
        tokens=info["max_total_num_tokens"],
        attention_backend=info["attention_backend"],
        start_seconds=round(start_s, 2),
        scoring_seconds=round(scoring_s, 2),
        perplexity=scores.perplexity,
        **more,
    )


def with_differences(results: Sequence[Result], scores_of: Callable[[str], Scores]) -> list[Result]:
    """The results, each with its difference to bf16 if bf16 was served; `scores_of` a layout's name."""
    bf16 = MLAKVCacheLayout.BF16.value
    reference = scores_of(bf16) if any(result.layout == bf16 for result in results) else None
    return [
        result
        if reference is None or result.layout == bf16
        else replace(result, difference=compare_scores(scores_of(result.layout), reference))
        for result in results
    ]


def measured_on() -> dict[str, Any]:
    return {
        "sgl_kvpool": __version__,
        "versions": {name: importlib.metadata.version(name) for name in ("sglang", "torch")},
        "python": platform.python_version(),
        **machine(),
        "machine": platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
    }


def table(results: Sequence[Result], token: str) -> str:
    """The results as a table; `token` is the name of the model's tokens."""
    memory = "same memory" if results[0].pool_bytes else "the pool"
    columns = [
        ("layout", "", [result.layout for result in results]),
        ("bytes per token", "and layer", [str(result.row_bytes) for result in results]),
        ("tokens in", memory, [str(result.tokens) for result in results]),
        ("perplexity", f"per {token}", [f"{result.perplexity:.4f}" for result in results]),
    ]
    differences = [result.difference for result in results]
    columns += [
        (*head, ["-" if one is None else text(one) for one in differences])
        for head, text in (
            (("change to bf16", "(standard error)"), _change),
            (("KL divergence", "(standard error)"), _divergence),
            ((f"top {token}", "as bf16"), lambda one: f"{100 * one.same_top_token:.2f} %"),
        )
    ]
    if any(result.accepted_drafts is not None for result in results):
        accepted = [_accepted(result.accepted_drafts) for result in results]
        columns.append(("accepted drafts", "per step (error)", accepted))
    if any(result.hidden is not None for result in results):
        found = [result.hidden or [] for result in results]
        columns.append(("hidden numbers", "found", [f"{sum(x)} of {len(x)}" if x else "-" for x in found]))
    lines = aligned(zip(*([first, second, *cells] for first, second, cells in columns), strict=True))
    if not any(result.layout == MLAKVCacheLayout.BF16.value for result in results):
        lines.append("(no differences: bf16 was not among --layouts)")
    if any(result.accepted_drafts == [] for result in results):
        lines.append(NO_STEPS)
    return "\n".join(lines)


def _change(difference: Difference) -> str:
    return f"{_percent(difference)} ({100 * difference.standard_error:.2f})"


def _divergence(difference: Difference) -> str:
    if difference.divergence is None:
        return "-"
    return f"{difference.divergence:.5f} ({difference.divergence_error:.5f})"


def _accepted(drafts: Sequence[float] | None) -> str:
    return f"{statistics.fmean(drafts):.3f} ({standard_error(drafts):.3f})" if drafts else "-"


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
    fields = {"schema": SCHEMA, **facts, "results": [asdict(result) for result in results]}
    replace_file(path, json.dumps(fields, indent=1) + "\n")


def read_results(facts: Mapping[str, Any]) -> list[Result]:
    """The results in what `write_json` wrote."""
    found = []
    for fields in facts["results"]:
        difference = fields["difference"] and Difference(**fields["difference"])
        found.append(Result(**{**fields, "difference": difference}))
    return found


def plot_or_reason(path: Path, results: Sequence[Result], title: str, facts: Mapping[str, Any]) -> str:
    """Draw the plot; returns why it could not be drawn, or an empty string."""
    try:
        write_plot(path, results, title, facts)
    except ImportError as error:  # without a working matplotlib the numbers are still written
        return f"no plot: {error}; pip install matplotlib"
    return ""


def write_plot(path: Path, results: Sequence[Result], title: str, facts: Mapping[str, Any]) -> None:
    """Draw tokens in the same memory beside perplexity as PNG; ImportError without matplotlib.

    `facts` are those of `write_json`; an older file may lack `cpu` and `date`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.9 + 0.5 * len(results)), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    places = range(len(results))
    bars = left.barh(places, [result.tokens for result in results], color="tab:blue")
    left.bar_label(bars, [f"{result.tokens}" for result in results], padding=3)
    same_bytes = results[0].pool_bytes
    left.set_xlabel(
        f"tokens in {same_bytes / 1e6:.1f} MB of KV cache" if same_bytes else "tokens in the pool"
    )
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
