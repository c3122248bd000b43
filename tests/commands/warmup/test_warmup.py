"""`sgl-kvpool warmup` on a CPU, with g++: what it compiles is what another process finds."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from live_processes import ran

from sgl_kvpool.cli import main

CPU = [sys.executable, "-m", "sgl_kvpool", "warmup", "--device", "cpu"]
#: Loads the engine as a server's host tier does.
LOAD_ENGINE = "from sgl_kvpool.transfer import cpu_engine as e; print(e.engine_class(required=True).name)"


def environment(folder, **changes):
    """Caches below a folder."""
    own = {"TVM_FFI_CACHE_DIR": str(folder / "tvm"), "TORCH_EXTENSIONS_DIR": str(folder / "torch")}
    return {**os.environ, **own, **changes}


def compiled(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.so")}


@pytest.fixture(scope="module")
def no_compiler(tmp_path_factory):
    """A PATH with ninja and without any compiler."""
    folder = tmp_path_factory.mktemp("bin")
    ninja = shutil.which("ninja") or Path(sys.executable).parent / "ninja"
    (folder / "ninja").symlink_to(ninja)
    return str(folder)


@pytest.fixture(scope="module")
def warmed(tmp_path_factory):
    """Caches after a warmup, which were empty before, and what it printed."""
    folder = tmp_path_factory.mktemp("caches")
    done = ran(*CPU, env=environment(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def test_everything_is_compiled_once(warmed):
    folder, printed = warmed
    lines = printed.splitlines()
    assert lines[0] == "for a server on cpu"
    assert lines[1] == f"  sgl-kvpool in {folder / 'tvm' / 'sgl_kvpool'} (TVM_FFI_CACHE_DIR)"
    assert lines[2] == f"  torch's extensions in {folder / 'torch'} (TORCH_EXTENSIONS_DIR)"
    assert [line.split(maxsplit=2)[2] for line in lines[3:7]] == [
        "compiled   CPU codec",
        "compiled   attention on CPUs",
        "compiled   transfer engine cpu",
        "compiled   SGLang's hash of pages, for stores",
    ]
    assert lines[7:] == ["4 compiled, 0 cached, 0 failed"]
    before = compiled(folder)
    assert len(before) == 4
    again = ran(*CPU, env=environment(folder))
    assert again.returncode == 0
    assert again.stdout.splitlines()[-1] == "0 compiled, 4 cached, 0 failed"
    assert compiled(folder) == before


def test_another_process_needs_no_compiler(warmed, no_compiler, tmp_path):
    folder, _ = warmed
    command = [sys.executable, "-c", LOAD_ENGINE]
    done = ran(*command, env=environment(folder, PATH=no_compiler))
    assert (done.returncode, done.stdout) == (0, "cpu\n"), done.stderr
    # Without a warmup the process needs a compiler.
    done = ran(*command, env=environment(tmp_path, PATH=no_compiler))
    assert done.returncode == 1
    assert "c++: not found" in done.stderr
    assert compiled(tmp_path) == {}


def test_a_damaged_library_is_compiled_again_and_counted(warmed):
    folder, _ = warmed
    (library,) = (folder / "tvm" / "sgl_kvpool").glob("sgl_kvpool_cpu_codec-*.so")
    content = library.read_bytes()
    library.unlink()
    library.write_bytes(content[: len(content) // 2])
    done = ran(*CPU, env=environment(folder))
    assert done.stdout.splitlines()[-1] == "1 compiled, 3 cached, 0 failed"
    assert f"{library} is damaged and is compiled again" in done.stderr
    assert library.read_bytes() == content


def test_a_failure_is_said_and_the_others_are_tried(warmed, no_compiler, tmp_path):
    (tmp_path / "torch").symlink_to(warmed[0] / "torch")
    done = ran(*CPU, env=environment(tmp_path, PATH=no_compiler))
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    for what in ("CPU codec", "attention on CPUs", "transfer engine cpu"):
        assert any(f"FAILED     {what}: RuntimeError: " in line for line in lines)
    assert any("c++: not found" in line for line in lines)
    assert lines[-2].endswith("cached     SGLang's hash of pages, for stores")
    assert lines[-1] == "0 compiled, 1 cached, 3 failed"


# Arguments


@pytest.mark.parametrize("trusted", [False, True])
def test_code_of_a_checkpoint_runs_only_if_it_is_trusted(trusted, tmp_path):
    config = {"model_type": "own", "auto_map": {"AutoConfig": "code.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise ValueError('ran')\n")
    own = environment(tmp_path, HF_MODULES_CACHE=str(tmp_path / "modules"), HF_HUB_OFFLINE="1")
    done = ran(*CPU, "--model", tmp_path, *["--trust-remote-code"] * trusted, env=own)
    assert done.returncode == 2
    assert (tmp_path / "ran").exists() == trusted
    said = "sgl-kvpool: ran" if trusted else " Give --trust-remote-code to `warmup`."
    assert done.stderr.splitlines()[-1].endswith(said)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--device", "cpu", "--model", "/nowhere"], "'/nowhere' does not exist"),
        (["--device", "cuda"], "run warmup once where it does, with these variables' folders on a volume"),
        (["--device", "cpu", "--tp", "3"], "--tp 3 does not divide the 128 heads"),
        (["--device", "cpu", "--tp", "4", "--dcp-size", "3"], "--dcp-size 3 does not divide --tp 4, "),
    ],
)
def test_servers_that_cannot_exist_are_refused(argv, said, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["warmup", *argv]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--tp", "0"], ["--kv-cache-layout", "auto"], ["--draft-tokens", "-1"]])
def test_invalid_values_of_arguments_are_refused(argv, capsys):
    with pytest.raises(SystemExit):
        main(["warmup", *argv])
    assert argv[0] in capsys.readouterr().err


def test_caches_are_where_their_owners_put_them(tmp_path):
    """SGLang's import moves Triton's and FlashInfer's caches; each library reports its own folder."""
    code = (
        "from sgl_kvpool.commands.warmup.steps import CACHES as c\n"
        "before = [cache.folder() for cache in c.values()]; import sglang\n"
        "assert before == [cache.folder() for cache in c.values()]\n"
        "import triton, flashinfer.jit.env as f, torch.utils.cpp_extension as t\n"
        "from sglang.kernels.jit.utils.compile.cache import cache_root\n"
        "assert str(c['triton'].folder()) == triton.knobs.cache.dir, triton.knobs.cache.dir\n"
        "assert c['flashinfer'].folder() == f.FLASHINFER_CACHE_DIR, f.FLASHINFER_CACHE_DIR\n"
        "assert c['sglang'].folder() == cache_root(), cache_root()\n"
        "assert t._get_build_directory('x', False).startswith(str(c['torch'].folder()) + '/')\n"
        "print(c['triton'].folder(), c['flashinfer'].folder())"
    )
    names = ("TVM_FFI_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "SGLANG_JIT_CACHE_DIR", "TRITON_CACHE_DIR",
             "FLASHINFER_WORKSPACE_BASE")  # fmt: skip
    plain = {name: value for name, value in os.environ.items() if name not in names}
    done = ran(sys.executable, "-c", code, env={**plain, "SGLANG_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'triton'} {tmp_path / '.cache' / 'flashinfer'}\n"
    moved = {name: str(tmp_path / name) for name in names}
    done = ran(sys.executable, "-c", code, env={**plain, **moved})
    assert done.returncode == 0, done.stderr
