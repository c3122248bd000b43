"""The first ten minutes on a GPU: correct and wrong kernels, and the tile table to commit.

Steps run in order of their value, each with a time limit; the limits add up to less than nine minutes. The
folder of results gets first_light.json and first_light.txt after each step; a later call continues it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripts.kit.environment import Machine
from scripts.kit.outputs import replace_file
from scripts.kit.records import SCHEMA, read_lines
from scripts.kit.runner import Step
from scripts.servers import parsers, report
from scripts.servers.results import Results
from scripts.servers.steps import TESTS, bench, isolated

__all__ = ["MINUTES", "FirstLight", "first_light_steps"]

#: Time limit of all steps in minutes; a step that is ended then may take half a minute to stop.
MINUTES = 8.3
#: Test that compiles the transfer engines, for half a minute or more, while other tests run. Below
#: CUDA 12.8 it is skipped without compiling them.
_COMPILES = f"{TESTS}transfer_gpu.py::test_batches_are_used_where_cuda_has_them"


def first_light_steps(machine: Machine, *, on_gpu: bool) -> list[Step]:
    """All steps in order. Without a GPU, steps that cannot be rehearsed are marked as skipped."""
    reason = "" if on_gpu else machine.missing(("gpu",)) or "--device cpu was requested"
    device = ("--device", "cuda" if on_gpu else "cpu")

    def tiles(heads: int, expected_s: float, limit_s: float) -> Step:
        # Triton's interpreter takes a second per block of rows.
        less = () if on_gpu else ("--layouts", "fp4")
        return bench(
            f"tiles-{heads}", f"tiles and splits of mla_decode, {heads} heads", limit_s, parsers.tiles,
            "tiles", "--heads", str(heads), "--continue", *device, *less, expected_s=expected_s,
        )  # fmt: skip

    return [
        replace(
            isolated(
                "core", "every kernel against its reference", 135, f"{TESTS}mla_decode_gpu.py",
                f"{TESTS}codec_gpu.py", "--first", _COMPILES, "--then", f"{TESTS}transfer_gpu.py",
            ),
            expected_s=100, without=reason,
        ),
        replace(
            bench("rates", "rates of an SM per clock", 45, parsers.benchmark, "rates", "--continue"),
            expected_s=35, without=reason,
        ),
        tiles(16, 55, 75) if on_gpu else tiles(2, 60, 150),
        bench(
            "attention-quick", "mla_decode beside FlashMLA, if it is installed", 65, parsers.benchmark,
            "attention", "--quick", "--minutes", "0.8", *device, expected_s=50,
        ),
        *([tiles(8, 35, 45), tiles(32, 35, 45)] if on_gpu else []),
        bench("codec-quick", "speed of the codec", 28, parsers.benchmark, "codec", "--quick", expected_s=18),
        bench(
            "transfer-quick", "transfer engines beside a pinned copy", 60, parsers.benchmark,
            "transfer", "--quick", *device, expected_s=50,
        ),
    ]  # fmt: skip


class FirstLight(Results):
    """Results that a later call continues, with first_light.json and first_light.txt after each step."""

    continues = True

    def write(self) -> None:
        """Write first_light.json and first_light.txt with the results so far."""
        found = self.as_json()
        replace_file(self.out / "first_light.json", json.dumps(found, indent=1, allow_nan=False) + "\n")
        replace_file(self.out / "first_light.txt", self.text())

    def text(self) -> str:
        found = self.as_json()
        tests, table = found["failed_tests"], found["tile_table"]
        return report.text(self.facts, self.all_records(), failed_tests=tests, tile_table=table)

    def as_json(self) -> dict[str, Any]:
        """Content of first_light.json."""
        what, steps, benchmarks = {step.name: step.what for step in self.steps}, [], {}
        for record in self.all_records():
            measurements = [one.to_json() for one in record.measurements]
            step = {"name": record.name, "what": what.get(record.name, ""), "status": record.status}
            step["reason"] = record.reason
            seconds = round(record.seconds, 1)
            steps.append({**step, "seconds": seconds, "measurements": measurements})
            found = _json(self.out / "steps" / record.name / "results.json")
            if found is not None:
                benchmarks[record.name] = found
        tests = [
            line
            for path in sorted((self.out / "steps").glob("*/tests.jsonl"))
            for line in read_lines(path)
            if line.get("outcome") == "failed"
        ]
        return {
            "schema": SCHEMA,
            **self.facts,
            "steps": steps,
            "failed_tests": tests,
            "tile_table": _tile_table(benchmarks),
            "benchmarks": benchmarks,
        }


def _json(path: Path) -> Any:
    """JSON that a step has written; None if it is missing or incomplete."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None


def _tile_table(benchmarks: dict[str, Any]) -> dict[str, Any] | None:
    """Tile table from the rows of all sweeps."""
    from scripts.bench.tiles.tile_table import choose, split_findings, table_text

    rows = [row for name, one in benchmarks.items() if name.startswith("tiles-") for row in one["results"]]
    if not any(row["status"] == "measured" and row["job"]["part"] == "tile" for row in rows):
        return None
    choice = choose(rows)
    return {
        "text": table_text(choice),
        "reasons": choice.reasons,
        "wrong": choice.wrong,
        "splits": split_findings(rows),
    }
