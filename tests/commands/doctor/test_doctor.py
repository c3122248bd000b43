"""`sgl-kvpool doctor` on this machine, and on machines that are broken in some way."""

import hashlib
import json
import os
import pwd
import re
import resource
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import foreign_version
import psutil
import pytest
import torch
from live_processes import alive, ran
from ml_dtypes import _ml_dtypes_ext

from sgl_kvpool.cli import main
from sgl_kvpool.commands import doctor
from sgl_kvpool.commands.doctor import as_text, compiled_code, probes
from sgl_kvpool.commands.doctor.probes import Finding
from sgl_kvpool.commands.warmup.steps import CACHES
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.sglang_plugin import hook_points

PROBES = [
    *("packages", "plugin", "compiled code", "hook points", "gpu", "would be used", "host"),
    "folders of stores",
]


def run(*arguments, **environment):
    """The command in a process of its own."""
    env = {k: v for k, v in os.environ.items() if "KVPOOL" not in k and k != "SGLANG_PLUGINS"}
    return ran(sys.executable, "-m", "sgl_kvpool", "doctor", *arguments, env={**env, **environment})


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
    assert facts["hook points"]["checked"] == facts["hook points"]["hold"] > 25
    assert facts["host"]["cores"] == os.cpu_count()
    assert 0 < facts["host"]["free_bytes"] <= facts["host"]["memory_bytes"]
    assert facts["host"]["host_tier_bytes"] == max(0, facts["host"]["free_bytes"] - (10 << 30))
    assert facts["host"]["compiler"] == shutil.which("c++")
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    assert facts["host"]["memlock_soft_bytes"] == (None if soft == resource.RLIM_INFINITY else soft)


def test_what_would_be_used_on_cuda_and_on_other_devices():
    facts = probes.used("cuda").facts
    assert facts["codec"] == "Triton kernels"
    for layout in set(MLAKVCacheLayout) - {MLAKVCacheLayout.BF16}:
        assert facts[layout.value] == "attention by kvpool_mla, chosen by default"
    assert facts["bf16"] == "attention by a backend of SGLang's choice, or by kvpool_mla if you name it"
    # For other devices.
    facts = probes.used("xpu").facts
    assert facts["fp4"] == facts["fp8_block_scale"] == "refused on xpu in this release"
    assert "kvpool_mla" not in facts["bf16"]


