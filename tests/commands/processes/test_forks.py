"""Processes that are forked from one that has imported a module. tests/engine forks servers."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from sgl_kvpool.commands.processes.forks import Forks
from sgl_kvpool.commands.processes.local_server import LocalServer, free_port

#: A module that imports nothing else, and that nothing else imports.
MODULE = "this"


@pytest.fixture(scope="module")
def forks():
    before = signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # as nohup does
    with Forks([MODULE]) as found:
        signal.signal(signal.SIGQUIT, before)
        yield found


@pytest.fixture
def run(forks, tmp_path):
    """`run(*words)`: exit status and stdout of `python *words`."""

    def start(*words, errors=None, environment=None, **options):
        output = tmp_path / "output"
        output.write_text("")
        command = [sys.executable, *words]
        process = forks.start(command, environment or {**os.environ}, output, errors, **options)
        return process.wait(60), output.read_text()

    return start


@pytest.mark.parametrize(
    ("code", "status"),
    [("pass", 0), ("import sys; sys.exit(7)", 7), ("1 / 0", 1), ("import os; os.kill(os.getpid(), 9)", -9)],
)
def test_exit_status(run, code, status):
    found, printed = run("-c", code)
    assert found == status
    assert ("ZeroDivisionError" in printed) == (status == 1)


def test_environment_folder_arguments_and_output(run, tmp_path):
    (tmp_path / "named.py").write_text("import sys, os\nprint(sys.argv, os.getcwd(), file=sys.stderr)\n")
    environment = {"PATH": "", "PYTHONPATH": str(tmp_path)}
    found = run("-c", "import os; print(sorted(os.environ))", environment=environment)
    assert found == (0, "['PATH', 'PYTHONPATH']\n")
    errors = tmp_path / "errors"
    for words in (("-m", "named", "1"), (str(tmp_path / "named.py"), "1")):
        errors.write_text("")
        assert run(*words, errors=errors, environment=environment, folder="/") == (0, "")
        said = errors.read_text()
        assert said.endswith("'1'] /\n")
        assert "named" in said


def test_children_of_multiprocessing_are_forked_with_the_modules_and_the_environment(run, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import multiprocessing, os, signal, sys\n"
        # As SGLang's schedulers do. A forked one's parent starts the others; if it ends, the server does.
        "def fail(): os.kill(os.getppid(), signal.SIGQUIT)\n"
        "def child():\n"
        "    print(os.environ['LATER'], 'this' in sys.modules, 'os' in sys.modules, flush=True)\n"
        "    sys.exit(5)\n"
        "if __name__ == '__main__':\n"
        "    multiprocessing.set_start_method('spawn', force=True)\n"
        "    os.environ['LATER'] = 'set'\n"
        "    for target in child, fail:\n"
        "        process = multiprocessing.Process(target=target)\n"
        "        process.start(), process.join()\n"
        "        print(process.exitcode, flush=True)\n"
    )
    assert run(str(program)) == (0, "set True True\n5\n255\n")
    assert run(str(program), children_fork=False) == (0, "set False True\n5\n0\n")


def test_children_of_children(run, tmp_path):
    """SGLang's controller of replicas is a child that starts schedulers, from a thread."""
    (tmp_path / "family.py").write_text(
        "import multiprocessing, sys, threading\n"
        "def grandchild(): print('this' in sys.modules, flush=True)\n"
        "def in_thread():\n"
        "    process = multiprocessing.Process(target=grandchild)\n"
        "    process.start(), process.join()\n"
        "def child():\n"
        "    thread = threading.Thread(target=in_thread)\n"
        "    thread.start(), thread.join()\n"
        "if __name__ == '__main__':\n"
        "    multiprocessing.set_start_method('spawn', force=True)\n"
        "    process = multiprocessing.Process(target=child)\n"
        "    process.start(), process.join(20), process.kill()\n"
    )
    assert run(str(tmp_path / "family.py"), children_fork=True) == (0, "True\n")


def test_processes_run_at_once_and_are_killed_with_their_group(forks, tmp_path):
    code = "import time; time.sleep(600)"
    two = [forks.start([sys.executable, "-c", code], os.environ, tmp_path / str(n)) for n in range(2)]
    assert [process.returncode for process in two] == [None, None]
    with pytest.raises(subprocess.TimeoutExpired):
        two[0].wait(0.01)
    os.killpg(two[0].pid, signal.SIGTERM)
    two[1].send_signal(signal.SIGTERM)
    assert [process.wait(30) for process in two] == [-signal.SIGTERM] * 2
    two[1].send_signal(signal.SIGKILL)  # its number may be another process's by now


def test_nothing_is_left_of_a_process_that_ended(forks, tmp_path):
    """Its forkserver, which multiprocessing started, ends after it."""
    process = forks.start([sys.executable, "-c", "pass"], os.environ, tmp_path / "output")
    assert process.wait(30) == 0
    deadline = time.monotonic() + 10
    while (left := _group(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def _group(leader):
    """Process ids of a group, without zombies."""
    return [
        one.pid
        for one in psutil.process_iter(["status"])
        if one.info["status"] != psutil.STATUS_ZOMBIE and _group_of(one.pid) == leader
    ]


def _group_of(pid):
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def test_a_module_that_cannot_be_imported(tmp_path):
    with (
        Forks(["no_such_module"]) as forks,
        pytest.raises(RuntimeError, match=r"(?s)imports no_such_module has ended:.*ModuleNotFoundError"),
    ):
        forks.start([sys.executable, "-c", "pass"], os.environ, tmp_path / "output")


def test_what_can_be_forked(forks):
    """Programs of this environment's Python, with library paths of the importing process."""
    here = dict(os.environ)
    with Forks([MODULE], {**here, "LD_LIBRARY_PATH": "/a:/b"}) as others:
        assert others.can_run([sys.executable], {**here, "LD_LIBRARY_PATH": "/b"})
        assert not others.can_run([sys.executable], {**here, "LD_LIBRARY_PATH": "/b:/c"})
    assert forks.can_run([sys.executable, "-m", "x"], here)
    assert not forks.can_run(["bash", "-c", "x"], here)
    assert not forks.can_run([sys.executable, "-m", "x"], {**here, "LD_LIBRARY_PATH": "/elsewhere"})


def test_nothing_is_imported_from_the_current_folder(tmp_path, monkeypatch):
    """It may be the folder of a checkpoint that somebody else has written."""
    for module in (MODULE, "json", "http", "multiprocessing", "sglang"):
        (tmp_path / f"{module}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({module!r})\n")
    monkeypatch.chdir(tmp_path)
    code = (
        "import importlib.util, json, multiprocessing, sys\n"
        "multiprocessing.set_start_method('spawn', force=True)\n"
        "process = multiprocessing.Process(target=print)\n"
        "process.start(), process.join()\n"
        "print('' in sys.path, importlib.util.find_spec('sglang').origin)"
    )
    for children_fork in (True, False):
        output = tmp_path / "output"
        options = {"folder": tmp_path, "children_fork": children_fork}
        with Forks([MODULE]) as forks:
            process = forks.start([sys.executable, "-c", code], os.environ, output, **options)
            assert process.wait(60) == 0, output.read_text()
        assert "False " in output.read_text()
        assert str(tmp_path) not in output.read_text()
        output.unlink()
    port = free_port()
    command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)]
    with LocalServer(command, port, tmp_path / "log", ready="/", wait_seconds=60):
        pass
    assert not (tmp_path / "ran").exists()
