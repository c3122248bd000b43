"""Compiled libraries are found by contents: sources, compilers and own bytes, and neither paths nor times."""

import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from live_processes import ran

from sgl_kvpool import compiler
from sgl_kvpool.compiler import Module
from sgl_kvpool.refusal import Refusal

PACKAGE = Path(compiler.__file__).parent
#: A function without arguments; tvm-ffi's C header alone compiles in a fraction of a second.
SOURCE = """
#include <tvm/ffi/c_api.h>
#include "value.h"
extern "C" int __tvm_ffi_value(void*, const TVMFFIAny*, int32_t, TVMFFIAny* result) {
  result->type_index = kTVMFFIInt;
  result->v_int64 = VALUE;
  return 0;
}
"""
#: Loads the module of `sources` in another process.
PROGRAM = """
import logging, sys
from pathlib import Path
from sgl_kvpool.compiler import Module
logging.basicConfig(level=logging.WARNING)
print(Module("small", Path(sys.argv[1]), ("-O0",)).load().value())
"""


def warnings(caplog):
    """What was logged from warnings on."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def cache(tmp_path, monkeypatch, caplog):
    """Folder of the libraries, empty; warnings are logged, whatever level SGLang has set in this process."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setenv("TVM_FFI_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sgl_kvpool"


@pytest.fixture
def small(tmp_path, cache):
    """A module whose value is in a header."""
    return sources(tmp_path / "here")


@pytest.fixture
def library(small):
    """The module's library."""
    small.load()
    (found,) = compiler.libraries()
    return found


def sources(folder, value=1):
    folder.mkdir()
    (folder / "small.cpp").write_text(SOURCE)
    (folder / "value.h").write_text(f"#define VALUE {value}\n")
    return Module("small", folder / "small.cpp", ("-O0",))


