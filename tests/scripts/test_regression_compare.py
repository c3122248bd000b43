"""What `--compare` says of two runs, by values written down here."""

from dataclasses import replace

import pytest

from scripts.h100_regression import main
from scripts.kit.records import SCHEMA, Measurement, Run, StepRecord, read_run, write_lines
from scripts.servers.regressions import compare

H100 = {"gpu": "NVIDIA H100 80GB HBM3", "options": {"layouts": ["bf16", "fp4"]}}


def run(*measurements, facts=H100, step="attention", status="ok", reason="", complete=True):
    record = StepRecord(step, status, reason, 1.0, measurements)
    return Run(dict(facts), {step: record}, complete)


def test_an_older_run_that_did_not_finish_is_a_remark_and_not_a_metric():
    found = compare(run(one(2.0), complete=False), run(one(2.0)))
    assert (found.compared, found.not_compared.total(), found.status) == (1, 0, 0)
    assert found.lines()[0] == "the older run did not finish; metrics that it lacks are ignored"


def one(value, kind="kernel_ratio", better="higher", **more):
    return Measurement("speed", value, "x", kind, better, **more)


@pytest.mark.parametrize(
    ("kind", "better", "old", "new", "expected"),
    [
        ("kernel_ratio", "higher", 2.0, 1.91, "same"),
        ("kernel_ratio", "higher", 2.0, 1.89, "worse"),
        ("kernel_ratio", "higher", 2.0, 2.2, "better"),
        ("kernel_time", "lower", 100.0, 111.0, "worse"),
        ("kernel_time", "lower", 100.0, 80.0, "better"),
        # 20 %, or 0.005 where that is more.
        ("distance", "lower", 0.100, 0.121, "worse"),
        ("distance", "lower", 0.001, 0.0059, "same"),
        ("distance", "lower", 0.001, 0.0061, "worse"),
        ("count", "lower", 0, 1, "worse"),
        ("fact", "lower", 1, 1000, "ignored"),
    ],
)
def test_margins(kind, better, old, new, expected):
    found = compare(run(one(old, kind, better)), run(one(new, kind, better)))
    said = (len(found.regressions), len(found.improvements), found.compared, found.status)
    wanted = {"same": (0, 0, 1, 0), "worse": (1, 0, 1, 1), "better": (0, 1, 1, 0), "ignored": (0, 0, 0, 2)}
    assert said == wanted[expected]


@pytest.mark.parametrize("new", [run(step="codec"), run(status="skipped", reason="torch sees no GPU")])
def test_a_step_that_was_not_run_is_reported(new):
    found = compare(run(one(2.0)), new)
    assert found.regressions == []
    assert found.status == 2
    assert sum(found.not_compared.values()) == 1
    assert "attention: " in next(iter(found.not_compared))


def test_a_layout_that_was_not_requested():
    before = run(one(2.0, layout="fp8"), replace(one(2.0, layout="fp4"), metric="fp4's"))
    found = compare(before, run())
    assert [line.split(": ")[1] for line in found.regressions] == ["fp4's"]
    assert found.not_compared == {"layout fp8 was not requested": 1}


@pytest.mark.parametrize("note", ["not run: the 8 minutes were spent", "skipped: out of memory"])
def test_a_benchmark_that_says_why_it_did_not_measure(note):
    found = compare(run(one(2.0)), run(one(None, note=note)))
    assert found.regressions == []
    assert found.not_compared == {f"attention: {note}": 1}


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (run(replace(one(2.0), metric="other")), "attention: speed: was 2 x, is missing"),
        (run(one(None, note="wrong: 3")), "attention: speed: was 2 x, not measured: wrong: 3"),
        (run(one(2.0), status="failed", reason="tests failed"), "attention: was ok, failed: tests failed"),
    ],
)
def test_what_is_worse_without_a_value(new, said):
    assert compare(run(one(2.0)), new).regressions == [said]


def test_another_gpu_compares_no_speeds():
    accuracy = Measurement("distance", 0.1, "nats", "distance", "lower")
    worse = replace(accuracy, value=0.2)
    found = compare(run(one(2.0), accuracy), run(one(1.0), worse, facts={**H100, "gpu": "NVIDIA H200"}))
    assert [line.split(": ")[1] for line in found.regressions] == ["distance"]
    assert found.not_compared == {"speeds of another GPU: NVIDIA H100 80GB HBM3, now NVIDIA H200": 1}


def test_another_schema_is_refused(tmp_path, capsys):
    old = tmp_path / "old.jsonl"
    write_lines(old, [{**Run(H100).first_line(), "schema": SCHEMA + 1}])
    with pytest.raises(SystemExit) as caught:
        main(["--compare", str(old), "--with", str(old)])
    assert caught.value.code == 2
    assert f"has schema {SCHEMA + 1}, this program reads {SCHEMA}" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{}", "not json\n", '{"line": "step"}\n'])
def test_no_results(tmp_path, text):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"a\.jsonl"):
        read_run(path)