@pytest.mark.parametrize(
    ("capability", "note"),
    [
        ((8, 0), "needs a Hopper GPU (compute capability 9.0), and this one has 8.0"),
        ((9, 0), None),
        ((10, 3), "was compiled and tested for 9.0 (H100, H200) only"),
    ],
)
def test_a_gpu_that_is_no_hopper(monkeypatch, capability, note):
    """What a server says at start is in the report, where it names the layouts too."""
    described = SimpleNamespace(name="GPU", major=capability[0], minor=capability[1], total_memory=1)
    monkeypatch.setattr(probes, "in_child", lambda name: Finding() if name != "gpu" else probes.gpu())
    for name, answer in (("is_available", True), ("device_count", 1), ("get_device_properties", described)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    findings = doctor.examine()
    assert [one for one in findings["gpu"].notes if "GPU:" in one] == [f"GPU: kvpool_mla {note}"] * bool(note)
    facts, before = findings["would be used"].facts, capability < (9, 0)
    assert facts["fp4"] == (
        f"refused: kvpool_mla {note}" if before else "attention by kvpool_mla, chosen by default"
    )
    assert facts["bf16"].endswith("SGLang's choice" if before else "or by kvpool_mla if you name it")


def test_an_exported_arrangement_is_what_would_be_used(monkeypatch):
    assert probes.used("cpu").facts["arrangement"] == "layer_major (auto)"
    monkeypatch.setenv("KVPOOL_KV_CACHE_ARRANGEMENT", "token_major")
    facts = probes.used("cuda").facts
    assert facts["arrangement"] == "token_major"
    assert "SGLang's choice" in facts["bf16"]
    monkeypatch.setenv("KVPOOL_KV_CACHE_ARRANGEMENT", "page_major")
    assert probes.used("cuda").facts["bf16"] == "attention by kvpool_mla, chosen by default"
    monkeypatch.delenv("KVPOOL_KV_CACHE_LAYOUT", raising=False)
    (note,) = probes.plugin().notes
    assert "a server that is not given --kv-cache-layout will refuse to start" in note
    monkeypatch.setenv("KVPOOL_KV_CACHE_LAYOUT", "fp4")
    assert probes.plugin().notes == []


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """The report where torch kills the process that imports it and SGLang is another version."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    foreign_version.write(folder)
    given = {"KVPOOL_KV_CACHE_LAYOUT": "int2", "KVPOOL_KV_CACHE_ARRANGEMENT": "head_major"}
    given |= {"KVPOOL_CHECK_FINITE": "perhaps", "SGLANG_PLUGINS": "other, another"}
    return run("--json", PYTHONPATH=str(folder), **given)


def test_a_broken_installation_still_gets_a_report(broken):
    assert broken.returncode == 1
    report = json.loads(broken.stdout)
    assert report["ok"] is False
    assert list(report["probes"]) == PROBES
    problems = {name: found["problems"] for name, found in report["probes"].items()}
    assert "SGLang 0.6.1 is not a version this release was tested with" in problems["packages"][0]
    assert "its process was killed by SIGSEGV, and gave no answer" in problems["gpu"][0]
    assert "an assumption" in report["probes"]["would be used"]["notes"][0]
    assert len(problems["hook points"]) >= 1
    assert problems["host"] == problems["would be used"] == []
    assert report["probes"]["host"]["facts"]["cores"] == os.cpu_count()


def test_environment_problems_name_value_and_way_out(broken):
    listed, layout, arrangement, flag = json.loads(broken.stdout)["probes"]["plugin"]["problems"]
    assert "SGLANG_PLUGINS='other, another' keeps SGLang from loading sgl_kvpool" in listed
    assert "unset it" in listed
    assert "KVPOOL_KV_CACHE_LAYOUT" in layout
    assert "'int2'" in layout
    assert "KVPOOL_KV_CACHE_ARRANGEMENT='head_major' is not a KV cache arrangement" in arrangement
    assert "auto, layer_major, token_major, page_major" in arrangement
    assert "KVPOOL_CHECK_FINITE='perhaps'" in flag


def test_allow_untested_makes_the_version_a_note(monkeypatch):
    monkeypatch.setattr(hook_points, "installed_version", lambda: "0.6.1")
    for value, counts in (("1", (0, 1)), ("0", (1, 0))):
        monkeypatch.setenv("KVPOOL_ALLOW_UNTESTED", value)
        found = probes.packages()
        assert (len(found.problems), len(found.notes)) == counts
    assert "KVPOOL_ALLOW_UNTESTED=1 to try" in found.problems[0]


def test_a_plugin_list_that_lets_us_load(monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "other, sgl_kvpool")
    assert probes.plugin().problems == []


@pytest.mark.parametrize("failing", ["packages", "plugin", "used", "in_child"])
@pytest.mark.parametrize("error", [RuntimeError("broke"), SystemExit("left")])
def test_one_failing_probe_is_one_problem(monkeypatch, failing, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(probes, "in_child", lambda name: Finding({"devices": []}))
    monkeypatch.setattr(probes, failing, fail)
    findings = doctor.examine()
    assert list(findings) == PROBES
    found = doctor.problems(findings)
    assert len(found) == (3 if failing == "in_child" else 1)
    assert all(f"the probe failed: {type(error).__name__}: {error}" in text for text in found)
    assert json.loads(doctor.as_json(findings))["ok"] is False
    assert str(error) in doctor.as_text(findings)


def test_a_child_that_hangs_is_ended_and_the_report_goes_on(monkeypatch, tmp_path):
    pid = tmp_path / "pid"
    (tmp_path / "torch.py").write_text(
        f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(probes, "_TIMEOUT_SECONDS", 8)
    findings = doctor.examine()
    assert list(findings) == PROBES
    assert "hung: killed after 8 s" in findings["gpu"].problems[0]
    assert not alive(int(pid.read_text()))


#: A pynvml whose initialisation fails with error STATE unless that is 0, and a torch that sees no GPU.
FAKE_NVML = """
NVML_ERROR_LIBRARY_NOT_FOUND, NVML_ERROR_DRIVER_NOT_LOADED = 13, 9
class NVMLError(Exception):
    def __init__(self, value):
        super().__init__(f"error {value}")
        self.value = value
def nvmlInit():
    if STATE: raise NVMLError(STATE)
def nvmlSystemGetCudaDriverVersion_v2(): return 12080
def nvmlSystemGetDriverVersion(): return "570.1"
"""
FAKE_TORCH = """
class version: cuda = "13.0"
class cuda:
    is_available = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 0)
