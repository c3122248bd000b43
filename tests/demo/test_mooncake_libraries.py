"""Mooncake's programs: the search path of libraries that the system lacks, and where they listen."""

import os
import sys
from pathlib import Path

import psutil
import pytest
from live_processes import ran

from sgl_kvpool.demo.cluster import command, mooncake_store
from sgl_kvpool.demo.cluster.mooncake_store import library_path


@pytest.fixture
def nothing_loads(monkeypatch, tmp_path):
    """A machine without any of the libraries, and an empty cache folder."""
    monkeypatch.setattr(mooncake_store, "_loads", lambda name: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere")


def test_mooncake_starts_with_the_path(tmp_path, monkeypatch):
    pytest.importorskip("nixl_cu13")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    master = Path(sys.executable).with_name("mooncake_master")
    environment = {**os.environ, "LD_LIBRARY_PATH": library_path()}
    done = ran(master, "--version", env=environment, timeout=60)
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
    # What another account left there before the folder was its owner's alone.
    (Path(links) / "libc.so.6").write_text("")
    (Path(links) / "libcurl.so.4").unlink()
    (Path(links) / "libcurl.so.4").symlink_to("/elsewhere")
    assert library_path() == first
    assert {path.name for path in Path(links).iterdir()} == names
    assert {path.resolve().parent for path in Path(links).iterdir()} == {Path(libraries).resolve()}
    assert Path(links).stat().st_mode & 0o777 == 0o700
    Path(links).chmod(0o777)
    text = rf"{links}: any account may write into .* or set XDG_CACHE_HOME to one"
    with pytest.raises(ValueError, match=text):
        library_path()


def test_nothing_is_added_where_all_of_them_are(monkeypatch):
    monkeypatch.setattr(mooncake_store, "_loads", lambda name: True)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere")
    assert library_path() == "/somewhere"


def test_without_nixl_the_missing_ones_are_named(nothing_loads, monkeypatch):
    monkeypatch.setattr(mooncake_store, "_nixl_libraries", lambda: None)
    missing = r"libibverbs\.so\.1, libnuma\.so\.1, libcurl\.so\.4"
    with pytest.raises(ValueError, match=rf"needs {missing}, .*distributed"):
        library_path()


def test_the_demo_says_which_programs_listen_on_all_interfaces(tmp_path, monkeypatch, capsys):
    """Mooncake's store service has no argument for its address."""
    for module in ("mooncake", "nixl_cu13"):
        pytest.importorskip(module)
    listening = {}

    class Watched(mooncake_store.MooncakeStore):
        def __enter__(self):
            super().__enter__()
            for server in (self.master, self.service):
                found = psutil.Process(server.process.pid).net_connections("inet")
                listening[server.name] = {x.laddr.ip for x in found if x.status == psutil.CONN_LISTEN}
            return self

    monkeypatch.setattr(command, "MooncakeStore", Watched)
    assert command.compare_clusters([], tmp_path) == 0
    assert listening.pop("the Mooncake master") == {"127.0.0.1"}
    assert "0.0.0.0" in listening.pop("the Mooncake store service")
    assert "Mooncake's master listen on 127.0.0.1,\nMooncake's store service and" in capsys.readouterr().out
