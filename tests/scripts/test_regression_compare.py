"""What `--compare` says of two runs, by values written down here."""

import json
from dataclasses import replace

import pytest

from scripts.h100_regression import main
from scripts.kit.records import SCHEMA, Measurement, Run, StepRecord, read_run, write_lines
from scripts.servers.compare import compare

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
        ("kernel_time", "lower", 100.0, 109.0, "same"),
        ("kernel_time", "lower", 100.0, 111.0, "worse"),
        ("kernel_time", "lower", 100.0, 80.0, "better"),
        ("server_ratio", "lower", 1.0, 1.2, "worse"),
        ("server_time", "higher", 1000.0, 790.0, "worse"),
        ("server_time", "higher", 1000.0, 810.0, "same"),
        # 20 %, or 0.005 where that is more.
        ("distance", "lower", 0.100, 0.119, "same"),
        ("distance", "lower", 0.100, 0.121, "worse"),
        ("distance", "lower", 0.001, 0.0059, "same"),
        ("distance", "lower", 0.001, 0.0061, "worse"),
        ("agreement", "higher", 0.99, 0.975, "same"),
        ("agreement", "higher", 0.99, 0.96, "worse"),
        ("count", "higher", 120, 119, "worse"),
        ("count", "lower", 0, 1, "worse"),
        ("size", "lower", 416, 656, "worse"),
        ("size", "higher", 100000, 99600, "same"),
        ("target", "higher", 1, 0, "worse"),
        ("fact", "lower", 1, 1000, "ignored"),
    ],
)
def test_margins(kind, better, old, new, expected):
    found = compare(run(one(old, kind, better)), run(one(new, kind, better)))
    counts = (len(found.regressions), len(found.improvements), found.compared)
    assert (
        counts == {"same": (0, 0, 1), "worse": (1, 0, 1), "better": (0, 1, 1), "ignored": (0, 0, 0)}[expected]
    )
    assert found.status == {"same": 0, "worse": 1, "better": 0, "ignored": 2}[expected]


def test_the_line_names_everything():
    found = compare(run(one(2.0)), run(one(1.5)))
    assert found.regressions == ["attention: speed: 2 to 1.5 x (-25.0%); margin 0.1"]


def test_a_metric_that_vanished():
    other = Measurement("other", 1.0, "x", "kernel_ratio")
    found = compare(run(one(2.0), other), run(other))
    assert found.regressions == ["attention: speed: was 2 x, is missing"]


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


def test_a_value_that_could_not_be_measured_any_more():
    found = compare(run(one(2.0)), run(one(None, note="wrong: 0.3 away")))
    assert found.regressions == ["attention: speed: was 2 x, not measured: wrong: 0.3 away"]


def test_a_new_metric_is_no_regression():
    found = compare(run(), run(one(2.0)))
    assert found.regressions == []
    assert found.not_compared == {"attention: new": 1}


def test_a_step_that_fails_now():
    found = compare(run(one(2.0)), run(one(2.0), status="failed", reason="tests failed"))
    assert found.regressions == ["attention: was ok, failed: tests failed"]


def test_another_gpu_compares_no_speeds():
    accuracy = Measurement("distance", 0.1, "nats", "distance", "lower")
    worse = replace(accuracy, value=0.2)
    found = compare(run(one(2.0), accuracy), run(one(1.0), worse, facts={**H100, "gpu": "NVIDIA H200"}))
    assert [line.split(": ")[1] for line in found.regressions] == ["distance"]
    assert found.not_compared == {"speeds of another GPU: NVIDIA H100 80GB HBM3, now NVIDIA H200": 1}


def test_a_cpu_compares_no_speeds():
    facts = {**H100, "gpu": None}
    found = compare(run(one(2.0), facts=facts), run(one(1.0), facts=facts))
    assert (found.regressions, found.status) == ([], 2)


# ------------------------------------------------------------- files, and the command


def written(path, value, schema=SCHEMA, end=True):
    lines = [Run(H100).first_line(), StepRecord("attention", "ok", "", 1.0, (one(value),)).as_line()]
    lines += [{"line": "end", "schema": schema, "status": 0, "seconds": 1}] if end else []
    write_lines(path, [{**line, "schema": schema} for line in lines])
    return path


def test_a_run_is_read_as_written(tmp_path):
    found = read_run(written(tmp_path / "a.jsonl", 2.0))
    assert found.facts == H100
    assert found.steps == {"attention": StepRecord("attention", "ok", "", 1.0, (one(2.0),))}
    assert found.is_complete
    assert not read_run(written(tmp_path / "b.jsonl", 2.0, end=False)).is_complete


def test_every_line_is_json_with_the_schema(tmp_path):
    path = written(tmp_path / "a.jsonl", 2.0)
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert [line["line"] for line in lines] == ["run", "step", "end"]
    assert {line["schema"] for line in lines} == {SCHEMA}


@pytest.mark.parametrize(("new", "status", "said"), [(1.0, 1, "REGRESSION"), (2.0, 0, "0 regressions")])
def test_the_command(tmp_path, capsys, new, status, said):
    old, now = written(tmp_path / "old.jsonl", 2.0), written(tmp_path / "new.jsonl", new)
    assert main(["--compare", str(old), "--with", str(now)]) == status
    assert said in capsys.readouterr().out


def test_another_schema_is_refused(tmp_path, capsys):
    old = written(tmp_path / "old.jsonl", 2.0, schema=SCHEMA + 1)
    new = written(tmp_path / "new.jsonl", 2.0)
    with pytest.raises(SystemExit) as caught:
        main(["--compare", str(old), "--with", str(new)])
    assert caught.value.code == 2
    assert f"has schema {SCHEMA + 1}, this program reads {SCHEMA}" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{}", "not json\n", '{"line": "step"}\n'])
def test_no_results(tmp_path, text):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"a\.jsonl"):
        read_run(path)
