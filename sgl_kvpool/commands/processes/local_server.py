"""A local HTTP server as a child process: start, wait, requests, stop.

Imports neither torch nor SGLang, so that it needs little memory beside a server.
"""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any, ClassVar, Self

from sgl_kvpool import env
from sgl_kvpool.commands.processes import program
from sgl_kvpool.commands.processes.forks import Forked, Forks

#: Ports for servers, below the range 22000 to 29999 from which SGLang draws its rendezvous ports.
_SERVER_PORTS = range(10000, 22000)

#: Ports that this process has chosen. SGLang binds its port only after the model is loaded.
_handed_out: set[int] = set()

#: Opener that ignores the environment's proxies.
_LOOPBACK = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerFailed(RuntimeError):
    """A server ended, hung, or gave an unusable answer.

    The message's first line says what happened. After an end or a hang the last lines of the server's log
    follow, unless the server was killed.
    """


#: Message of asyncio, on which SGLang's HTTP server runs, for a port that is in use.
_BIND_FAILED = "error while attempting to bind on address"

#: SGLang's log lines for a subprocess that has ended, and for a server that kills itself and its processes.
_PROCESS_ENDED = re.compile(r"Subprocess (\S+) \(pid=\d+\) crashed with exit code (-?\d+)")
_KILLS_ITSELF = "kill_process_tree called"

#: Longest shown line of a log: SGLang prints all its arguments in one line.
_LINE_CHARACTERS = 500


def _first_ephemeral_port() -> int:
    """First ephemeral port, from which the kernel assigns ports to sockets."""
    return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def free_port() -> int:
    """A free TCP port below the ephemeral range, so that the kernel does not assign it to another process.

    A server binds it only when its model is loaded. By then, a port of the ephemeral range (from `bind` to
    port 0) is sometimes in use by another process: each SGLang server requests a dozen such ports.

    OSError if none of a hundred candidates is free.
    """
    end = _first_ephemeral_port()
    candidates = [port for port in _SERVER_PORTS if port < end and port not in _handed_out]
    # If the ephemeral range covers all these ports, the kernel chooses.
    for port in random.sample(candidates, min(100, len(candidates))) or [0]:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("0.0.0.0", port))
            _handed_out.add(port := probe.getsockname()[1])
            return port
    raise OSError(f"no free TCP port found among {_SERVER_PORTS.start} to {_SERVER_PORTS[-1]}")


def past_proxies() -> dict[str, str]:
    """Variables with which a server's requests to itself, such as its warm-up, bypass the user's proxy."""
    if urllib.request.getproxies_environment().keys() <= {"no"}:
        return {}
    excepted = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    value = ",".join(filter(None, (excepted, "127.0.0.1", "localhost")))
    return {"no_proxy": value, "NO_PROXY": value}