"""


@pytest.mark.parametrize(
    ("state", "visible", "problem", "note"),
    [
        (0, None, "install a driver that is at least as new", None),
        (0, "", None, "CUDA_VISIBLE_DEVICES='' hides the GPUs; unset it"),
        (13, None, None, "no GPU"),
        (9, None, None, "no GPU"),
        (18, None, "the NVIDIA driver does not answer (error 18): reload", "no GPU"),
    ],
)
def test_drivers(monkeypatch, tmp_path, state, visible, problem, note):
    """Drivers in several states: pynvml and torch are replaced in the probe's own process."""
    (tmp_path / "pynvml.py").write_text(f"STATE = {state}\n{FAKE_NVML}")
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    finding = probes.in_child("gpu")
    assert finding.facts["driver"] == (None if state else "570.1")
    assert finding.facts["CUDA of the driver"] == (None if state else "12.8")
    for text, found in ((problem, finding.problems), (note, finding.notes)):
        assert len(found) == (text is not None)
        assert text is None or text in found[0]


@pytest.fixture
def caches(monkeypatch, tmp_path):
    for cache in CACHES.values():
        monkeypatch.setenv(cache.variable, str(tmp_path / cache.variable))


def test_damaged_libraries_are_named(monkeypatch, tmp_path, caches):
    own, code = tmp_path / "TVM_FFI_CACHE_DIR" / "sgl_kvpool", b"code"
    assert compiled_code() == Finding({"folder": str(own), "libraries": 0, "size_bytes": 0})
    own.mkdir(parents=True)
    library = own / f"m-1-2-{hashlib.sha256(code).hexdigest()[:16]}.so"
    library.write_bytes(code)
    assert compiled_code() == Finding({"folder": str(own), "libraries": 1, "size_bytes": 4})
    library.write_bytes(code[:-1])
    assert compiled_code().notes == [f"{library} is damaged; a server that needs it compiles it again"]
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert compiled_code().problems == [
        f"{library} is damaged, and its folder is read-only: make it again there"
    ]


def test_folders_of_code_that_others_can_change(tmp_path, caches):
    order = ("own", "sglang", "torch", "triton", "flashinfer")
    folders = {CACHES[name].folder(): CACHES[name].variable for name in order}
    for folder in folders:
        folder.mkdir(parents=True)
        folder.chmod(0o777)
    assert compiled_code().problems == [
        f"other accounts can change what is loaded from {folder}: any account may write into {folder} (mode "
        f"0777); use a folder that only this account can write (chmod 700), or set {variable} to one"
        for folder, variable in folders.items()
    ]


