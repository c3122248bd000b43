"""The search path with which Mooncake's programs find libraries that the system lacks."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sgl_kvpool.demo import mooncake_libraries
from sgl_kvpool.demo.mooncake_libraries import library_path


@pytest.fixture
def nothing_loads(monkeypatch, tmp_path):
    """A machine without any of the libraries, and an empty cache folder."""
    monkeypatch.setattr(mooncake_libraries, "_loads", lambda name: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere")


def test_mooncake_starts_with_the_path(tmp_path, monkeypatch):
    pytest.importorskip("nixl_cu13")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    master = Path(sys.executable).with_name("mooncake_master")
    environment = {**os.environ, "LD_LIBRARY_PATH": library_path()}
    done = subprocess.run([master, "--version"], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_library_is_linked_once(nothing_loads, tmp_path):
    pytest.importorskip("nixl_cu13")
    first = library_path()
    links, libraries, given = first.split(os.pathsep)
    assert given == "/somewhere"
    names = {"libibverbs.so.1", "libnuma.so.1", "libcurl.so.4"}
    assert {path.name for path in Path(links).iterdir()} == names
    assert {path.resolve().parent for path in Path(links).iterdir()} == {Path(libraries).resolve()}
    assert library_path() == first


def test_a_stale_link_is_replaced(nothing_loads, tmp_path):
    pytest.importorskip("nixl_cu13")
    link = Path(library_path().split(os.pathsep)[0]) / "libnuma.so.1"
    target = os.readlink(link)
    link.unlink()
    link.symlink_to("/gone/libnuma.so.1")
    library_path()
    assert os.readlink(link) == target


def test_two_threads_of_one_process(nothing_loads, monkeypatch):
    """Both have created their links before either moves one into place."""
    pytest.importorskip("nixl_cu13")
    both, replace = threading.Barrier(2), Path.replace

    def replace_together(path, target):
        both.wait(timeout=10)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", replace_together)
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: library_path(), range(2)))
    assert paths[0] == paths[1]
    links = Path(paths[0].split(os.pathsep)[0])
    assert sorted(path.name for path in links.iterdir()) == sorted(mooncake_libraries._WANTED)


def test_nothing_is_added_where_all_of_them_are(monkeypatch):
    monkeypatch.setattr(mooncake_libraries, "_loads", lambda name: True)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere")
    assert library_path() == "/somewhere"


def test_without_nixl_the_missing_ones_are_named(nothing_loads, monkeypatch):
    monkeypatch.setattr(mooncake_libraries, "_nixl_libraries", lambda: None)
    missing = r"libibverbs\.so\.1, libnuma\.so\.1, libcurl\.so\.4"
    with pytest.raises(ValueError, match=rf"needs {missing}, .*distributed"):
        library_path()
