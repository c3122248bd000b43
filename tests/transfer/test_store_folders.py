"""What is said of the folders of stores: owner, mode, links and parents, on real folders."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sgl_kvpool.refusal import Refusal
from sgl_kvpool.transfer.store_folders import FILE_STORES, exposure

FILE, NIXL = FILE_STORES["file"], FILE_STORES["nixl"]


def test_a_folder_that_the_server_makes_is_its_own(tmp_path):
    folder = tmp_path / "new" / "store"
    FILE.make_private(folder)
    assert folder.stat().st_mode & 0o7777 == 0o700
    assert exposure(folder) is None
    folder.chmod(0o750)  # a group is taken as intended
    FILE.make_private(folder)  # an existing folder keeps its mode
    assert folder.stat().st_mode & 0o7777 == 0o750
    assert exposure(folder) is None


@pytest.mark.parametrize(
    ("mode", "fact"),
    [(0o755, "read {} (mode 0755)"), (0o701, "read {} (mode 0701)"), (0o1777, "write into {} (mode 1777)")],
)
def test_open_to_others(tmp_path, mode, fact):
    folder = tmp_path / "store"
    folder.mkdir()
    folder.chmod(mode)
    assert exposure(folder) == "any account may " + fact.format(folder)
    (tmp_path / "link").symlink_to(folder)
    assert exposure(tmp_path / "link") == "any account may " + fact.format(folder)


def test_a_parent_in_which_others_can_replace_the_folder(tmp_path):
    shared = tmp_path / "shared"
    (shared / "deeper" / "store").mkdir(parents=True, mode=0o700)
    (shared / "deeper" / "store").chmod(0o700)
    shared.chmod(0o777)
    replaced = f"any account may replace what is in {shared} (mode 0777)"
    assert exposure(shared / "deeper" / "store") == replaced
    # In a shared temporary folder only the owner may replace what exists, and anybody may be first.
    shared.chmod(0o1777)
    assert exposure(shared / "deeper" / "store") is None
    assert exposure(shared / "other") == f"{shared}/other does not exist, and any account may make it first"
    shared.chmod(0o755)
    assert exposure(shared / "other") is None
    # A link from a safe place into an unsafe one, absolute and relative, through "..".
    shared.chmod(0o777)
    for number, target in enumerate((shared / "deeper" / "store", Path("safe/../shared/deeper/store"))):
        (tmp_path / "safe").mkdir(exist_ok=True)
        (tmp_path / f"link{number}").symlink_to(target)
        assert exposure(tmp_path / f"link{number}") == replaced


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a folder away")
def test_folders_and_links_of_other_accounts(tmp_path):
    folder = tmp_path / "store"
    folder.mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(folder)
    os.chown(folder, 54321, -1)
    assert exposure(folder) == exposure(link) == f"{folder} belongs to account 54321"
    os.chown(folder, 0, -1)
    os.chown(link, 54321, -1, follow_symlinks=False)
    assert exposure(folder) is None
    assert exposure(link) == f"{link} belongs to account 54321"


IN_A_NAMESPACE = """
import ctypes, os, sys
from pathlib import Path
from sgl_kvpool.folders import exposure
os.setuid(54321)
libc = ctypes.CDLL(None)
if libc.prctl(4, 1) or libc.unshare(0x10000000):  # PR_SET_DUMPABLE, CLONE_NEWUSER
    sys.exit(3)
Path("/proc/self/uid_map").write_text("54321 54321 1")
assert os.lstat("/").st_uid == 65534
print(exposure(Path("/usr/bin"), reading=False), exposure(Path(sys.argv[1]), reading=False), sep="\\n")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another account")
def test_a_namespace_that_does_not_know_root():
    """In Apptainer, files of root outside the namespace belong to `nobody` inside."""
    with tempfile.TemporaryDirectory() as folder:  # in a folder in which any account may make entries
        Path(folder).chmod(0o755)
        command = [sys.executable, "-c", IN_A_NAMESPACE, folder]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 3:
            pytest.skip("this system allows no user namespaces")
        assert done.stdout.splitlines() == ["None", f"{folder} belongs to account nobody"], done.stderr


