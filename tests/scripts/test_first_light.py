"""First light with real processes: steps that fail, hang or are missing, and runs that are killed."""

import json
from dataclasses import asdict

import pytest
from live_processes import holds, naming
from step_cases import GOOD, ONLY_TORCH, good, measured, start, step

from scripts.bench import tile_table
from scripts.h100_regression import main
from scripts.kit.environment import Machine
from scripts.kit.records import Measurement, read_run
from scripts.kit.runner import Step
from scripts.servers.results import Results
from scripts.servers.server_steps import measurements
from scripts.servers.steps import FIRST_LIGHT_MINUTES, first_light_steps
from sgl_kvpool.attention.decode_config import TileConfig

FACTS = {"gpu": None, "sources_sha256": "0" * 64, "argv": [], "gpus": [], "versions": {}}


def test_it_needs_torch_alone_and_fits_into_nine_minutes():
    steps = first_light_steps(on_gpu=True)
    assert [ONLY_TORCH.missing(step.needs) for step in steps] == [None] * len(steps)
    assert all(0 < step.expected_s < step.limit_s for step in steps)
    # What hangs is ended after at most 30 s more.
    assert sum(step.limit_s for step in steps) <= FIRST_LIGHT_MINUTES * 60 <= 9 * 60 - 30
    # Results of the tests and the tiles of 16 heads are there after three minutes.
    assert sum(step.expected_s for step in steps[:2]) < 3 * 60


