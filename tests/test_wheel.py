"""What `make wheel` packs, the Dockerfile that installs it, and the pages that name both."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Names in a wheel that is made of a copy of this tree's tracked files."""
    listed = subprocess.run(
        ["git", "ls-files", "sgl_kvpool", "pyproject.toml", "README.md", "LICENSE"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    tracked = [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]
    folder = tmp_path_factory.mktemp("tree")
    for name in tracked:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    done = subprocess.run([*command, "--wheel-dir", "dist", "."], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (wheel,) = (folder / "dist").iterdir()
    return wheel.name, zipfile.ZipFile(wheel).namelist(), tracked


@pytest.mark.slow
def test_a_wheel_has_every_file_of_the_package(packed):
    """Sources that are compiled at run time and the demo's model among them."""
    _, names, tracked = packed
    assert {name for name in tracked if name.startswith("sgl_kvpool/")} == {
        name for name in names if ".dist-info/" not in name
    }


@pytest.mark.slow
def test_the_dockerfile_copies_such_a_wheel(packed):
    name, _, _ = packed
    (pattern,) = re.findall(r"^COPY dist/(\S+) ", DOCKERFILE, re.MULTILINE)
    assert Path(name).match(pattern)


def test_the_dockerfile_is_for_the_tested_sglang():
    import importlib.metadata

    from packaging.requirements import Requirement
    from packaging.version import Version

    (image,) = re.findall(r"^ARG SGLANG_IMAGE=lmsysorg/sglang:v(\S+)$", DOCKERFILE, re.MULTILINE)
    needed = map(Requirement, importlib.metadata.requires("sgl-kvpool"))
    (sglang,) = (one for one in needed if one.name == "sglang")
    assert Version(image) in sglang.specifier


def test_the_linter_accepts_the_dockerfile():
    linter = Path(sys.executable).with_name("hadolint")
    if not linter.exists():
        pytest.skip("hadolint is not installed; `make venv` installs it")
    for text, status in ((DOCKERFILE, 0), (DOCKERFILE.replace("COPY", "COPPY"), 1)):
        done = subprocess.run([linter, "-"], input=text, capture_output=True, text=True)
        assert done.returncode == status, done.stdout