def test_links_in_a_circle_and_folders_that_cannot_be_made(tmp_path, monkeypatch):
    one, other = tmp_path / "one", tmp_path / "other"
    one.symlink_to(other)
    other.symlink_to(one)
    exposure(one)  # ends
    (tmp_path / "file").write_text("")
    monkeypatch.delenv(FILE.variable, raising=False)
    for path in (5, ["a"], "a\0b"):
        with pytest.raises(Refusal, match=r'^"file_storage_path" of .* is no path but .*; give one$'):
            FILE.folders({"file_storage_path": path})
    with pytest.raises(
        Refusal, match=r"^the folder .*/file/store of the store cannot be made \(Not a dir.*set "
    ):
        FILE.make_private(tmp_path / "file" / "store")


def test_which_folders_sglang_uses(tmp_path, monkeypatch, published):
    """SGLang's own stores, with the same variables and configurations."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

    def used(configuration):
        config = HiCacheStorageConfig(
            tp_rank=1, tp_size=2, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=True,
            enable_storage_metrics=False, is_page_first_layout=True, model_name="m",
            extra_config=configuration,
        )  # fmt: skip
        return [Path(HiCacheFile(config).file_path)]  # rank 1 makes no folder

    for configuration in (None, {"file_storage_path": str(tmp_path / "named")}):
        monkeypatch.delenv(FILE.variable, raising=False)
        assert FILE.folders(configuration) == used(configuration)
        monkeypatch.setenv(FILE.variable, "")
        assert FILE.folders(configuration) == used(configuration)
        monkeypatch.setenv(FILE.variable, str(tmp_path / "variable"))
        assert FILE.folders(configuration) == used(configuration) == [tmp_path / "variable"]

    from sglang.srt.mem_cache.storage.nixl.nixl_utils import NixlBackendConfig, NixlBackendSelection

    monkeypatch.setenv(NIXL.variable, f"{tmp_path}/a, {tmp_path}/b")
    for plugin in ("", "POSIX", "OBJ"):
        monkeypatch.setenv("SGLANG_HICACHE_NIXL_BACKEND_PLUGIN", plugin)
        for configuration in (
            None,
            {"use_direct_io": False},
            {"plugin": {"obj": {"active": True}}},
            {"plugin": {"posix": {"active": True}, "obj": {"active": False}}},
            {"plugin": {"obj": {"active": "false"}, "posix": {"active": "True"}}},
            {"plugin": {"posix": {"active": "yes"}, "OBJ": {"active": 1}, "gds": None}},
        ):
            chosen = NixlBackendConfig(configuration).get_specified_plugin()
            in_files = chosen not in NixlBackendSelection.OBJ_PLUGINS
            assert NIXL.folders(configuration) == [tmp_path / "a", tmp_path / "b"] * in_files


@pytest.mark.parametrize(
    ("plugins", "named"),
    [
        ([], "list"),
        (None, "NoneType"),
        ({}, "empty"),
        ({"posix": True}, "posix"),
        ({1: {"active": True}}, "1"),  # of a YAML file
        ({"obj": {"active": "false", "secret_key": "s3cret"}, "posix": {"active": []}}, "obj, posix"),
    ],
)
def test_plugins_of_which_sglang_finds_none_active_are_refused(plugins, named, published):
    from sglang.srt.mem_cache.storage.nixl.nixl_utils import NixlBackendConfig

    with pytest.raises((AttributeError, UnboundLocalError)):
        NixlBackendConfig({"plugin": plugins}).get_specified_plugin()
    with pytest.raises(Refusal, match=rf"-extra-config \({named}\) has no active plugin; give ") as refused:
        NIXL.folders({"plugin": plugins})
    assert "s3cret" not in str(refused.value)