def test_a_cache_that_cannot_be_written_or_found(monkeypatch, tmp_path, caches, capsys):
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path)
    (problem,) = compiled_code().problems
    assert problem == (
        f"{tmp_path}/TVM_FFI_CACHE_DIR/sgl_kvpool cannot be written, and servers cannot compile what it "
        "lacks; set TVM_FFI_CACHE_DIR to a folder of this account"
    )
    # A container that runs as any account.
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    said = "{} cannot be found, as neither HOME nor passwd names a home folder; set {} to a folder of this "
    said += "account"
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    assert said.format("~/.cache/torch_extensions", "TORCH_EXTENSIONS_DIR") in compiled_code().problems
    monkeypatch.delenv("TVM_FFI_CACHE_DIR")
    text = said.format("~/.cache/tvm-ffi", "TVM_FFI_CACHE_DIR")
    assert doctor._guarded(compiled_code).problems == [text]
    assert main(["warmup", "--device", "cpu"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"sgl-kvpool: {text}"


@pytest.mark.parametrize("place", ["file", "loop", "closed/x"])
def test_a_cache_that_cannot_be_made(monkeypatch, tmp_path, caches, place):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "closed").mkdir(0)
    for cache in CACHES.values():
        monkeypatch.setenv(cache.variable, f"{tmp_path}/{place}")
    user = os.getresuid()
    if place == "closed/x" and user[0] == 0:  # root may look into it
        os.setresuid(65534, 65534, 0)
    try:
        (problem,) = compiled_code().problems
    finally:
        os.setresuid(*user)
    assert problem.startswith(f"{tmp_path}/{place}/sgl_kvpool cannot be written, and servers cannot compile")


def test_truncated_libraries_of_others_are_named(tmp_path, caches):
    real = Path(_ml_dtypes_ext.__file__).read_bytes()  # its table of sections is its end
    parts = ("SGLANG_JIT_CACHE_DIR/x", "TORCH_EXTENSIONS_DIR/x", "TRITON_CACHE_DIR/x",
             "FLASHINFER_WORKSPACE_BASE/.cache/flashinfer")  # fmt: skip
    folders = [tmp_path / part for part in parts]
    for folder, length_bytes in zip(folders, (0, 63, 5000, len(real) - 1), strict=True):
        folder.mkdir(parents=True)
        (folder / "good.so").write_bytes(real)
        (folder / "bad.so").write_bytes(real[:length_bytes])
    assert compiled_code().problems == [
        f"{folder / 'bad.so'} is truncated, and a process that loads it ends with SIGBUS: delete {folder}"
        for folder in folders
    ]


def test_free_memory_is_what_sglang_finds(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=(10 << 30) - 7))
    finding = probes.host()
    assert finding.facts["free_bytes"] <= (10 << 30) - 7
    assert finding.facts["host_tier_bytes"] == 0
    assert any("--enable-hierarchical-cache would not start" in note for note in finding.notes)


def test_the_cuda_toolkit_is_named(monkeypatch, tmp_path):
    def report(home):
        monkeypatch.setenv("CUDA_HOME", str(home))
        return as_text({"host": probes.host()})

    assert f"note: {tmp_path}: no bin/nvcc, cuda_runtime.h and libcudart; " in report(tmp_path)
    for name in ("bin/nvcc", "include/cuda_runtime.h", "lib64/libcudart.so"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    assert re.search(f"CUDA toolkit +{tmp_path}\n", report(tmp_path))


def test_a_control_group_outside_the_namespace(monkeypatch):
    """SGLang's function refuses its path; the other facts of the host stay."""
    proc = {
        Path("/proc/self/cgroup"): "0::/../other\n",
        Path("/proc/self/mountinfo"): "1 0 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
    }
    read_text = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, *options: proc.get(path) or read_text(path, *options))
    finding = probes.host()
    assert finding.problems == [
        "free memory is unknown: ValueError of SGLang: Cannot resolve cgroup memory path: /../other"
    ]
    assert finding.facts["cores"] == os.cpu_count()
    assert finding.facts["host_tier_bytes"] is None