def in_process(module, **changes):
    command = [sys.executable, "-c", PROGRAM, str(module.source)]
    return subprocess.Popen(
        command, env={**os.environ, **changes}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def answer(process):
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return output.strip(), errors


def put(path, content):
    """Replace a file, which processes that have mapped the old one keep."""
    path.unlink()
    path.write_bytes(content)


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def slow_compiler(folder, before):
    """A compiler that runs a shell command before it compiles or links."""
    return script(folder / "cxx", f'[ "$1" = --version ] || {{ {before}; }}; exec c++ "$@"')


def test_a_header_that_is_older_than_the_library(small, cache):
    """An image is built from old files, a checkout goes back: times say nothing."""
    assert small.load().value() == 1
    header = small.source.with_name("value.h")
    header.write_text("#define VALUE 2\n")
    os.utime(header, (0, 0))
    assert small.load().value() == 2
    header.write_text("#define VALUE 1\n")
    before = compiler.libraries()
    assert small.load().value() == 1
    assert compiler.libraries() == before
    header.write_text('#error "old"\n')
    os.utime(header, (0, 0))
    with pytest.raises(RuntimeError, match='#error "old"') as raised:
        small.load()
    assert str(raised.value).endswith(f"small is kept in {cache}, which TVM_FFI_CACHE_DIR moves")
    assert compiler.libraries() == before
    assert not list(cache.glob(".build-*"))


def test_what_else_is_in_the_name(small, library, monkeypatch, tmp_path):
    replace(small, flags=("-O1",)).load()
    monkeypatch.setattr(compiler, "VERSION", "0.0.0")
    small.load()
    cxx = script(tmp_path / "cxx", '[ "$1" = --version ] && echo "c++ 99" && exit; exec c++ "$@"')
    monkeypatch.setenv("CXX", cxx)
    small.load()
    monkeypatch.setattr("tvm_ffi.__version__", "99")
    small.load()
    names = {path.name.rpartition("-")[0] for path in compiler.libraries()}
    assert len(names) == 5
    assert library in compiler.libraries()


def test_an_installation_at_another_path_shares_the_library(library, tmp_path, monkeypatch):
    other = sources(tmp_path / "there")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert other.load().value() == 1
    assert compiler.libraries() == [library]


@pytest.mark.parametrize("length", [0, 64, 0.5, -1, "flipped"])
def test_damaged_libraries_are_compiled_again_and_said(length, small, library, caplog):
    intact = library.read_bytes()
    half = len(intact) // 2
    put(
        library,
        intact[:half] + bytes([intact[half] ^ 1]) + intact[half + 1 :] if length == "flipped"
        else intact[: half if length == 0.5 else length],
    )  # fmt: skip
    assert compiler.damaged(library)
    assert small.load().value() == 1
    assert warnings(caplog) == [f"sgl-kvpool: {library} is damaged and is compiled again"]
    (again,) = compiler.libraries()
    assert not compiler.damaged(again)
    caplog.clear()
    assert small.load().value() == 1
    assert not caplog.records


def test_a_library_that_is_intact_and_cannot_be_loaded(small, library, caplog):
    """As one that was linked with a newer C library; it is compiled once, also if that does not help."""
    library.unlink()
    bad = b"not a library"
    digest = hashlib.sha256(bad).hexdigest()[:16]
    library = library.with_name(f"{library.name.rpartition('-')[0]}-{digest}.so")
    library.write_bytes(bad)
    assert small.load().value() == 1
    assert f"{library} cannot be loaded and is compiled again: " in caplog.text
    assert not library.exists()
    assert len(compiler.libraries()) == 1


def test_processes_that_start_at_once_compile_once(small, tmp_path):
    log = tmp_path / "log"
    cxx = slow_compiler(tmp_path, f'echo "$*" >> {log}; sleep 1')
    started = [in_process(small, CXX=cxx) for _ in range(2)]
    assert [answer(process)[0] for process in started] == ["1"] * 2
    assert len(log.read_text().splitlines()) == 2  # compiled and linked
    assert len(compiler.libraries()) == 1


def test_a_killed_compilation_leaves_nothing_that_is_used(small, tmp_path, cache):
    cxx = slow_compiler(tmp_path, f"touch {tmp_path}/at; sleep 600")
    process = in_process(small, CXX=cxx)
    while process.poll() is None and not (tmp_path / "at").exists():
        pass
    process.kill()
    process.communicate()
    assert compiler.libraries() == []
    assert small.load().value() == 1


def test_no_compiler(small, monkeypatch):
    """Libraries of any compiler are used where there is none."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match="no-such-compiler: not found"):
        small.load()
    monkeypatch.delenv("CXX")
    small.load()
    monkeypatch.setenv("CXX", "no-such-compiler with an open '")
    assert small.load().value() == 1


def test_a_compiler_that_cannot_build(small, library, monkeypatch, tmp_path, caplog):
    """As g++ without its headers: the library of another compiler is used, but none of other sources."""
    cxx = script(tmp_path / "cxx", '[ "$1" = --version ] && echo "g++ (GCC) 99" && exit; exit 1')
    monkeypatch.setenv("CXX", cxx)
    assert small.load().value() == 1
    (said,) = warnings(caplog)
    assert said.startswith(f"sgl-kvpool: {library}, of another compiler, is loaded: ninja ")
    small.source.with_name("value.h").write_text("#define VALUE 2\n")
    with pytest.raises(RuntimeError, match="ninja exited with status 1"):
        small.load()


def test_one_compiler_under_many_names_and_in_any_language(small, monkeypatch, tmp_path):
    (tmp_path / "my c++").symlink_to(shutil.which("c++"))
    in_german = script(tmp_path / "cxx", '[ "$LC_ALL" = C ] || echo "Keine Garantie"; exec c++ "$@"')
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    digests = set()
    for name in ("c++", "g++", shutil.which("g++"), f"'{tmp_path}/my c++'", in_german):
        monkeypatch.setenv("CXX", name)
        digests.add(small._compilers())
    assert len(digests) == 1
    # Clang's version stands before the bracket, and below it a folder.
    for version, folder in ((18, "a"), (18, "b"), (19, "a")):
        compiler._version.cache_clear()
        said = f"Ubuntu clang version {version}.1 (caf\\351)\nInstalledDir: /{folder}\n"
        script(tmp_path / "cxx", f"printf '{said}'")
        digests.add(small._compilers())
    assert len(digests) == 3


def without_rights(module, code):
    """Output of Python code with `module`, as a user who may not write."""
    program = (
        "import os, sys, filelock, tvm_ffi.cpp\nfrom pathlib import Path\n"
        "from sgl_kvpool.compiler import Module\n"
        "if os.geteuid() == 0: os.seteuid(65534)\n"
        f"module = Module('small', Path(sys.argv[1]), ('-O0',))\n{code}"
    )
    return ran(sys.executable, "-c", program, module.source)


@pytest.fixture
def public(monkeypatch):
    """A folder that every user can read; pytest closes its own to other users."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        monkeypatch.setenv("TVM_FFI_CACHE_DIR", str(Path(folder) / "cache"))
        yield Path(folder)


def test_a_folder_that_cannot_be_written(public):
    small, cache = sources(public / "here"), public / "cache" / "sgl_kvpool"
    done = without_rights(small, "module.load()")
    assert (
        f"Refusal: the folder {cache} cannot be made (Permission denied); set TVM_FFI_CACHE_DIR to a "
        in done.stderr
    )
    cache.mkdir(parents=True)
    cache.chmod(0o555)
    done = without_rights(small, "module.load()")
    assert done.returncode == 1
    assert "Permission denied" in done.stderr
    assert f"small is kept in {cache}, which TVM_FFI_CACHE_DIR moves" in done.stderr
    cache.chmod(0o755)
    small.load()
    cache.chmod(0o555)
    done = without_rights(small, "print(module.load().value())")
    assert done.stdout == "1\n", done.stderr
    cache.chmod(0o755)


@pytest.mark.parametrize("source", sorted(PACKAGE.glob("*/csrc/*.cpp")), ids=lambda path: path.name)
def test_the_compiler_reads_no_source_that_is_not_in_the_name(source, monkeypatch):
    """Files that g++ lists, outside of the compiler's and tvm-ffi's own folders."""
    import tvm_ffi

    includes = Path(tvm_ffi.__file__).parent / "include"
    # -MM leaves out system headers.
    listed = ran("c++", "-std=c++20", f"-I{includes}", "-MM", source, check=True).stdout
    read = {Path(word).resolve() for word in re.findall(r"\S+\.(?:cpp|h|cuh)\b", listed)}
    own = {path for path in read if not path.is_relative_to(includes.resolve())}
    assert len(own) > 2
    hashed = set()
    monkeypatch.setattr(Path, "read_bytes", lambda path, real=Path.read_bytes: hashed.add(path) or real(path))
    Module("any", source, ())._inputs()
    assert own <= {path.resolve() for path in hashed}


@pytest.mark.parametrize(
    ("place", "mode"), [("cache", 0o777), ("cache/sgl_kvpool", 0o777), ("cache/sgl_kvpool", 0o1777)]
)
def test_a_folder_that_other_accounts_can_write(place, mode, small, cache, tmp_path):
    """Whoever can write it can make a library under any name, as all that a name is made from is public."""
    small.load()
    exposed = tmp_path / place
    exposed.chmod(mode)
    what = "write into" if exposed == cache else "replace what is in"
    for module in (small, sources(tmp_path / "other", 2)):  # nothing is loaded, and nothing compiled into it
        with pytest.raises(Refusal) as raised:
            module.load()
        assert str(raised.value) == (
            f"other accounts can change what is loaded from {cache}: any account may {what} {exposed} (mode "
            f"{mode:04o}); use a folder that only this account can write (chmod 700), or set "
            "TVM_FFI_CACHE_DIR to one"
        )
    assert len(compiler.libraries()) == 1
    exposed.chmod(0o755)  # to be read is no harm: one account compiles for others
    assert small.load().value() == 1


@pytest.mark.parametrize("whose", ["everybody's", "another account's"])
def test_a_library_that_another_account_has_planted(whose, small, library, tmp_path, caplog):
    """It was planted before the folder's mode was corrected."""
    if whose != "everybody's" and os.geteuid() != 0:
        pytest.skip("needs root, to give a file away")
    stem = library.name.rpartition("-")[0]
    library.unlink()
    sources(tmp_path / "there", 2).load()
    (planted,) = compiler.libraries()
    planted = planted.rename(planted.with_name(f"{stem}-{compiler._file_digest(planted)}.so"))
    planted.chmod(0o666) if whose == "everybody's" else os.chown(planted, 54321, -1)
    fact = f"any account may write into {planted} (mode 0666)"
    fact = fact if whose == "everybody's" else f"{planted} belongs to account 54321"
    assert small.load().value() == 1
    assert warnings(caplog) == [
        f"sgl-kvpool: {planted} can be changed by other accounts ({fact}) and is compiled again"
    ]
    assert compiler.libraries() == [library]


def test_what_is_made_is_this_accounts_alone(small, cache):
    before = os.umask(0)
    try:
        small.load()
    finally:
        os.umask(before)
    (library,) = compiler.libraries()
    assert {path.stat().st_mode & 0o777 for path in (cache, cache.parent)} == {0o700}
    assert library.stat().st_mode & 0o022 == 0
    made = library.stat().st_ino
    small.load()
    assert compiler.libraries()[0].stat().st_ino == made


def test_a_build_that_fails_is_not_repeated(small, tmp_path, monkeypatch):
    """By the same process; the build of other sources is tried."""
    log = tmp_path / "log"
    monkeypatch.setenv("CXX", slow_compiler(tmp_path, f"echo >> {log}; exit 1"))
    for _ in range(3):
        with pytest.raises(RuntimeError, match="small is kept in"):
            small.load()
    assert len(log.read_text()) == 1
    small.source.with_name("value.h").write_text("#define VALUE 2\n")
    with pytest.raises(RuntimeError, match="small is kept in"):
        small.load()
    assert len(log.read_text()) == 2
