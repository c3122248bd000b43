"""The first ten minutes on a GPU: correct and wrong kernels, and the tile table to commit.

Steps run in order of their value, each with a time limit; the limits add up to less than nine minutes. The
folder of results gets first_light.json and first_light.txt after each step; a later call continues it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from regression import parsers
from regression.environment import Machine, driver_facts
from regression.first_light_page import page
from regression.records import SCHEMA, Run, StepRecord, header, read_lines, resume, write_lines
from regression.runner import Interrupted, Step, run_steps, signals_interrupt
from regression.steps import TESTS, isolated
from sgl_kvpool.commands.bench.outputs import replace_file

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
        return _bench(
            f"tiles-{heads}", f"tiles and splits of mla_decode, {heads} heads", expected_s, limit_s,
            parsers.tiles, "tiles", "--heads", str(heads), "--continue", *device, *less,
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
            _bench("rates", "rates of an SM per clock", 35, 45, parsers.rates, "rates", "--continue"),
            without=reason,
        ),
        tiles(16, 55, 75) if on_gpu else tiles(2, 60, 150),
        _bench(
            "attention-quick", "mla_decode beside FlashMLA, if it is installed", 50, 65, parsers.attention,
            "attention", "--quick", "--minutes", "0.8", *device,
        ),
        *([tiles(8, 35, 45), tiles(32, 35, 45)] if on_gpu else []),
        _bench("codec-quick", "speed of the codec", 18, 28, parsers.codec, "codec", "--quick"),
        _bench(
            "transfer-quick", "transfer engines beside a pinned copy", 50, 60, parsers.transfer,
            "transfer", "--quick", *device,
        ),
    ]  # fmt: skip


def _bench(
    name: str, what: str, expected_s: float, limit_s: float, parse: parsers.Parser, *words: str
) -> Step:
    """Step of a benchmark of the package."""
    command = (sys.executable, "-m", "sgl_kvpool.cli", "bench", *words, "--json", "{folder}/results.json")
    return Step(name, what, command, limit_s, parse, needs=("numpy",), expected_s=expected_s)


def has_result(record: StepRecord) -> bool:
    """Whether a step need not be run again: it has finished with measurements."""
    return record.status == "ok" or (record.status == "failed" and bool(record.measurements))


class FirstLight:
    """A folder of results: journal, first_light.json and first_light.txt.

    Parameters
    ----------
    out : Path
        Folder of results, continued if they are of the same code on the same GPU.
    facts : dict
        Facts of the first line of results.
    steps : sequence of Step
        All steps, so that missing steps are reported.

    Raises
    ------
    ValueError
        If the folder's results are of other code or of another GPU, or cannot be read.
    """

    def __init__(self, out: Path, facts: dict[str, Any], steps: Sequence[Step]) -> None:
        self.out, self.facts, self.steps = out, facts, list(steps)
        self.journal = out / "results.jsonl"
        self.records: dict[str, StepRecord] = {}
        out.mkdir(parents=True, exist_ok=True)
        if not self.journal.exists():
            write_lines(self.journal, [header(facts)])
            return
        run = resume(self.journal)
        for name, meaning in (("sources_sha256", "code"), ("gpu", "GPU")):
            if run.facts.get(name) != facts[name]:
                raise ValueError(
                    f"{out} has results of another {meaning} ({name} {run.facts.get(name)}, here "
                    f"{facts[name]}); name another folder with --out"
                )
        self.facts = {**run.facts, "argv": facts["argv"]}
        self.records = dict(run.steps)

    def lacks(self, name: str) -> bool:
        """Whether a step has no result yet."""
        return name not in self.records or not has_result(self.records[name])

    def run(
        self, steps: Sequence[Step], machine: Machine, *, time_limit_scale: float, minutes: float,
        say: Callable[[str], None],
    ) -> int:  # fmt: skip
        """Run steps and write their results; returns the exit status."""
        began, status = time.monotonic(), 0

        def ended(record: StepRecord) -> None:
            if record.status == "skipped" and record.name in self.records:
                return  # keep the earlier, more complete result
            self.records[record.name] = record
            write_lines(self.journal, record.lines())
            self.write()

        self.write()
        try:
            with signals_interrupt():
                run_steps(
                    steps, machine, self.out, time_limit_scale=time_limit_scale, minutes=minutes, ended=ended,
                    say=say,
                )  # fmt: skip
        except Interrupted as caught:
            status = 128 + caught.number
        if not status:
            bad = any(record.is_bad for record in self.records.values())
            status = int(bad or not any(has_result(record) for record in self.records.values()))
        gpus, seconds = driver_facts(), round(time.monotonic() - began, 1)
        end = {"status": status, "seconds": seconds, "gpus": gpus}
        write_lines(self.journal, [{"line": "end", "schema": SCHEMA, **end}])
        self.facts = {**self.facts, "gpus_at_end": gpus}
        self.write()
        return status

    def write(self) -> None:
        """Write first_light.json and first_light.txt with the results so far."""
        report = self.report()
        replace_file(self.out / "first_light.json", json.dumps(report, indent=1, allow_nan=False) + "\n")
        replace_file(self.out / "first_light.txt", page(report))

    def report(self) -> dict[str, Any]:
        """Content of first_light.json."""
        steps, benchmarks = [], {}
        for step in self.steps:
            record = self.records.get(step.name, StepRecord(step.name, "missing", "it was not reached"))
            steps.append(
                {
                    "name": step.name, "what": step.what, "status": record.status, "reason": record.reason,
                    "seconds": round(record.seconds, 1),
                    "measurements": [one.to_json() for one in record.measurements],
                }
            )  # fmt: skip
            found = _json(self.out / "steps" / step.name / "results.json")
            if found is not None:
                benchmarks[step.name] = found
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

    @property
    def as_run(self) -> Run:
        """The results as a `Run`, for a comparison."""
        return Run(self.facts, self.records, True)


def _json(path: Path) -> Any:
    """JSON that a step has written; None if it is missing or incomplete."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None


def _tile_table(benchmarks: dict[str, Any]) -> dict[str, Any] | None:
    """Tile table from the rows of all sweeps."""
    from sgl_kvpool.commands.bench.tiles.tile_table import choose, split_findings, table_text

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
