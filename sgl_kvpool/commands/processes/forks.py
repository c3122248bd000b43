"""Processes that start with SGLang imported: one process imports it, for 18 s, and forks for each of them.

A server is then ready after 5 s of CPU time instead of 50 s, because its launcher, scheduler and detokenizer
import nothing again. This package is not imported before the fork, so that plugins load as in any process.

Run by its path, this file is the importing process; :class:`Forks` talks to it.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import selectors
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

#: What the processes of a server import. SGLang's registry of models is not among them, because it reads
#: SGLANG_EXTERNAL_MODEL_PACKAGE as it is imported.
SERVER_MODULES = (
    *("sglang.launch_server", "sglang.cli.serve", "sglang.srt.entrypoints.http_server"),
    *("sglang.srt.managers.scheduler", "sglang.srt.managers.detokenizer_manager"),
)


#: Variables that the loader reads when a program starts. The others are read by Python, or later.
_OF_THE_LOADER = ("LD_LIBRARY_PATH", "LD_PRELOAD")


class Forked:
    """A forked process, with the part of `subprocess.Popen` that a server's supervision needs."""

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None
        self._ended = threading.Event()

    def wait(self, timeout: float | None = None) -> int:
        """Exit status, negative for a signal; subprocess.TimeoutExpired after `timeout` seconds."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def _end(self, status: int) -> None:
        self.returncode = status
        self._ended.set()


class Forks:
    """`start` is `subprocess.Popen` of a Python program with the imports done; the first call waits for them.

    `modules`, none of them of this package, are imported once, in `environment`, by default this process's.
    """

    def __init__(self, modules: Sequence[str] = SERVER_MODULES, environment: Mapping[str, str] | None = None):
        # Threads do not survive a fork: OpenBLAS would start some, and so may the driver of a GPU.
        alone = {"OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._environment = dict(os.environ if environment is None else environment)
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 (closed by __exit__)
        self._importing = subprocess.Popen(
            [sys.executable, "-P", __file__, *modules],  # -P: imports ignore this folder and the current one
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            text=True,
            env={**self._environment, **alone},
            start_new_session=True,
        )
        self._modules = modules
        self._forked: dict[int, Forked] = {}
        self._starting = threading.Lock()
        self._started: list[Forked] = []
        self._answered = threading.Semaphore(0)
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        os.killpg(self._importing.pid, signal.SIGKILL)
        self._importing.wait()
        self._printed.close()

    def can_run(self, command: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Whether a program is this Python or a script beside it, and finds its libraries."""
        scripts = Path(sysconfig.get_path("scripts"))
        return (command[0] == sys.executable or Path(command[0]).parent == scripts) and all(
            _paths(environment, name) <= _paths(self._environment, name) for name in _OF_THE_LOADER
        )

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: str | Path,
        errors: str | Path | None = None,
        folder: str | Path | None = None,
        *,
        children_fork: bool = True,
    ) -> Forked:
        """Fork, and run a command whose program is a script or interpreter of this environment.

        A command is ``[script, ...]``, or ``[python, ...]`` with a script, ``-m module`` or ``-c code``;
        `environment` is the whole one. `output` and `errors` are appended to; both go to `output` without
        `errors`. `children_fork`: whether its multiprocessing forks too (:func:`fork_children`). RuntimeError
        if the importing process has ended, with the end of what it printed.
        """
        words = list(command)
        if words[0] == sys.executable:
            words = words[1:]
        case = {
            "command": words,
            "environment": dict(environment),
            "output": [str(output), str(errors or output)],
            "folder": str(folder or Path.cwd()),
            "children_fork": children_fork,
        }
        with self._starting:
            with contextlib.suppress(BrokenPipeError):  # it has ended, which the reading thread finds too
                print(json.dumps(case), file=self._importing.stdin, flush=True)
            self._answered.acquire()
            if not self._started:
                self._answered.release()
                self._printed.seek(0)
                tail = self._printed.read()[-2000:].decode(errors="replace")
                raise RuntimeError(f"the process that imports {', '.join(self._modules)} has ended:\n{tail}")
            return self._started.pop()

    def _read(self) -> None:
        """Take note of processes that began or ended."""
        assert self._importing.stdout is not None
        for line in self._importing.stdout:
            pid, status = json.loads(line)
            if status is None:
                self._forked[pid] = Forked(pid)
                self._started.append(self._forked[pid])
                self._answered.release()
            else:
                self._forked.pop(pid)._end(status)
        self._answered.release()
        for forked in self._forked.values():
            forked._end(-signal.SIGKILL)


