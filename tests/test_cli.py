"""The command sgl-kvpool, without servers."""

import os
import signal
import subprocess
import sys
import time

import pytest

from sgl_kvpool.cli import main


def test_layouts(capsys):
    assert main(["layouts"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[2:]] == [
        ["bf16", "1152"],
        ["fp8", "576"],
        ["fp8_block_scale", "656"],
        ["fp4", "416"],
    ]
    assert main(["layouts", "--kv-lora-rank", "128", "--qk-rope-head-dim", "0"]) == 0
    assert "12 zero bytes" in capsys.readouterr().out


@pytest.mark.parametrize("rank", ["0", "-128", "100"])
def test_bad_geometry(rank, capsys):
    assert main(["layouts", f"--kv-lora-rank={rank}"]) == 2
    assert f"kv_lora_rank={rank} is not a positive multiple of 128" in capsys.readouterr().err


def test_unknown_layouts_of_the_demo(capsys):
    with pytest.raises(SystemExit):
        main(["demo", "--layouts", "fp4,int2"])
    assert "unknown KV cache layout 'int2'" in capsys.readouterr().err


def test_write_model_overwrites_nothing(tmp_path, capsys):
    folder = tmp_path / "model"
    assert main(["demo", "--write-model", str(folder)]) == 0
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert "model.safetensors" in before
    assert main(["demo", "--write-model", str(folder)]) == 2
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert main(["demo", "--write-model", ""]) == 2
    assert main(["demo", "--write-model", str(folder / "config.json")]) == 2
    errors = capsys.readouterr().err
    assert errors.count("new or empty") == 2
    assert "Traceback" not in errors


#: A "server" that ignores SIGTERM, with a child that does too.
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.fork()
open(sys.argv[-1] + str(os.getpid()), "w").close()
time.sleep(60)
"""

#: A program that holds one, as the demo does.
HOLDER = """
import sys
from sgl_kvpool.demo.server import Server
with Server(["--port", "1", sys.argv[2]], sys.argv[3], program=(sys.executable, "-c", sys.argv[1])):
    pass
"""


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_two_interrupts_leave_no_server(tmp_path):
    """The first waits for a server that does not end; people press a second time."""
    marks = tmp_path / "pid"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, STUBBORN, str(marks), str(tmp_path / "log")],
        stderr=subprocess.DEVNULL,
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
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, pids))