class LocalServer:
    """A program that serves HTTP on a port; a GET request of `ready` succeeds once it is ready.

    ServerFailed on entering and in a request, if the program ends or does not answer in time; on entering
    also if the port is taken.
    """

    #: Forks the programs, if they are of this environment's Python; None starts them anew.
    forks: ClassVar[Forks | None] = None

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        log: str | Path,
        environment: Mapping[str, str] | None = None,
        *,
        ready: str = "/health",
        name: str = "the server",
        wait_seconds: float = 600.0,
    ):
        self.command = list(command)
        self.port = port
        self.log = Path(log)
        self.environment = dict(environment or {})
        self.ready = ready
        self.name = name
        self.wait_seconds = wait_seconds
        self.process: subprocess.Popen[bytes] | Forked | None = None
        # Signal handlers raise in the main thread, so this one loses no server; for `program.start` it stays.
        self._starter = ThreadPoolExecutor(1)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        try:
            self._launch()
            self._wait()
        except BaseException:  # also Ctrl-C: stop the processes, and raise again
            self.stop()
            raise
        return self

    def _launch(self) -> None:
        self._starter.submit(self._start, {**env.of_children(), **self.environment}).result()

    def _start(self, environment: Mapping[str, str]) -> None:
        if self.forks is not None and self.forks.can_run(self.command, environment):
            self.log.write_bytes(b"")
            try:
                self.process = self.forks.start(self.command, environment, self.log)
            except RuntimeError as error:
                raise ServerFailed(str(error)) from None
        else:
            self.process = program.start(self.command, environment, self.log)

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _wait(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + self.wait_seconds
        while time.monotonic() < deadline:
            # If its port is taken while it loads the model, SGLang neither ends nor retries, and the owner of
            # the port may answer.
            if _BIND_FAILED in self.log_tail():
                what = f"port {self.port} was taken while {self.name} started"
                raise ServerFailed(f"{what}:\n{self.log_tail()}")
            try:
                self._open(self.ready, timeout_seconds=5)
                return
            except (urllib.error.URLError, ConnectionError, TimeoutError, HTTPException):
                self._raise_if_ended(wait_seconds=0.5)
        raise ServerFailed(f"no answer from {self.name} in {self.wait_seconds:.0f} s:\n{self.log_tail()}")

    def _raise_if_ended(self, wait_seconds: float) -> None:
        """Raise ServerFailed if the server ends within this time."""
        if self.process is None:
            return
        try:
            status = self.process.wait(wait_seconds)
        except subprocess.TimeoutExpired:
            return
        program.kill(self.process)  # its remaining processes stop writing the log
        tail = self.log_tail()
        found = _PROCESS_ENDED.search(tail)
        who, itself = self.name, ""
        if found is not None:
            who, status = f"{self.name}'s process {found[1]}", int(found[2])
        elif _KILLS_ITSELF in tail:
            itself = " itself"
        if status == -signal.SIGKILL and not itself:
            raise ServerFailed(f"{who} ended with signal 9 (Killed; out of memory?)")
        how = f"status {status}" if status >= 0 else f"signal {-status} ({signal.strsignal(-status)})"
        raise ServerFailed(f"{who} ended{itself} with {how}:\n{tail}")

    def stop(self) -> None:
        """End the program and all its child processes."""
        self._starter.submit(int).result()  # after a start that was interrupted
        if self.process is not None:
            try:
                program.end(self.process, grace_s=10)
            finally:
                self.process = None

    def log_tail(self, lines: int = 15) -> str:
        """Last lines of the server's output, each cut at 500 characters."""
        with self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 40 * _LINE_CHARACTERS))
            last = log.read(40 * _LINE_CHARACTERS).decode(errors="replace").splitlines()[-lines:]
        return "\n".join(
            line if len(line) <= _LINE_CHARACTERS else f"{line[:_LINE_CHARACTERS]} ..." for line in last
        )

    def _open(self, request: str | urllib.request.Request, timeout_seconds: float) -> bytes:
        """Body of the answer to a request, or to a GET request for a path."""
        if isinstance(request, str):
            request = urllib.request.Request(self.url + request)
        with _LOOPBACK.open(request, timeout=timeout_seconds) as answer:
            return answer.read()

    def _ask(self, request: str | urllib.request.Request, timeout_seconds: float) -> bytes:
        """`_open`, but raises ServerFailed if the server has ended or hangs."""
        try:
            return self._open(request, timeout_seconds)
        except urllib.error.HTTPError as error:  # the server answered; the body has the reason
            body = error.peek()[:_LINE_CHARACTERS].decode(errors="replace")
            error.msg += ": " + re.sub(r"[\s\x00-\x1f\x7f-\x9f]+", " ", body)
            raise
        except TimeoutError:
            what = f"{self.name} gave no answer in {timeout_seconds:.0f} s; is the machine busy?"
            raise ServerFailed(f"{what}\n{self.log_tail()}") from None
        except (urllib.error.URLError, ConnectionError, HTTPException):
            self._raise_if_ended(wait_seconds=5)  # its sockets close before its process ends
            raise

    def get(self, path: str, timeout_seconds: float = 60) -> bytes:
        return self._ask(path, timeout_seconds)

    def post(self, path: str, **fields: Any) -> Any:
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(fields).encode(),
            headers={"Content-Type": "application/json"},
        )
        return json.loads(self._ask(request, timeout_seconds=600))


@contextlib.contextmanager
def running(*servers: LocalServer) -> Iterator[None]:
    """Start servers at the same time; all end with the block.

    ServerFailed if a server ends or does not answer in time; the others are ended too.
    """
    with contextlib.ExitStack() as ending:
        for server in servers:
            ending.callback(server.stop)
            server._launch()
        for server in servers:
            server._wait()
        yield
