"""Ports of servers, and a start that fails because one was taken. Servers themselves: tests/engine."""

import re
import socket
import sys
import time
from pathlib import Path

import pytest

from sgl_kvpool.demo import server
from sgl_kvpool.demo.server import Server, ServerFailed, free_port

#: What SGLang's launcher does from its first listening socket on: uvicorn, and then nothing that ends.
LAUNCHER = """
import sys, threading, uvicorn
async def app(scope, receive, send): pass
threading.Thread(target=threading.Event().wait).start()
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), lifespan="off")
"""


def test_nobody_gets_the_port_by_asking_for_any():
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [free_port() for _ in range(300)]
    assert len(set(ports)) == 300
    assert max(ports) < min(first, 22000)
    assert min(ports) >= 10000


def test_a_port_in_use_is_not_given(monkeypatch):
    with socket.socket() as held:
        taken = free_port()
        held.bind(("127.0.0.1", taken))
        monkeypatch.setattr(server, "_handed_out", set())
        monkeypatch.setattr(server, "_SERVER_PORTS", range(taken, taken + 1))
        with pytest.raises(OSError, match=f"{taken}"):
            free_port()


def test_without_room_below_the_ephemeral_ports_the_kernel_chooses(monkeypatch):
    monkeypatch.setattr(server, "_first_ephemeral_port", lambda: 1024)
    port = free_port()
    assert port >= 1024
    with socket.socket() as ours:
        ours.bind(("127.0.0.1", port))


@pytest.mark.parametrize("listening", [False, True])
def test_a_port_taken_during_the_start_is_reported_at_once(tmp_path, listening):
    """SGLang's launcher stays alive without a socket: CI once waited ten minutes for such a server."""
    with socket.socket() as thief:
        port = free_port()
        thief.bind(("127.0.0.1", port))
        if listening:
            thief.listen()
        begin = time.monotonic()
        program = (sys.executable, "-c", LAUNCHER)
        launched = Server(["--port", str(port)], tmp_path / "log", wait_seconds=100, program=program)
        with pytest.raises(ServerFailed, match=rf"port {port} was taken .*(?s:.)*{re.escape('[Errno 98]')}"):
            launched.__enter__()
        assert time.monotonic() - begin < 30
        assert launched.process is None
