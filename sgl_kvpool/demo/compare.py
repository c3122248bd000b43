"""`sgl-kvpool demo`: SGLang serves the demo model once per layout, and one table compares the results."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sgl_kvpool import env
from sgl_kvpool.commands.arguments import naming
from sgl_kvpool.commands.doctor.probes import host
from sgl_kvpool.commands.evaluate import report
from sgl_kvpool.commands.evaluate.measure import (
    Scores,
    answer,
    ask,
    compare_hits,
    generate_greedily,
    score,
)
from sgl_kvpool.commands.processes.forks import Forks
from sgl_kvpool.commands.processes.server import (
    Server,
    cpu_arguments,
    free_port,
    import_once,
    in_turn,
)
from sgl_kvpool.demo.model import DemoModel
from sgl_kvpool.layout import MLAKVCacheLayout

_PAGE_SIZE = 64
#: Arguments of a host tier, and of answers that report hits in it.
_HOST_TIER = ("--enable-hierarchical-cache", "--enable-cache-report")
#: Memory of the host tier, and of the server itself after SGLang's check of free memory.
_HOST_TIER_BYTES = (2 << 30) + (3 << 30)

#: Files of a run.
_RESULTS = ("demo.json", "demo.png", *(f"server-{layout}.log" for layout in MLAKVCacheLayout))
_RESULTS += tuple(f"answers-{layout}.log" for layout in MLAKVCacheLayout)

#: Tokens after a hit, of greedy text, and largest number of tokens of an answer.
_AFTER_HIT, GREEDY_TOKENS, ANSWER_TOKENS = 32, 48, 240

#: Least number of windows, which exceed the pool of a server that shows its host tier.
_LEAST_WINDOWS = 4
#: Tokens of the pool of a server that shows its host tier: the prompt's 1000 and what is generated fit.
_TIERED_TOKENS = 1408


def has_room_for_host_tier() -> bool:
    """Whether this machine has memory for the host tier, besides the 10 GiB that SGLang keeps free."""
    return (host().facts["host_tier_bytes"] or 0) >= _HOST_TIER_BYTES


def layout_server(
    model: DemoModel, layout: MLAKVCacheLayout, port: int, log: Path, tokens: int | None = None
) -> Server:
    """The demo's server for a layout, not yet started.

    `tokens` is the size of its pool; without it, as many as fit into the memory of the bf16 pool.
    """
    tokens = tokens or model.tokens_in_the_same_memory(layout)
    arguments = cpu_arguments(model.path, port, max_total_tokens=tokens)
    arguments += ["--kv-cache-layout", layout.value, "--page-size", str(_PAGE_SIZE)]
    if has_room_for_host_tier():
        arguments += [*_HOST_TIER, "--hicache-ratio", "6"]
    return Server(arguments, log, {env.PREFILL_READS_ROWS: "1"})


def _without_twins(model: DemoModel, layouts: Sequence[MLAKVCacheLayout]) -> list[MLAKVCacheLayout]:
    """The layouts without duplicates: without rotary values, two layouts can have the same rows."""
    found: dict[tuple, MLAKVCacheLayout] = {}
    for layout in layouts:
        twin = found.setdefault(model.row_format(layout).segments, layout)
        if twin is not layout:
            print(
                f"{layout} is not served: without rotary values, its rows of this model equal those of {twin}"
            )
    return list(found.values())


def compare(
    model: DemoModel, layouts: Sequence[MLAKVCacheLayout], folder: Path, window_count: int | None = None
) -> int:
    """Serve every layout in turn, print a table, write JSON and a plot.

    `layouts` has no repetition; differences are to BF16, if it is one of them. `folder` is created; it gets
    ``demo.json``, ``demo.png`` and the servers' logs. Those of an earlier run stay until there are results.

    Returns exit status 1 if a server failed (results of earlier servers are still shown and written), if a
    hit in the host tier gave other tokens than a hit on the device, or if results could not be written.
    """
    count = window_count or model.scored_windows
    if not _LEAST_WINDOWS <= count <= len(model.windows):
        limits = f"{_LEAST_WINDOWS} to {len(model.windows)}"
        raise ValueError(f"--windows {count}: model {model.name} has {limits}")
    model = dataclasses.replace(model, windows=model.windows[:count])
    with naming("--out", folder):
        folder.mkdir(parents=True, exist_ok=True)
    row = model.row_format(MLAKVCacheLayout.BF16)
    print(
        f"model: {model.path}\n{model.title}: {model.layers} layers, latent {row.kv_lora_rank}, rope "
        f"{row.qk_rope_head_dim}; device: cpu\n"
        f"text: {model.text}, {count} windows of {len(model.windows[0])} {model.token}s"
    )
    if not has_room_for_host_tier():
        print(f"{report.NO_HOST_TIER}; {_HOST_TIER_BYTES >> 30} GiB are needed")
    layouts = _without_twins(model, layouts)
    with Forks() as importing:
        forks = import_once(importing)
        served, failed = in_turn(
            layouts,
            lambda layout: layout_server(model, layout, free_port(), folder / f"server-{layout}.log"),
            lambda server, layout, seconds: _score(server, model, layout, seconds),
            forks,
        )
        if not served:
            return 1
        scores = {result.layout: found for result, found in served}
        results = report.with_differences([result for result, _ in served], scores.__getitem__)
        print(f"\n{report.table(results, model.token)}\n\n{report.LIMITS}\n", flush=True)
        try:
            logs = [f"server-{layout}.log" for layout in layouts[: len(served) + failed]]
            for name in set(_RESULTS).difference(logs):  # of an earlier run
                (folder / name).unlink(missing_ok=True)
            without_plot = _write(folder, results, model)
            if not failed:
                print("Host tier and whole answers; the table stays as it is:")
                shown, failed = in_turn(
                    layouts,
                    lambda layout: layout_server(
                        model, layout, free_port(), folder / f"answers-{layout}.log", _TIERED_TOKENS
                    ),
                    lambda server, *_: _show(server, model),
                    forks,
                )
                results = [
                    dataclasses.replace(result, **more) for result, more in zip(results, shown, strict=False)
                ] + results[len(shown) :]
                print(f"\n{report.answers(results, model.question)}\n")
                without_plot = _write(folder, results, model)
            if any(result.host_hit is not None and not result.host_hit.same_tokens for result in results):
                print("failed: a hit in the host tier gave other tokens than a hit on the device")
                failed = True
        except OSError as error:
            print(f"failed: {error.strerror or error}: the results cannot be written to {folder}")
            return 1
    print(f"all numbers: {folder / 'demo.json'}")
    print(without_plot or f"plot:        {folder / 'demo.png'}")
    return int(failed)


def _write(folder: Path, results: Sequence[report.Result], model: DemoModel) -> str:
    """Write the JSON and the plot; returns the reason if there is no plot, else an empty string."""
    facts = _facts(model)
    report.write_json(folder / "demo.json", results, facts)
    return report.plot_or_reason(folder / "demo.png", results, model.title, facts)


def _score(
    server: Server, model: DemoModel, layout: MLAKVCacheLayout, start_seconds: float
) -> tuple[tuple[report.Result, Scores], str]:
    info = report.info_of(server, layout)
    began = time.monotonic()
    scores = score(server, model.windows)
    scoring_seconds = time.monotonic() - began
    pool_bytes = model.layers * model.bf16_tokens * model.row_format(MLAKVCacheLayout.BF16).row_bytes
    result = report.result_of(
        info, model.row_format(layout), scores, start_seconds, scoring_seconds, pool_bytes
    )
    return (result, scores), f"{len(model.windows)} windows scored in {scoring_seconds:.0f} s"


def _show(server: Server, model: DemoModel) -> tuple[dict[str, Any], str]:
    """A hit in the host tier, greedy text and an answer, as fields of a `Result`."""
    more: dict[str, Any] = {}
    if _HOST_TIER[0] in server.arguments:
        _, device = (ask(server, model.evicted, _AFTER_HIT) for _ in range(2))
        # As many tokens as the pool has: they evict the prompt.
        tokens, window = server.info()["max_total_num_tokens"], len(model.windows[0])
        for ids in model.windows[: -(-tokens // window)]:
            ask(server, ids, new_tokens=1)
        more["host_hit"] = compare_hits(device, ask(server, model.evicted, _AFTER_HIT))
    if model.prompts:
        more["greedy"] = generate_greedily(server, model.prompts, GREEDY_TOKENS)
    if model.question:
        more["answer"] = answer(server, model.question, ANSWER_TOKENS)
    return more, "asked"


def _facts(model: DemoModel) -> dict[str, Any]:
    return {
        **report.measured_on(),
        "device": "cpu",
        "model": model.name,
        "model_sha256": model.sha256,
        "token": model.token,
        "held_out_windows": len(model.windows),
        "held_out_tokens_scored": sum(len(window) - 1 for window in model.windows),
        "prompts": model.prompts,
        "question": model.question,
    }
