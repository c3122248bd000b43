"""How an SGLang differs from the tested one: a changed function, a new argument, another library."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

#: What the copy has at the end of a file: a function that we use with another body, and a new argument.
OTHER_BODY = ("runtime_context.py", "\n\ndef num_dp_ranks_of(cfg):\n    return 1\n")
NEW_ARGUMENT = (
    "server_args.py",
    "\nServerArgs = msgspec.defstruct('ServerArgs', [('kv_row_bytes', int, 0)], bases=(ServerArgs,))\n",
)
PROBLEM = """
import os
from sgl_kvpool import env
from sgl_kvpool.sglang_plugin import fingerprint
print(); print(fingerprint.problem()); print(os.environ.get(env.CHILD_SAME_AS_TESTED))
"""


def copied(folder, *changes, **versions):
    """A folder for PYTHONPATH: links to the installed SGLang but for changed files, and other versions."""
    real = Path(find_spec("sglang").origin).parent
    srt = folder / "sglang" / "srt"
    srt.mkdir(parents=True)
    for inside in (real, real / "srt"):
        for path in inside.iterdir():
            if path.name not in ("srt", "__pycache__", *(name for name, _ in changes)):
                (folder / "sglang" / path.relative_to(real)).symlink_to(path)
    for name, text in changes:
        (srt / name).write_text((real / "srt" / name).read_text() + text)
    for name, number in versions.items():
        info = folder / f"{name}-{number}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    return str(folder)


def test_the_installed_sglang_is_the_tested_one(fresh):
    code = "import json; from sgl_kvpool.commands.doctor import probes\n"
    code += "from sgl_kvpool.sglang_plugin import fingerprint\n"
    code += "groups = probes.hook_groups()\n"
    code += "print(json.dumps(fingerprint.failing(groups) | fingerprint.differences(groups)))"
    done = fresh.run(code)
    assert json.loads(done.stdout.splitlines()[-1]) == {}, "run `python -m scripts.fingerprint`"


def problem(folder):
    """Lines of why a server is refused with the SGLang of a folder, and what its children are told."""
    environment = {**os.environ, "PYTHONPATH": folder}
    command = [sys.executable, "-P", "-c", PROBLEM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *lines, told = done.stdout.strip().splitlines()
    return lines, told


def test_differences_are_named(tmp_path):
    """Of a build of the tested release with another number."""
    versions = {"sglang": "0.5.23.post1", "flashinfer_python": "9.9", "triton": f"{version('triton')}+x"}
    (first, *others), told = problem(copied(tmp_path, OTHER_BODY, NEW_ARGUMENT, **versions))
    assert first.startswith("SGLang 0.5.23.post1 differs from the tested 0.5.23; install sglang==0.5.23, or")
    assert others == [
        "1 source differs: runtime_context.num_dp_ranks_of",
        "new arguments: kv_row_bytes=0",
        f"other versions: flashinfer-python 9.9 (tested: {version('flashinfer-python')})",
    ]
    assert told == "None"


def test_a_build_of_the_tested_release_without_differences_is_accepted(tmp_path):
    assert problem(copied(tmp_path, sglang="0.5.23.post1")) == (["None"], "0.5.23.post1")
