"""Processes that start with SGLang imported: one process imports it and forks for each of them.

Importing SGLang takes over ten seconds, loading the plugin afterwards milliseconds. This package is not
imported before the fork, so that a fork runs all of its imports, as a new process does.
"""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: Forks once per line of input. A fork leaves the loop and runs its code at the end of the program, where the
#: interpreter itself reports exceptions, SystemExit too, and turns them into an exit status.
PROGRAM = """
import os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # for what is printed by imports
import gc, importlib, json, signal
for module in sys.argv[1:]:
    importlib.import_module(module)
assert not [m for m in sys.modules if m.startswith("sgl_kvpool")], "forks must import our package"
assert len(os.listdir("/proc/self/task")) == 1, "forks would lack threads"
gc.freeze()  # or each fork would copy everything, to look for garbage at its end
for line in sys.stdin:
    case = json.loads(line)
    sys.stdout.flush(), sys.stderr.flush()
    if not (pid := os.fork()):
        break
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers, flush=True)
else:
    sys.exit()
answers.close()
for number, path in enumerate([os.devnull, *case["output"]]):
    os.dup2(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), number)
signal.alarm(300)  # its end, if it hangs
os.chdir(case["folder"])
os.environ.update(case["environment"])
sys.path[1:1] = filter(None, case["environment"].get("PYTHONPATH", "").split(os.pathsep))
importlib.invalidate_caches()
sys.argv = ["-c"]
exec(compile(case["code"], "<string>", "exec"), {"__name__": "__main__"})
"""


class Forks:
    """`run` is `python -c` with the imports done; the first call waits for them."""

    def __init__(self, process: subprocess.Popen, output: Path):
        self._process, self._output = process, output

    def run(self, code: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
        """Run `code` in `folder`; `environment` is added to the environment of the importing process."""
        output = [self._output / name for name in ("stdout", "stderr")]
        for path in output:
            path.write_bytes(b"")
        case = {
            "code": code,
            "folder": str(folder),
            "environment": environment,
            "output": [*map(str, output)],
        }
        print(json.dumps(case), file=self._process.stdin, flush=True)
        status = self._process.stdout.readline()
        assert status, "the process that imports has ended; it says why on its stderr"
        return subprocess.CompletedProcess(code, int(status), *(path.read_text() for path in output))


@contextmanager
def after_importing(*modules: str, output: Path, environment: dict[str, str]):
    """Start to import `modules` in a process with this environment; return its Forks without waiting.

    `output` is an empty folder for their output.
    """
    # Threads do not survive a fork: numeric libraries get one thread, and GPUs, whose driver may start
    # threads, are hidden.
    alone = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", PROGRAM, *modules]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**environment, **alone},
        start_new_session=True,
    ) as process:
        try:
            yield Forks(process, output)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # after an interrupt, with a fork that still runs