def test_a_rehearsal_on_the_cpu_uses_no_gpu():
    steps = first_light_steps(on_gpu=False)
    assert steps
    assert not any("gpu" in step.needs or "cuda" in step.command for step in steps)


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--first-light"], "torch sees no GPU; --device cpu rehearses it without a GPU"),
        (["--first-light", "--device", "cpu", "--core"], "has steps of its own; leave out --core"),
        (["--first-light", "--device", "cpu", "--only", "tile"], "no step has such a name"),
    ],
)
def test_refusals(argv, why, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 2  # how it is called, and what is wrong
    assert why in printed[1]


#: Beyond its limit.
WRONG = Measurement("wrong rows", 3, "rows", "count", "lower", at_most=0)


def go(out, *steps, minutes=5.0, facts=FACTS):
    """Run the steps without a result; return the exit status and first_light.json."""
    light = Results(out, "first_light", facts, steps)
    left = [one for one in steps if light.lacks(one.name)]
    status = light.run(left, Machine(), time_limit_scale=1.0, minutes=minutes, say=print)
    return status, found_in(out)


def found_in(out):
    return json.loads((out / "first_light.json").read_text())


def statuses(found):
    return {one["name"]: one["status"] for one in found["steps"]}


def runs(out, name):
    path = out / "steps" / name / "ran"
    return len(path.read_text()) if path.exists() else 0


def test_steps_that_fail_hang_or_are_missing(tmp_path):
    every = (
        good("good"),
        step("hangs", "import time; time.sleep(600)", limit_s=1.0),
        good("wrong", WRONG),
        step("garbage", "(folder / 'results.json').write_text('{')"),
        good("elsewhere", needs=("gpu",)),
        good("last"),
    )
    status, found = go(tmp_path, *every)
    assert status == 1
    assert statuses(found) == {
        "good": "ok", "hangs": "timed out", "wrong": "failed", "garbage": "failed", "elsewhere": "skipped",
        "last": "ok",
    }  # fmt: skip
    text = (tmp_path / "first_light.txt").read_text()
    assert "6 steps: 2 ok, 1 timed out, 2 failed, 1 skipped" in text
    assert "wrong failed: wrong rows: 3 rows, limit at most 0" in text
    # Again: what has a result, good or bad, stays.
    status, found = go(tmp_path, *every)
    assert (status, runs(tmp_path, "good"), runs(tmp_path, "wrong"), runs(tmp_path, "last")) == (1, 1, 1, 1)
    assert found["steps"][0]["measurements"][0]["value"] == 42.0
    assert read_run(tmp_path / "results.jsonl").is_complete


def test_steps_cut_off_or_skipped_for_time_are_run_the_next_time(tmp_path):
    slow = step("slow", "import time; time.sleep(600)")
    status, found = go(tmp_path, good("first"), slow, good("late"), minutes=6 / 60)  # on a busy machine too
    assert status == 3
    assert "WRONG" not in (tmp_path / "first_light.txt").read_text()
    assert statuses(found) == {"first": "ok", "slow": "timed out", "late": "skipped"}
    status, found = go(tmp_path, good("first"), good("slow"), good("late"))
    assert (status, statuses(found)) == (0, dict.fromkeys(("first", "slow", "late"), "ok"))
    assert runs(tmp_path, "first") == 1


def test_a_step_that_timed_out_is_wrong_by_what_it_measured(tmp_path):
    found = Measurement("measured results", 0, "results", "fact")
    for number, (one, status) in enumerate(((found, 3), (WRONG, 1))):
        out = tmp_path / str(number)
        slow = step("slow", measured(one) + "; import time; time.sleep(600)", limit_s=6.0)
        assert go(out, good("first"), slow)[0] == status
        text = (out / "first_light.txt").read_text()
        assert "NOT KNOWN\n  slow timed out: ended at its limit of 6 s" in text
        assert ("WRONG\n  slow timed out: ended at its limit of 6 s; wrong rows: 3" in text) == (one == WRONG)


def test_a_step_that_was_cut_short_keeps_what_it_found_when_the_next_run_has_no_time(tmp_path):
    slow = step("slow", measured(GOOD) + "; import time; time.sleep(600)", limit_s=6.0)
    go(tmp_path, slow)
    _, found = go(tmp_path, slow, minutes=1e-9)
    assert statuses(found) == {"slow": "timed out"}
    assert found["steps"][0]["measurements"][0]["metric"] == "answer"


@pytest.mark.parametrize(("name", "value"), [("sources_sha256", "1" * 64), ("gpu", "NVIDIA H100")])
def test_results_of_other_code_or_of_another_gpu_are_not_mixed(tmp_path, name, value):
    go(tmp_path, good("first"))
    with pytest.raises(ValueError, match="name another folder with --out"):
        go(tmp_path, good("first"), facts={**FACTS, name: value})
    assert statuses(found_in(tmp_path)) == {"first": "ok"}


def test_a_line_that_was_cut_off(tmp_path):
    """A run killed while it wrote the line of a step."""
    go(tmp_path, good("first"), good("second"))
    journal = tmp_path / "results.jsonl"
    text = journal.read_text().splitlines(keepends=True)
    at = next(i for i, line in enumerate(text) if '"second"' in line)
    journal.write_text("".join(text[:at]) + text[at][:30])
    status, found = go(tmp_path, good("first"), good("second"))
    assert (status, statuses(found)) == (0, {"first": "ok", "second": "ok"})
    assert (runs(tmp_path, "first"), runs(tmp_path, "second")) == (1, 2)
    assert [len(one["measurements"]) for one in found["steps"]] == [1, 1]
    assert read_run(journal).steps["second"].measurements == (GOOD,)


#: Two steps in this order, of which the second takes half a minute at least.
ARGV = ["--first-light", "--device", "cpu", "--only", "codec-quick", "--only", "transfer-quick"]


def test_a_killed_run_is_continued(tmp_path):
    """The real command: valid files and no process remain, and what was measured is not measured again."""
    out = tmp_path / "out"
    there = ("--out", out, "--time-limit-scale", "20")
    process = start(*ARGV, *there)
    log = out / "logs" / "transfer-quick.log"
    holds(lambda: (log.is_file() and log.stat().st_size) or process.poll() is not None, 180)
    assert statuses(found_in(out))["codec-quick"] == "ok"
    process.kill()
    process.communicate(timeout=120)
    assert holds(lambda: not naming(str(out)), 20)
    cut = found_in(out)
    assert statuses(cut)["transfer-quick"] == "missing"
    again = start(*ARGV[:5], *there)  # without transfers, which take long
    printed, _ = again.communicate(timeout=300)
    assert again.returncode == 0, printed
    assert "[1/" not in printed  # nothing was left to do
    found = found_in(out)
    assert found["steps"] == cut["steps"]
    assert found["benchmarks"]["codec-quick"]["device"] == "cpu"
    assert len(found["sources_sha256"]) == 64


def tile_row(us, *, layout="fp4", rows=64, part="tile", splits=2):
    job = {
        "part": part, "kind": "dense", "heads": 16, "batch": 64, "context": 32768, "rows_per_list": 32768,
        "layout": layout, "tile": asdict(TileConfig(16, rows, 8, 1, 1)), "splits": splits,
    }  # fmt: skip
    return {"job": job, "status": "measured", "us": us, "graph_us": us}


@pytest.fixture
def light(tmp_path, monkeypatch):
    """A run as on a GPU, with the files of its steps and another tile than decode_config.py's."""
    monkeypatch.setattr(tile_table, "tile_config", lambda *_: TileConfig(16, 64, 8, 1, 1))
    steps = [Step(name, name, (), 1, measurements) for name in ("tests-core", "tiles-16", "attention-quick")]
    facts = {**FACTS, "gpu": "NVIDIA H100 80GB HBM3", "commit": "c" * 40}
    found = Results(tmp_path, "first_light", facts, steps)
    tests = [
        {"job": {"test": "a.py::good"}, "status": "measured", "seconds": 1.0},
        {"job": {"test": "a.py::bad[fp4]"}, "status": "wrong", "reason": "off by 3"},
    ]
    tiles = [
        tile_row(100.0),
        tile_row(60.0, rows=128),
        tile_row(51.0, rows=128, part="splits", splits=4),
        {**tile_row(0, layout="fp8"), "status": "wrong", "reason": "query 0: relative error 1"},
        tile_row(80.0, layout="fp8", rows=128),
    ]
    for name, device, wrong, rows in (
        ("tests-core", "cpu", [], tests),
        ("tiles-16", "cuda", ["fp8, triton"], tiles),
    ):
        folder = tmp_path / "steps" / name
        folder.mkdir(parents=True)
        report = {"device": device, "wrong": wrong, "results": rows}
        (folder / "results.json").write_text(json.dumps(report))
    return found


def test_the_page(light):
    text = light.text()
    assert text.startswith("NVIDIA H100 80GB HBM3, driver ")
    assert f"commit {'c' * 40}" in text
    assert "  a.py::bad[fp4]: off by 3" in text
    assert f"tile: fp8, {TileConfig(16, 64, 8, 1, 1)}: wrong at " in text
    assert "tests-core missing: it was not reached" in text
    assert f"fp4, 16 heads: 0.60 of the present time: {TileConfig(16, 128, 8, 1, 1)}" in text
    assert "4 splits take 0.85 of the time of the rule's 2" in text
