"""`sgl-kvpool demo`: real SGLang serves the demo model once per layout; one table says what came out."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import os
import platform
import time
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

from sgl_kvpool import __version__, env
from sgl_kvpool.demo import report
from sgl_kvpool.demo.measure import (
    Scores,
    compare_hits,
    compare_scores,
    generate_greedily,
    score,
    tiered_hit,
)
from sgl_kvpool.demo.server import Server, ServerFailed, cpu_arguments, free_port
from sgl_kvpool.demo.shipped import Window, geometry, held_out_windows, model_path
from sgl_kvpool.doctor.probes import host
from sgl_kvpool.layout import MLAKVCacheLayout

__all__ = ["compare", "greedy_prompts", "has_room_for_host_tier", "layout_server"]

#: Tokens that bf16 gets; every layout gets as many as fit into the same bytes. Few enough that the text which
#: is scored, 32768 tokens, pushes everything else out of every layout's pool.
_BF16_TOKENS = 8192
_PAGE_SIZE = 64
#: A host tier, of 6 tokens per token of the pool, and answers that say what came from it.
_HOST_TIER = ("--enable-hierarchical-cache", "--hicache-ratio", "6", "--enable-cache-report")
#: Memory that it takes, and what the server itself takes after the question was asked.
_HOST_TIER_BYTES = (1 << 30) + (3 << 30)

#: What a run leaves in its folder. It is written into a folder in there, until the run has finished.
_RESULTS = ("demo.json", "demo.png", *(f"server-{layout}.log" for layout in MLAKVCacheLayout))
_UNFINISHED = "unfinished"

#: Beginnings of held-out windows, as (window, bytes), after which greedy text is generated. Chosen so that
#: wide margins decide every token: where the best two are nearly tied, rounding decides.
_GREEDY = ((2, 96), (7, 192), (12, 204), (14, 132), (22, 168))
GREEDY_TOKENS = 48


def greedy_prompts(windows: Sequence[Window]) -> list[str]:
    """What greedy text is generated after."""
    return [windows[window].text[:length] for window, length in _GREEDY]


def evicted_prompt(windows: Sequence[Window]) -> str:
    """A prompt of 1000 bytes that no window begins with."""
    return windows[5].text[512:] + windows[9].text[:488]


def tokens_in_the_same_memory(layout: MLAKVCacheLayout) -> int:
    """Tokens that fit where bf16 has 8192."""
    _, rank, rope = geometry()
    bf16 = MLAKVCacheLayout.BF16.row_format(rank, rope)
    return _BF16_TOKENS * bf16.row_bytes // layout.row_format(rank, rope).row_bytes


def has_room_for_host_tier() -> bool:
    """Whether SGLang would make a host tier on this machine: it keeps 10 GiB of memory free."""
    return (host().facts["host_tier_bytes"] or 0) >= _HOST_TIER_BYTES


def layout_server(layout: MLAKVCacheLayout, port: int, log: Path) -> Server:
    """The server the demo starts for a layout, not yet started."""
    arguments = cpu_arguments(model_path(), port, max_total_tokens=tokens_in_the_same_memory(layout))
    arguments += ["--kv-cache-layout", layout.value, "--page-size", str(_PAGE_SIZE)]
    if has_room_for_host_tier():
        arguments += _HOST_TIER
    return Server(arguments, log, {env.PREFILL_READS_ROWS: "1"})


def compare(layouts: Sequence[MLAKVCacheLayout], folder: Path) -> int:
    """Serve every layout in turn, print a table, write JSON and a plot.

    Parameters
    ----------
    layouts : sequence of MLAKVCacheLayout
        Without repetition. Differences are to BF16, if it is among them.
    folder : Path
        Made if it does not exist; gets ``demo.json``, ``demo.png`` and the servers' logs, in place of an
        earlier run's, once all layouts were served. Until then they are in ``unfinished/`` in there.

    Returns
    -------
    int
        Exit status: 1 if a server failed, what was served before it is still shown and written, or if the
        results could not be written.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; name a folder with --out")
    unfinished = _emptied(folder / _UNFINISHED)
    windows = held_out_windows()
    layers, rank, rope = geometry()
    print(
        f"model: {model_path()}\n{layers} layers of MLA (latent {rank}, rope {rope}), trained on Python's "
        "standard library; device: cpu\n"
        f"text: {len(windows)} held-out windows of {len(windows[0].text)} bytes",
        flush=True,
    )
    status = 0
    served: list[tuple[report.Result, Scores]] = []
    for number, layout in enumerate(layouts, 1):
        print(f"[{number}/{len(layouts)}] {layout}: starting SGLang ...", end=" ", flush=True)
        log = unfinished / f"server-{layout}.log"
        try:
            served.append(_serve(layout, windows, log))
        except (ServerFailed, OSError, HTTPException, LookupError, TypeError, ValueError) as error:
            # The last three: an answer of another shape than SGLang's.
            what = "" if isinstance(error, ServerFailed) else f"{type(error).__name__}: "
            print(f"failed: {what}{error}\nthe server's log: {log}", flush=True)
            status = 1
            break
        print(f" scored in {served[-1][0].scoring_seconds:.0f} s", flush=True)
    if not served:
        return status
    results = _with_differences(served)
    print(f"\n{report.table(results)}\n")
    if any(result.host_hit is not None and not result.host_hit.same_tokens for result in results):
        print("failed: a hit in the host tier gave other tokens than a hit on the device")
        status = 1
    try:
        without_plot = _write(unfinished, results, _facts(windows))
        if len(served) == len(layouts):
            _move(unfinished, folder)
        else:
            folder = unfinished
    except OSError as error:
        print(f"failed: {error.strerror or error}: the results cannot be written to {folder}")
        return 1
    print(f"all numbers: {folder / 'demo.json'}")
    print(without_plot or f"plot:        {folder / 'demo.png'}")
    return status


