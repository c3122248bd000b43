"""`sgl-kvpool doctor` on this machine, and on machines that are broken in some way."""

import json
import os
import resource
import subprocess
import sys

import pytest

from sgl_kvpool import doctor
from sgl_kvpool.doctor import probes
from sgl_kvpool.doctor.probes import Finding

PROBES = ["packages", "plugin", "seams", "gpu", "would be used", "host"]


def run(*arguments, pythonpath=None, **environment):
    """The command in a process of its own."""
    env = {k: v for k, v in os.environ.items() if "KVPOOL" not in k and k != "SGLANG_PLUGINS"}
    env.update(environment)
    if pythonpath:
        env["PYTHONPATH"] = str(pythonpath)
    return subprocess.run(
        [sys.executable, "-m", "sgl_kvpool.cli", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env=env,
    )


@pytest.fixture(scope="module")
def healthy():
    done = run("--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_nothing_but_json_is_printed_and_all_is_well(healthy):
    assert healthy["schema"] == 1
    assert healthy["ok"] is True
    assert list(healthy["probes"]) == PROBES
    assert all(found["problems"] == [] for found in healthy["probes"].values())


def test_facts(healthy):
    facts = {name: found["facts"] for name, found in healthy["probes"].items()}
    assert facts["packages"]["sglang"].startswith("0.5.23")
    assert facts["plugin"] == {"entry point": "sgl_kvpool.sglang_plugin:register", "SGLANG_PLUGINS": None}
    assert facts["seams"]["checked"] == facts["seams"]["hold"] > 25
    assert facts["host"]["cores"] == os.cpu_count()
    assert 0 < facts["host"]["free_bytes"] <= facts["host"]["memory_bytes"]
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    assert facts["host"]["memlock_soft_bytes"] == (None if soft == resource.RLIM_INFINITY else soft)


def test_what_would_be_used(healthy):
    facts = healthy["probes"]["would be used"]["facts"]
    if healthy["probes"]["gpu"]["facts"]["devices"]:
        assert facts["device"] == "cuda"
    else:
        assert facts["codec"] == "torch"
        assert all("kvpool_mla" in facts[name] for name in ("bf16", "fp8", "fp8_block_scale", "fp4"))


def test_what_would_be_used_on_cuda_agrees_with_what_is_refused():
    facts = probes.used("cuda").facts
    assert facts["codec"] == "Triton kernels"
    assert facts["fp4"] == facts["fp8_block_scale"] == "refused on cuda in this release"
    assert "flashmla" in facts["fp8"]
    assert "kvpool_mla" not in facts["bf16"]


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """The report where torch kills the process that imports it and SGLang is another version."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    info = folder / "sglang-0.6.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.6.1\n")
    return run(
        "--json",
        pythonpath=folder,
        SGLANG_PLUGINS="other, another",
        SGL_KVPOOL_KV_CACHE_LAYOUT="int2",
        SGL_KVPOOL_CHECK_FINITE="perhaps",
    )


def test_a_broken_installation_still_gets_a_report(broken):
    assert broken.returncode == 1
    report = json.loads(broken.stdout)
    assert report["ok"] is False
    assert list(report["probes"]) == PROBES
    problems = {name: found["problems"] for name, found in report["probes"].items()}
    assert "SGLang 0.6.1 is not a version this release was tested with" in problems["packages"][0]
    assert "ended with status -11" in problems["gpu"][0]
    assert len(problems["seams"]) >= 1
    assert problems["host"] == problems["would be used"] == []
    assert report["probes"]["host"]["facts"]["cores"] == os.cpu_count()


def test_environment_problems_name_value_and_way_out(broken):
    listed, layout, flag = json.loads(broken.stdout)["probes"]["plugin"]["problems"]
    assert "SGLANG_PLUGINS='other, another' keeps SGLang from loading sgl_kvpool" in listed
    assert "unset it" in listed
    assert "SGL_KVPOOL_KV_CACHE_LAYOUT" in layout
    assert "'int2'" in layout
    assert "SGL_KVPOOL_CHECK_FINITE='perhaps'" in flag


def test_allow_untested_makes_the_version_a_note(tmp_path):
    info = tmp_path / "sglang-0.6.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.6.1\n")
    code = "from sgl_kvpool.doctor.probes import packages; f = packages(); print(f.problems, len(f.notes))"
    for value, expected in (("1", "[] 1"), ("0", "SGL_KVPOOL_ALLOW_UNTESTED=1 to try")):
        env = {**os.environ, "PYTHONPATH": str(tmp_path), "SGL_KVPOOL_ALLOW_UNTESTED": value}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
        assert expected in done.stdout, done.stderr


@pytest.mark.parametrize("value", ["sgl_kvpool", "other, sgl_kvpool", ""])
def test_plugin_lists_that_let_us_load(monkeypatch, value):
    monkeypatch.setenv("SGLANG_PLUGINS", value)
    assert probes.plugin().problems == []


@pytest.mark.parametrize("failing", ["packages", "plugin", "host", "used", "in_child"])
@pytest.mark.parametrize("error", [RuntimeError("broke"), SystemExit("left"), ImportError("absent")])
def test_one_failing_probe_is_one_problem(monkeypatch, failing, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(probes, "in_child", lambda name: Finding({"devices": []}))
    monkeypatch.setattr(probes, failing, fail)
    findings = doctor.examine()
    assert list(findings) == PROBES
    found = doctor.problems(findings)
    assert len(found) == (2 if failing == "in_child" else 1)
    assert all(f"the probe failed: {type(error).__name__}: {error}" in text for text in found)
    assert json.loads(doctor.as_json(findings))["ok"] is False
    assert str(error) in doctor.as_text(findings)


def test_a_child_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(probes, "_TIMEOUT_SECONDS", 0.01)
    with pytest.raises(subprocess.TimeoutExpired):
        probes.in_child("gpu")


def test_text_report():
    findings = {
        "gpu": Finding(
            {"devices": [{"name": "NVIDIA H200", "capability": [9, 0], "memory_bytes": 150 * 10**9}]}
        ),
        "host": Finding({"memlock_soft_bytes": None, "free_bytes": 2 * 10**9, "x": None}, notes=["a note"]),
    }
    lines = [" ".join(line.split()) for line in doctor.as_text(findings).splitlines()]
    assert lines == [
        "gpu",
        "devices NVIDIA H200 (9.0, 150 GB)",
        "host",
        "memlock_soft_bytes unlimited",
        "free_bytes 2000000000 (2.0 GB)",
        "x -",
        "note: a note",
        "",
        "no problem found",
    ]
    findings["host"].problems += ["one", "two"]
    assert doctor.as_text(findings).endswith("2 problems, see above")


def test_memory_left_in_a_control_group(tmp_path):
    assert probes.cgroup_free_bytes(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5\n")
    assert probes.cgroup_free_bytes(tmp_path) is None
    (tmp_path / "memory.max").write_text("12\n")
    assert probes.cgroup_free_bytes(tmp_path) == 7
    (tmp_path / "memory.current").write_text("13\n")
    assert probes.cgroup_free_bytes(tmp_path) == 0


def test_memory_left_in_a_control_group_of_version_1(tmp_path):
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("5\n")
    assert probes.cgroup_free_bytes(tmp_path) is None
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("100\n")
    assert probes.cgroup_free_bytes(tmp_path) == 95
