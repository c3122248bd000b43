"""Mooncake's store over loopback, and the libraries that Mooncake loads. Imports neither torch nor SGLang.

Mooncake's clients (ports 12000 to 17000) and the store service's REST port listen on all interfaces; the
master and the servers listen on 127.0.0.1.

Mooncake's wheel needs the system's libibverbs, libnuma and libcurl. NIXL's wheel includes all three under
other names. Links to NIXL's copies, in the user's cache folder, let Mooncake start without root and without
packages of the distribution.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import json
import os
import sys
from pathlib import Path

from sgl_kvpool.commands.arguments import naming
from sgl_kvpool.commands.processes.local_server import LocalServer, ServerFailed, free_port
from sgl_kvpool.folders import CACHE, named, own

_LOOPBACK = "127.0.0.1"
_WANTED = ("libibverbs.so.1", "libnuma.so.1", "libcurl.so.4")
_PACKAGE = "nixl_cu13"


class MooncakeStore:
    """A Mooncake master and the service that stores the pages; both end with the `with` block."""

    def __init__(self, folder: Path):
        self._rpc_port, metrics_port, service_port = free_port(), free_port(), free_port()
        environment = {"LD_LIBRARY_PATH": library_path()}
        self.environment = {
            **environment,
            "MOONCAKE_MASTER": f"{_LOOPBACK}:{self._rpc_port}",
            "MOONCAKE_PROTOCOL": "tcp",
            "MOONCAKE_LOCAL_HOSTNAME": _LOOPBACK,
            # The service stores the pages, so they outlive the servers.
            "MOONCAKE_GLOBAL_SEGMENT_SIZE": "0",
        }
        self.master = LocalServer(
            [
                *(str(Path(sys.executable).with_name("mooncake_master")), f"--rpc_address={_LOOPBACK}"),
                *(
                    f"--rpc_port={self._rpc_port}",
                    f"--metrics_host={_LOOPBACK}",
                    f"--metrics_port={metrics_port}",
                ),
            ],
            metrics_port,
            folder / "mooncake_master.log",
            environment,
            name="the Mooncake master",
            wait_seconds=60,
        )
        self._configuration = folder / "mooncake.json"
        self.service = LocalServer(
            [
                *(sys.executable, "-m", "mooncake.mooncake_store_service"),
                *(f"--config={self._configuration}", "--port", str(service_port)),
            ],
            service_port,
            folder / "mooncake_service.log",
            environment,
            ready="/api/exist/nothing",
            name="the Mooncake store service",
            wait_seconds=60,
        )
        self._running = contextlib.ExitStack()

    def __enter__(self) -> MooncakeStore:
        configuration = {
            "local_hostname": _LOOPBACK,
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": f"{_LOOPBACK}:{self._rpc_port}",
            "protocol": "tcp",
            "device_name": "",
            "global_segment_size": 256 << 20,
            "local_buffer_size": 16 << 20,
        }
        self._configuration.write_text(json.dumps(configuration))
        with contextlib.ExitStack() as starting:
            starting.enter_context(self.master)
            starting.enter_context(self.service)
            self._running = starting.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._running.close()

    def page_keys(self) -> list[str]:
        """Keys of the pages of our host tiers, without the one entry of each SGLang client."""
        return [key for key in self.master.get("/get_all_keys").decode().split() if "-host_" in key]

    def stored_bytes(self) -> int:
        """Bytes of the stored pages, as the master counts them."""
        for line in self.master.get("/metrics").decode().splitlines():
            if line.startswith("master_allocated_bytes "):
                return int(float(line.split()[1]))
        raise ServerFailed("the Mooncake master has no metric master_allocated_bytes")


def library_path() -> str:
    """Value of LD_LIBRARY_PATH for Mooncake's programs, and for servers that use Mooncake.

    If a library is missing, folders of links and of NIXL's libraries come before this process's value.

    ValueError if a library is missing, and NIXL's wheel does not have it either, or if the links cannot be
    written, or other accounts can change them.
    """
    given = os.environ.get("LD_LIBRARY_PATH", "")
    missing = [name for name in _WANTED if not _loads(name)]
    if not missing:
        return given
    libraries = _nixl_libraries()
    found = {name: path for name in missing if (path := _in_wheel(libraries, name)) is not None}
    if absent := [name for name in missing if name not in found]:
        raise ValueError(
            f"Mooncake needs {', '.join(absent)}, which neither this machine nor {_PACKAGE} has; "
            "install sgl-kvpool[distributed], or the system's libibverbs1, libnuma1 and libcurl4"
        )
    # One folder per environment and NIXL: another environment may have another NIXL, or be deleted.
    folder = f"sgl-kvpool/libraries-{hashlib.sha256(repr(found).encode()).hexdigest()[:16]}"
    links = own(named(*CACHE) / folder, CACHE[0])
    with naming(CACHE[0], links):
        for entry in links.iterdir():  # others may have written into it before
            if not entry.is_symlink() or entry.readlink() != found.get(entry.name):
                entry.unlink()
        for name, path in found.items():
            with contextlib.suppress(FileExistsError):
                (links / name).symlink_to(path)
    return os.pathsep.join(filter(None, (str(links), str(libraries), given)))


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _nixl_libraries() -> Path | None:
    """Folder of the libraries in NIXL's wheel; None without that package."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent.with_name(f"{_PACKAGE}.libs")


def _in_wheel(libraries: Path | None, name: str) -> Path | None:
    """The library under the wheel's name: `libnuma.so.1` is `libnuma-<hash>.so.1.0.0` there."""
    stem, _, version = name.partition(".so.")
    found = [] if libraries is None else sorted(libraries.glob(f"{stem}-*.so.{version}*"))
    return found[0] if found else None