def _emptied(folder: Path) -> Path:
    """The folder, made if need be, without results of an earlier run."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in _RESULTS:
        (folder / name).unlink(missing_ok=True)
    return folder


def _write(folder: Path, results: Sequence[report.Result], facts: dict[str, Any]) -> str:
    """Write the JSON and the plot; returns why there is no plot, or nothing."""
    report.write_json(folder / "demo.json", results, facts)
    try:
        report.write_plot(folder / "demo.png", results)
    except ImportError as error:  # an absent or broken matplotlib costs the plot, not the numbers
        return f"no plot: {error}; pip install matplotlib"
    return ""


def _move(unfinished: Path, folder: Path) -> None:
    """Put a finished run's results in the place of an earlier run's."""
    for name in _RESULTS:
        if (unfinished / name).exists():
            (unfinished / name).replace(folder / name)
        else:
            (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # somebody else's file in it
        unfinished.rmdir()


def _serve(layout: MLAKVCacheLayout, windows: Sequence[Window], log: Path) -> tuple[report.Result, Scores]:
    """Start a layout's server, ask it everything, stop it."""
    layers, rank, rope = geometry()
    bf16_row_bytes = MLAKVCacheLayout.BF16.row_format(rank, rope).row_bytes
    began = time.monotonic()
    with layout_server(layout, free_port(), log) as server:
        started = time.monotonic()
        print(f"ready after {started - began:.0f} s, scoring ", end="", flush=True)
        info = server.info()
        if info["kv_cache_layout"] != layout.value:
            raise ServerFailed(f"the server says it serves {info['kv_cache_layout']!r}, not {layout}")
        # Asked for twice now, and once more after the windows have pushed it out of the pool.
        evicted = evicted_prompt(windows)
        has_tier = _HOST_TIER[0] in server.arguments
        hits = [tiered_hit(server, evicted) for _ in range(2)] if has_tier else []
        began_scoring = time.monotonic()
        scores = score(server, windows, progress=lambda: print(".", end="", flush=True))
        scored = time.monotonic()
        greedy = generate_greedily(server, greedy_prompts(windows), GREEDY_TOKENS)
        host_hit = compare_hits(hits[1], tiered_hit(server, evicted)) if hits else None
    result = report.Result(
        layout=info["kv_cache_layout"],
        row_bytes=layout.row_format(rank, rope).row_bytes,
        pool_bytes=layers * _BF16_TOKENS * bf16_row_bytes,
        tokens=info["max_total_num_tokens"],
        attention_backend=info["attention_backend"],
        start_seconds=round(started - began, 2),
        scoring_seconds=round(scored - began_scoring, 2),
        perplexity=scores.perplexity,
        difference=None,
        greedy=greedy,
        host_hit=host_hit,
    )
    return result, scores


def _with_differences(served: Sequence[tuple[report.Result, Scores]]) -> list[report.Result]:
    """The results, each with its difference to bf16's if bf16 was served."""
    bf16 = MLAKVCacheLayout.BF16.value
    reference = next((scores for result, scores in served if result.layout == bf16), None)
    return [
        result
        if reference is None or result.layout == bf16
        else dataclasses.replace(result, difference=compare_scores(scores, reference))
        for result, scores in served
    ]


def _facts(windows: Sequence[Window]) -> dict[str, Any]:
    """Where and on what the results were measured."""
    weights = (model_path() / "model.safetensors").read_bytes()
    return {
        "sgl_kvpool": __version__,
        "versions": {name: importlib.metadata.version(name) for name in ("sglang", "torch")},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "device": "cpu",
        "model_sha256": hashlib.sha256(weights).hexdigest(),
        "held_out_windows": len(windows),
        "held_out_tokens_scored": sum(len(window.text) - 1 for window in windows),
        "prompts": greedy_prompts(windows),
    }
