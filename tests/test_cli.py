"""The command sgl-kvpool, without servers."""

import os
import shlex
import signal
import subprocess
import sys
import time

import foreign_version
import pytest
from codec_oracle import ROW_BYTES
from live_processes import ended, ran

from sgl_kvpool.cli import main


def test_layouts(capsys):
    assert main(["layouts"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[2:]] == [[name, str(size)] for name, size in ROW_BYTES.items()]
    assert main(["layouts", "--kv-lora-rank", "128", "--qk-rope-head-dim", "0"]) == 0
    assert "12 zero bytes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *((["layouts", f"--kv-lora-rank={n}"], f"kv_lora_rank={n} is not a positive multiple of 128")
          for n in (0, -128, 100)),
        (["demo", "--layouts", "fp4,int2"], "unknown KV cache layout 'int2'"),
        (["demo", "--model", "bytes", "--windows", "0"], "--windows: 0 is not a whole"),
        # Before a server starts.
        (["demo", "--model", "bytes", "--out", "{file}"], "file': File exists; name another"),
        (["demo", "--model", "bytes", "--out", "/proc/x"], "--out '/proc/x': No such file or directory"),
    ],
)  # fmt: skip
def test_refusals(capsys, tmp_path, words, said):
    file = tmp_path / "file"
    file.write_text("x")
    try:
        status = main([word.format(file=file) for word in words])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert said in capsys.readouterr().err


def test_a_cluster_needs_its_packages_and_room_for_a_host_tier(capsys, monkeypatch):
    from sgl_kvpool.commands.doctor.probes import Finding
    from sgl_kvpool.demo import compare
    from sgl_kvpool.demo.cluster import command as clusters

    monkeypatch.setattr(compare, "host", lambda: Finding({"host_tier_bytes": 0}))
    assert main(["demo", "--cluster"]) == 2
    assert "--cluster needs a host tier: SGLang keeps 10 GiB" in capsys.readouterr().err
    monkeypatch.setattr(clusters, "NEEDED", ("mooncake", "no_such_router"))
    assert main(["demo", "--cluster"]) == 2
    assert "--cluster needs no_such_router" in capsys.readouterr().err


def test_output_that_cannot_be_written_is_an_error():
    command = [sys.executable, "-m", "sgl_kvpool", "layouts"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    done = ran("bash", "-c", f"{shlex.join(command)} | true; echo ${{PIPESTATUS[0]}}")
    assert done.stdout in ("141\n", "0\n")  # 0: everything was written before `true` ended
    assert done.stderr == ""


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_stream_gets_nothing_and_the_other_one_no_more(closed):
    """`print(file=None)` writes to stdout, where progress would be in the middle of --json."""
    program = "import sys; from sgl_kvpool import cli; status = cli.main(['layouts']); "
    program += "print('progress', file=sys.stderr); sys.exit(status)"
    done = ran("bash", "-c", f"{shlex.join([sys.executable, '-c', program])} {closed}")
    assert done.returncode == 0
    assert done.stderr == ("" if "2>&-" in closed else "progress\n")
    assert ("fp4_fp8_rope" in done.stdout) == (not closed.startswith(">&-"))
    assert "progress" not in done.stdout


@pytest.mark.engine
def test_a_server_that_refuses_shows_why(tmp_path):
    """A real server, stopped at its start by a version of SGLang that is not in the tested range."""
    (tmp_path / "demo.json").write_text("of an earlier run")
    foreign = foreign_version.write(tmp_path / "path")
    command = [sys.executable, "-m", "sgl_kvpool", "demo", "--model", "bytes", "--layouts", "fp4"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(foreign), *sys.path[1:]])}
    done = ran(*command, "--out", tmp_path, env=env)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert any("was requested, but SGLang 0.6.1 is not a version" in line for line in lines)
    log = tmp_path / "server-fp4.log"
    assert lines[-1] == f"the server's log: {log}"
    assert lines[-2] == log.read_text().splitlines()[-1]
    assert (tmp_path / "demo.json").read_text() == "of an earlier run"


@pytest.mark.parametrize("command", [["demo"], ["plan", "--model", __file__, "--gpu-gb", "80"], ["warmup"]])
def test_a_variable_that_no_server_takes(command, monkeypatch, capsys):
    monkeypatch.setenv("KVPOOL_LAYOUT", "fp4")
    assert main(command) == 2
    assert capsys.readouterr().err.startswith("sgl-kvpool: KVPOOL_LAYOUT='fp4' is not a variable of sgl-kv")


def test_servers_bypass_the_users_proxy(monkeypatch):
    from sgl_kvpool.commands.processes.server import Server

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "example.org")
    found = Server(["--port", "1"], os.devnull).environment
    assert found["no_proxy"] == found["NO_PROXY"] == "example.org,127.0.0.1,localhost"
    monkeypatch.delenv("http_proxy")
    assert "no_proxy" not in Server(["--port", "1"], os.devnull).environment


#: A "server" that ignores SIGTERM, with a child that does too.
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.fork()
open(sys.argv[-1] + str(os.getpid()), "w").close()
time.sleep(60)
"""

#: A program that starts such a server, as the demo does.
HOLDER = """
import sys
from sgl_kvpool.commands.processes.server import Server
with Server(["--port", "1", sys.argv[2]], sys.argv[3], program=(sys.executable, "-c", sys.argv[1])):
    pass
"""


def test_two_interrupts_leave_no_server(tmp_path):
    """The first interrupt waits for a server that does not end, so users interrupt again."""
    marks = tmp_path / "pid"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, STUBBORN, str(marks), str(tmp_path / "log")],
        stderr=subprocess.DEVNULL,
        # As in a terminal: background jobs of a shell, and of CI, inherit an ignored SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("pid*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    pids = [int(path.name[3:]) for path in tmp_path.glob("pid*")]
    assert len(pids) == 2
    holder.send_signal(signal.SIGINT)
    time.sleep(1)
    holder.send_signal(signal.SIGINT)
    holder.wait(timeout=30)
    assert all(ended(pid, 10) for pid in pids)
