"""How an SGLang differs from the tested one: a changed function, a new argument, another library."""

import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from sgl_kvpool import env
from sgl_kvpool.refusal import Refusal
from sgl_kvpool.sglang_plugin import fingerprint, hook_points

#: Changes of SGLang's files: other bodies of a function that we call, of one that our pools inherit and, in a
#: module that ours cannot import any more, of one that our backend overrides; a new method of a base class;
#: an enum's value; another member of a set; a module that cannot be imported without a GPU; a new argument.
CHANGES = [
    ("runtime_context.py", "return cfg.dp_size * cfg.attn_dp_size", "return cfg.attn_dp_size * cfg.dp_size"),
    (
        "mem_cache/memory_pool.py",
        "return self.custom_mem_pool\n\n\n",
        "return self.custom_mem_pool or None\n\n    def rows(self):\n        return 0\n\n\n",
    ),
    ("layers/attention/flashinfer_mla_backend.py", "class PrefillMetadata:", "class Other:"),
    (
        "layers/attention/flashinfer_mla_backend.py",
        "PrefillMetadata(self.prefill_wrapper_verify, False)",
        "PrefillMetadata(self.prefill_wrapper_verify, True)",
    ),
    ("mem_cache/hicache_storage.py", 'AUXILIARY_SWA = "auxiliary_swa"', 'AUXILIARY_SWA = "other_swa"'),
    ("arg_groups/resolution_hooks.py", '        "handle_mega_moe",\n', '"handle_mega_moe", "handle_rows",\n'),
    ("layers/attention/merge_state.py", "if _is_cuda:\n", "if True:\n"),
    (
        "server_args.py",
        "\n\ndef _rebuild_server_args(",
        "\nServerArgs = msgspec.defstruct('ServerArgs', [('kv_row_bytes', int, 0)], bases=(ServerArgs,))\n"
        "\n\ndef _rebuild_server_args(",
    ),
]
PROBLEM = """
import os
from sgl_kvpool import env
from sgl_kvpool.sglang_plugin import fingerprint
print(); print(fingerprint.problem()); print(os.environ.get(env.CHILD_SAME_AS_TESTED))
"""


def mirrored(real, copy, changes):
    """Links to what a folder has, but for changed files and the folders that hold them."""
    copy.mkdir(parents=True)
    for path in real.iterdir():
        of_path = [change for change in changes if f"{change[0]}/".startswith(f"{path.name}/")]
        inside = [(name.removeprefix(f"{path.name}/"), *texts) for name, *texts in of_path]
        if path.name == "__pycache__":
            continue
        if inside and path.is_dir():
            mirrored(path, copy / path.name, inside)
        elif inside:
            text = path.read_text()
            for _, old, new in inside:
                assert text.count(old) == 1, old
                text = text.replace(old, new)
            (copy / path.name).write_text(text)
        else:
            (copy / path.name).symlink_to(path)


def copied(folder, *changes, **versions):
    """A folder for PYTHONPATH: the installed SGLang with changes, and other versions of distributions."""
    real = Path(find_spec("sglang").origin).parent
    mirrored(real, folder / "sglang", [(f"srt/{name}", *texts) for name, *texts in changes])
    for name, number in versions.items():
        info = folder / f"{name}-{number}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    return str(folder)


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
    (first, cuda, drafts, *others), told = problem(copied(tmp_path, *CHANGES, **versions))
    assert first.startswith("SGLang 0.5.23.post1 differs from the tested 0.5.23; install sglang==0.5.23, or")
    backend = "layers.attention.flashinfer_mla_backend"
    absent = f"{backend}.PrefillMetadata: not there"
    unread = "layers.attention.merge_state.merge_state: cannot be imported"
    assert cuda.startswith("dense MLA on CUDA: 3 of ")
    assert cuda.endswith(f": {absent}; {unread}; sgl_kvpool.srt.attention.cuda: cannot be imported")
    assert drafts.startswith("speculative decoding: ")
    assert others == [
        f"changed versions: flashinfer-python=9.9 (tested: {version('flashinfer-python')})",
        "new arguments: kv_row_bytes=0",
        "changed sources: arg_groups.resolution_hooks: _OVERRIDABLE_HOOKS; "
        f"{backend}.FlashInferMLAAttnBackend: init_forward_metadata; mem_cache.hicache_storage: PoolName; "
        "mem_cache.memory_pool.KVCache: maybe_get_custom_mem_pool; runtime_context: num_dp_ranks_of",
        "new sources: mem_cache.memory_pool.KVCache: rows",
        f"removed sources: {backend}: PrefillMetadata",
    ]
    assert told == "None"


def test_a_build_of_the_tested_release_without_differences_is_accepted(tmp_path):
    assert problem(copied(tmp_path, sglang="0.5.23.post1")) == (["None"], "0.5.23.post1")


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23+cu126", "0.6.1"])
def test_only_another_version_is_compared_and_a_damaged_file_is_named(monkeypatch, tmp_path, version):
    """What a launcher has compared permits no version out of range."""
    compared = []
    monkeypatch.setattr(fingerprint, "versions", lambda names: {"sglang": version})
    monkeypatch.setattr(hook_points, "installed_version", lambda: version)
    monkeypatch.setattr(fingerprint, "_compared", lambda: compared.append(version) or compared)
    monkeypatch.setenv(env.CHILD_SAME_AS_TESTED, "0.6.1")
    assert bool(fingerprint.problem()) == bool(compared) == (version == "0.6.1")
    monkeypatch.setattr(fingerprint, "FILE", tmp_path / "cut.json")
    for text, error in (('{"versions": {"sglang": "0.5', "JSONDecode"), ('{"versions": {}}', "Lookup")):
        (tmp_path / "cut.json").write_text(text)
        with pytest.raises(Refusal, match=rf"cut\.json is damaged \({error}Error.*\): reinstall sgl-kvpool"):
            fingerprint.problem()
