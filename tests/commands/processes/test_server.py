"""Ports of servers, and messages about servers that ended. tests/engine has real servers."""

import re
import socket
import subprocess
import sys
import time
import urllib.error
from pathlib import Path

import pytest
from live_processes import alive, ended

from sgl_kvpool.commands.processes import local_server
from sgl_kvpool.commands.processes.server import Server, ServerFailed, free_port

#: Stands in for SGLang's launcher from its first listening socket on: it runs uvicorn and then never ends.
LAUNCHER = """
import sys, threading, uvicorn
async def app(scope, receive, send): pass
threading.Thread(target=threading.Event().wait).start()
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), lifespan="off")
"""


def program(code, folder, *arguments):
    """A server that runs this code, with a port as its second argument."""
    command = ["--port", str(free_port()), *arguments]
    return Server(command, folder / "log", wait_seconds=100, program=(sys.executable, "-c", code))


def test_free_ports_are_below_the_ephemeral_range():
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [free_port() for _ in range(300)]
    assert len(set(ports)) == 300
    assert max(ports) < min(first, 22000)
    assert min(ports) >= 10000


def test_a_port_in_use_is_not_given(monkeypatch):
    with socket.socket() as held:
        taken = free_port()
        held.bind(("127.0.0.1", taken))
        monkeypatch.setattr(local_server, "_handed_out", set())
        monkeypatch.setattr(local_server, "_SERVER_PORTS", range(taken, taken + 1))
        with pytest.raises(OSError, match=f"{taken}"):
            free_port()


def test_without_room_below_the_ephemeral_ports_the_kernel_chooses(monkeypatch):
    monkeypatch.setattr(local_server, "_first_ephemeral_port", lambda: 1024)
    port = free_port()
    assert port >= 1024
    with socket.socket() as ours:
        ours.bind(("127.0.0.1", port))


@pytest.mark.parametrize("listening", [False, True])
def test_a_port_taken_during_the_start_is_reported_at_once(tmp_path, listening):
    """SGLang's launcher stays alive without a socket: CI once waited ten minutes for such a server."""
    with socket.socket() as thief:
        launched = program(LAUNCHER, tmp_path)
        port = int(launched.arguments[1])
        thief.bind(("127.0.0.1", port))
        if listening:
            thief.listen()
        begin = time.monotonic()
        with pytest.raises(ServerFailed, match=rf"port {port} was taken .*(?s:.)*{re.escape('[Errno 98]')}"):
            launched.__enter__()
        assert time.monotonic() - begin < 30
        assert launched.process is None


#: A server that is ready, and ends as `argv[3]` says when it is asked something.
MORTAL = """
import os, sys, uvicorn
async def app(scope, receive, send):
    if scope["path"] != "/health":
        print("asked for", scope["path"], flush=True)
        exec(sys.argv[3])
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body"})
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), lifespan="off")
"""

#: What SGLang logs when its scheduler was killed, before it kills itself; see tests/engine/test_demo.py.
SCHEDULER_KILLED = """
print("Subprocess scheduler_0 (pid=12513) crashed with exit code -9. Triggering SIGQUIT for cleanup...")
print("kill_process_tree called: parent_pid=12260, include_parent=True, pid=12260", flush=True)
os.kill(os.getpid(), 9)
"""

#: The same log after an error of the scheduler, with exit code 1; and a log that the demo does not recognise.
SCHEDULER_ENDED = SCHEDULER_KILLED.replace("code -9", "code 1")
SCHEDULER_RAISED = SCHEDULER_KILLED.replace("Subprocess", "Exception in")


def failure(folder, code, *arguments):
    """The demo's message about a program that ends during its start, or at its first request."""
    with pytest.raises(ServerFailed) as failed, program(code, folder, *arguments) as server:
        server.generate(text="x")
    return str(failed.value)


KILLED = "ended with signal 9 (Killed; out of memory?)"


def test_a_server_or_its_scheduler_that_was_killed(tmp_path):
    """When memory runs out, Linux kills the scheduler, and SGLang then kills itself too."""
    assert failure(tmp_path, "import os; os.kill(os.getpid(), 9)") == f"the server {KILLED}"
    assert failure(tmp_path, MORTAL, "os.kill(os.getpid(), 9)") == f"the server {KILLED}"
    assert failure(tmp_path, MORTAL, SCHEDULER_KILLED) == f"the server's process scheduler_0 {KILLED}"


def test_a_server_that_ended_itself_shows_the_end_of_its_log(tmp_path):
    said = failure(tmp_path, MORTAL, SCHEDULER_ENDED).splitlines()
    assert said[0] == "the server's process scheduler_0 ended with status 1:"
    assert any("asked for /generate" in line for line in said)
    said = failure(tmp_path, MORTAL, SCHEDULER_RAISED).splitlines()
    assert said[0] == "the server ended itself with signal 9 (Killed):"
    assert any("Exception in scheduler_0" in line for line in said)
    said = failure(tmp_path, MORTAL, "os._exit(3)").splitlines()
    assert said[0] == "the server ended with status 3:"
    assert said[-1] == "asked for /generate"
    # A fork of a process with tvm-ffi logs its stack too.
    said = failure(tmp_path, "import os; os.kill(os.getpid(), 11)").splitlines()
    assert said[0] == "the server ended with signal 11 (Segmentation fault):"


def test_a_server_that_does_not_answer_in_time(tmp_path):
    with (
        program(MORTAL, tmp_path, "import time; time.sleep(20)") as server,
        pytest.raises(ServerFailed, match=r"no answer in 1 s; is the machine busy\?\n(?s:.)*asked for /slow"),
    ):
        server.get("/slow", timeout_seconds=1)


def test_an_answer_that_is_an_error_is_raised_at_once(tmp_path):
    """The server keeps running: the demo does not wait for its end. The body has the reason."""
    mortal = MORTAL.replace("200", "200 if scope['path'] == '/health' else 400")
    mortal = mortal.replace('response.body"', 'response.body", "body": b"Too\\x1b\\n many tokens"')
    with program(mortal, tmp_path, "pass") as server:
        begin = time.monotonic()
        with pytest.raises(urllib.error.HTTPError, match=r"400.*: Too many tokens$") as failed:
            server.generate(text="x")
        assert time.monotonic() - begin < 4
        assert failed.value.read() == b"Too\x1b\n many tokens"


#: Starts a server, anew or as a fork, and waits; `argv`: port, log, how.
PARENT = """
import sys, time
from sgl_kvpool.commands.processes.forks import Forks
from sgl_kvpool.commands.processes.server import Server
mortal, port, log, how = sys.argv[1:]
server = Server(["--port", port, "pass"], log, program=(sys.executable, "-c", mortal))
server.forks = Forks(["this"]) if how == "forked" else None
with server:
    print(server.process.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("how", ["anew", "forked"])
def test_no_server_outlives_a_command_that_was_killed(tmp_path, how):
    """As Linux does when memory runs out; it could not stop its servers. A thread has started the server."""
    words = [sys.executable, "-c", PARENT, MORTAL, str(free_port()), str(tmp_path / "log"), how]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as parent:
        server = int(parent.stdout.readline())
        time.sleep(1)
        assert alive(server)
        parent.kill()
    assert ended(server, 10)