def _paths(environment: Mapping[str, str], name: str) -> set[str]:
    return set(filter(None, environment.get(name, "").split(os.pathsep)))


def fork_children() -> None:
    """Let multiprocessing fork this process, as it is now, where it would start Python ("spawn").

    Children have the imports of this moment, and the environment of the moment in which they are started.
    """
    from multiprocessing import forkserver, spawn, util

    start, data, prepare = util.spawnv_passfds, spawn.get_preparation_data, spawn.prepare

    def start_server(path: bytes, arguments: Sequence[Any], fds: Sequence[int]) -> int:
        if "forkserver" not in arguments[-1]:
            return start(path, arguments, fds)
        if pid := os.fork():
            return pid
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; its children keep that pipe open too
        # A scheduler that fails sends it to its parent; nohup and background jobs of scripts ignore it.
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        # Another program would not have the writing end of the pipe whose end of file ends it.
        pipe = _file(fds[-1])
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor != fds[-1] and _file(descriptor) == pipe:
                os.close(descriptor)
        # Held here, because `ensure_running` calls this: children that start processes would wait for ever.
        forkserver._forkserver._lock = threading.Lock()  # type: ignore[attr-defined]
        try:
            exec(arguments[-1])
        finally:
            os._exit(1)

    def prepare_with_environment(given: Mapping[str, Any]) -> None:
        os.environ.clear()
        os.environ.update(given["environment"])
        prepare(given)

    util.spawnv_passfds = start_server  # type: ignore[assignment]
    spawn.get_preparation_data = lambda name: {**data(name), "environment": dict(os.environ)}
    spawn.prepare = prepare_with_environment  # type: ignore[assignment]
    multiprocessing.set_start_method("forkserver")
    multiprocessing.set_start_method = lambda *method, **options: None
    forkserver.ensure_running()


def _file(descriptor: int) -> str | None:
    """What Linux shows for an open file, a pipe's two ends alike; None for a descriptor that is closed."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{descriptor}")
    return None


def _next_case(answers: Any) -> dict[str, Any]:
    """Fork once per line of input; returns in the forked process. Reports processes that began or ended."""
    reading, waking = os.pipe()
    os.set_blocking(waking, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    waiting = selectors.DefaultSelector()
    waiting.register(reading, selectors.EVENT_READ)
    waiting.register(0, selectors.EVENT_READ)
    lines = os.fdopen(os.dup(0), "r")
    while True:
        ready = {key.fd for key, _ in waiting.select()}
        if reading in ready:
            os.read(reading, 4096)
            with contextlib.suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    print(
                        json.dumps([ended[0], os.waitstatus_to_exitcode(ended[1])]), file=answers, flush=True
                    )
        if 0 in ready:
            line = lines.readline()
            if not line:
                sys.exit()
            if not (pid := os.fork()):
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                waiting.close()
                os.close(reading)
                os.close(waking)
                lines.close()
                return json.loads(line)
            os.setpgid(pid, pid)  # before its caller may kill the group
            print(json.dumps([pid, None]), file=answers, flush=True)


def _run(case: dict[str, Any]) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the importing process
    for number, path in enumerate([os.devnull, *case["output"]]):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), number)
    os.chdir(case["folder"])
    os.environ.clear()
    os.environ.update(case["environment"])
    sys.path[0:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    importlib.invalidate_caches()
    if case["children_fork"]:
        fork_children()
    first, *rest = case["command"]
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")


def main() -> None:
    """Import the modules of the command line, then fork."""
    answers = os.fdopen(os.dup(1), "w")
    os.set_inheritable(answers.fileno(), False)
    os.dup2(2, 1)  # for what is printed by imports
    for module in sys.argv[1:]:
        importlib.import_module(module)
    assert not [m for m in sys.modules if m.startswith("sgl_kvpool")], "forks must import our package"
    assert len(os.listdir("/proc/self/task")) == 1, "forks would lack threads"
    gc.freeze()  # or each fork would copy everything, to look for garbage
    case = _next_case(answers)
    answers.close()
    _run(case)


if __name__ == "__main__":
    main()
