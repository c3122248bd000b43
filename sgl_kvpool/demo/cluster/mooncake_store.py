"""Mooncake's store over loopback, and the settings of servers that use it.

Imports neither torch nor SGLang. Mooncake's clients (ports 12000 to 17000) and the store service's REST port
listen on all interfaces; the master and the servers listen on 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

from sgl_kvpool.demo.local_server import LocalServer, ServerFailed, free_port
from sgl_kvpool.demo.mooncake_libraries import library_path

_LOOPBACK = "127.0.0.1"


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
