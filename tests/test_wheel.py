"""What `make wheel` packs and what works once it is installed; the Dockerfile; pre-commit's configuration."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from live_processes import ran

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text()

MODEL = "sgl_kvpool/demo/byte_mla_python"
#: What the second wheel has instead of the first.
WEIGHTS = f"{MODEL}/model.safetensors"


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """`make wheel` in a copy of this tree's tracked files: the wheels by distribution, and the files."""
    files = ["pyproject.toml", "README.md", "LICENSE", "Makefile"]
    listed = ran("git", "ls-files", "sgl_kvpool", *files, cwd=ROOT)
    if listed.returncode:
        pytest.skip("not a git checkout")
    tracked = [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]
    folder = tmp_path_factory.mktemp("tree")
    for name in tracked:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    env = {**os.environ, "PIP_NO_BUILD_ISOLATION": "0"}  # 0 turns the isolation off; no network is needed
    done = ran("make", "wheel", f"PYTHON={shlex.quote(sys.executable)}", cwd=folder, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    left = ran("find", MODEL, "-type", "d", cwd=folder)
    assert left.stdout == f"{MODEL}\n", "`make wheel` leaves its build folders in the package"
    wheels = {path.name.partition("-")[0]: path for path in (folder / "dist").iterdir()}
    return wheels, tracked


@pytest.mark.parametrize("name", ["sgl-kvpool", "with space"])
def test_make_says_what_does_not_work_in_a_path_with_a_space(tmp_path, name):
    (tmp_path / name).mkdir()
    script, python = ROOT / "scripts" / "check_venv.sh", shlex.quote(sys.executable)
    done = ran("sh", script, ".venv", python, "file", cwd=tmp_path / name)
    assert ("tvm-ffi compiles no C++ there" in done.stderr) == (" " in name)


def files_of(wheel):
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


@pytest.mark.slow
def test_the_wheels_have_every_file_of_the_package(packed):
    """Sources that are compiled at run time among them; the demo's weights are in a wheel of their own."""
    wheels, tracked = packed
    package, model = files_of(wheels["sgl_kvpool"]), files_of(wheels["sgl_kvpool_demo_model"])
    assert set(wheels) == {"sgl_kvpool", "sgl_kvpool_demo_model"}
    assert model == {WEIGHTS}
    assert package | {WEIGHTS, f"{MODEL}/pyproject.toml"} == {
        name for name in tracked if name.startswith("sgl_kvpool/")
    }
    assert not package & model
    licence = "sgl_kvpool_demo_model-1.dist-info/licenses/LICENSE"
    assert zipfile.ZipFile(wheels["sgl_kvpool_demo_model"]).read(licence) == (ROOT / "LICENSE").read_bytes()
    assert wheels["sgl_kvpool"].stat().st_size < 2e6


@pytest.mark.slow
def test_the_wheel_has_the_version_of_the_code(packed):
    from sgl_kvpool import __version__

    wheels, _ = packed
    assert wheels["sgl_kvpool"].name == f"sgl_kvpool-{__version__}-py3-none-any.whl"
    assert "version" not in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.slow
def test_the_dockerfile_copies_only_the_package(packed):
    wheels, _ = packed
    (pattern,) = re.findall(r"^COPY dist/(\S+) ", DOCKERFILE, re.MULTILINE)
    assert [name for name, wheel in wheels.items() if wheel.match(pattern)] == ["sgl_kvpool"]


@pytest.fixture(scope="module")
def installed(packed, tmp_path_factory):
    """Python of an environment with the package's wheel, and with this environment's other packages."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    zipfile.ZipFile(packed[0]["sgl_kvpool"]).extractall(packages)
    # A link to the other packages would bring this checkout too, by the file of its editable installation.
    (packages / "others.pth").write_text(f"import sys; sys.path.append({sysconfig.get_path('purelib')!r})\n")
    return folder / "venv" / "bin" / "python"


def run(python, *words, folder):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return ran(python, *words, cwd=folder, env=env)


@pytest.mark.slow
def test_an_installed_wheel_is_a_command_and_a_module(installed, tmp_path):
    done = run(installed, "-c", "import sgl_kvpool; print(sgl_kvpool.__file__)", folder=tmp_path)
    assert Path(done.stdout.strip()).is_relative_to(installed.parents[1])
    done = run(installed, "-m", "sgl_kvpool", "layouts", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "fp8_block_scale" in done.stdout
    done = run(installed, "-m", "sgl_kvpool", "layouts", "--kv-lora-rank", "5", folder=tmp_path)
    assert done.returncode == 2


@pytest.mark.slow
def test_the_demo_says_where_its_weights_are(packed, installed, tmp_path):
    done = run(installed, "-m", "sgl_kvpool", "demo", "--model", "bytes", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "sgl-kvpool: the weights of the demo's byte model are not installed; `make wheel` in a checkout "
        "writes them beside the package's wheel: pip install --no-deps dist/sgl_kvpool_demo_model-*.whl\n"
    )
    (packages,) = installed.parents[1].glob("lib/python*/site-packages")
    zipfile.ZipFile(packed[0]["sgl_kvpool_demo_model"]).extractall(packages)
    try:
        program = "from sgl_kvpool.demo.model import model_path; print(model_path())"
        done = run(installed, "-c", program, folder=tmp_path)
        assert (done.returncode, done.stdout) == (0, f"{packages / MODEL}\n")
        assert (packages / WEIGHTS).read_bytes() == (ROOT / WEIGHTS).read_bytes()
    finally:
        (packages / WEIGHTS).unlink()


def test_the_dockerfile_is_for_the_tested_sglang():
    import importlib.metadata

    from packaging.requirements import Requirement
    from packaging.version import Version

    (image,) = re.findall(r"^ARG SGLANG_IMAGE=lmsysorg/sglang:v(\S+)$", DOCKERFILE, re.MULTILINE)
    needed = map(Requirement, importlib.metadata.requires("sgl-kvpool"))
    (sglang,) = (one for one in needed if one.name == "sglang")
    assert Version(image) in sglang.specifier
