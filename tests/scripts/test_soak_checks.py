"""`scripts.soak` as it is typed, without servers: prompts, arguments, exit statuses, signals."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from live_processes import alive

from scripts import ROOT
from scripts.soak import __main__ as soak
from scripts.soak import checks, prompts
from scripts.soak.servers import LEGS, cold_server, soaked_server
from sgl_kvpool import env
from sgl_kvpool.commands.processes.server import ServerFailed


def session(pid):
    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
        return os.getsid(pid)


def test_a_signal_ends_the_server_too(tmp_path):
    """The signal comes long before the server is ready; its processes have to end with the command."""
    report = tmp_path / "soak.json"
    command = [sys.executable, "-m", "scripts.soak", "--legs", "fp8", "fp4", "--json", report]
    with subprocess.Popen(
        [*command, "--out", tmp_path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        servers, deadline = [], time.monotonic() + 120
        while not servers and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
            servers = [
                child.pid
                for child in psutil.Process(process.pid).children()
                if session(child.pid) == child.pid  # a server has a session of its own
            ]
        assert len(servers) == 1, "no server was seen"
        process.send_signal(signal.SIGTERM)
        printed, complaints = process.communicate(timeout=60)
    left = [one.pid for one in psutil.process_iter() if alive(one.pid) and session(one.pid) == servers[0]]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert (left, process.returncode, complaints) == ([], 128 + signal.SIGTERM, "")
    assert "stopped by SIGTERM; 0 of 2 servers were soaked" in printed
    assert json.loads(report.read_text())["stopped_by"] == "SIGTERM"


def test_nohup_keeps_it_from_a_hangup():
    code = (
        "import os, signal; from scripts.kit.runner import signals_interrupt\n"
        "with signals_interrupt(): os.kill(os.getpid(), signal.SIGHUP); print('here')"
    )
    done = subprocess.run(["nohup", sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "here\n"), done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "nan"], "argument --minutes: nan is not a finite number above 0"),
        (["--server-args", "--x 'y"], '--server-args "--x \'y": No closing quotation'),
        (["--server-args=--admin-api-key=x"], "--server-args has a secret, which report and logs would keep"),
        (["--json", "/"], "--json '/': Is a directory; name another"),
        (["--out", "/proc/x"], "--out '/proc/x': No such file or directory; name another"),
        (["--model", "/no/such/model"], "does not exist"),
    ],
)
def test_arguments_that_make_no_sense(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        soak.parse(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("record", "words", "status"),
    [
        ({"violations": ["x"], "too_few": ["9 answers"]}, [], 1),
        ({"violations": [], "too_few": ["9 answers"]}, [], 3),
        ({"violations": []}, ["--break", "load-order"], 3),
        (ValueError("no text"), [], 1),
        (ServerFailed("no port"), [], 1),
    ],
)
def test_exit_status(record, words, status, monkeypatch, tmp_path):
    """The servers after one that fails are soaked all the same."""

    def one(leg, *_, **__):
        if leg.name == "fp4":
            return {"name": leg.name, "violations": []}
        if isinstance(record, Exception):
            raise record
        return {"name": leg.name, **record}

    report = tmp_path / "soak.json"
    monkeypatch.setattr(soak, "soak", one)
    monkeypatch.setattr("sys.argv", ["soak", "--legs", "fp8", "fp4", "--json", str(report), *words])
    assert soak.main() == status
    assert [leg["name"] for leg in json.loads(report.read_text())["legs"]] == ["fp8", "fp4"]


def test_what_too_few_requests_did_not_reach():
    """The counts of 12 s on a busy machine."""
    few = {
        "answers_complete": 9,
        "answers_given_up": 1,
        "found_tokens": {"device": 48, "host": 0, "storage": 0},
        "server_counts": {"evicted_tokens": 0, "backed_up_tokens": 96, "loaded_tokens": 0},
        "censuses": 2,
    }
    assert checks.too_few(few, 2048, has_store=True) == [
        "9 answers, fewer than 20",
        "aborted requests: 1, fewer than 2",
        "0 tokens evicted from a pool of 2048",
        "loaded tokens: 0",
        "2 censuses, fewer than 3: growth of memory not checked",
        "nothing found in the host tier",
        "nothing found in the store",
    ]


def test_transfers_that_the_watch_did_not_see_are_reported():
    """As if SGLang moved pages by another method than the watched ones."""
    values = {"sglang:hicache_backup_tokens_total": 192.0, "sglang:load_back_tokens_total": 64.0}
    device = {"page_size_tokens": 32}
    seen = {"backed_up_pages": 6, "loaded_pages": 2}
    assert checks.watch_problems(values, {"device": device, "transfers": seen}) == []
    (problem,) = checks.watch_problems(values, {"device": device, "transfers": {**seen, "loaded_pages": 1}})
    assert problem == "sglang:load_back_tokens_total is 64, but the transfers of 32 were compared"
    assert len(checks.watch_problems(values, {"device": device, "transfers": None})) == 2


def test_prompts_of_a_short_text_fill_the_pool():
    text = list(range(9500))  # as many tokens as a real tokenizer makes of the text that is shipped
    longer = prompts.lengthened(text, 40_000)
    copies = [tuple(longer[at : at + len(text)]) for at in range(0, len(longer), len(text))]
    assert len(longer) >= 40_000
    assert all(sorted(copy) == text for copy in copies)  # in another order
    assert len(set(copies)) == len(copies)
    made = prompts.make_prompts(text, 8192, 64, 6 * 8192, seed=0)
    assert made == prompts.make_prompts(text, 8192, 64, 6 * 8192, seed=0)
    assert sum(len(prompt.token_ids) for prompt in made) >= 6 * 8192
    assert max(len(prompt.token_ids) for prompt in made) > 8192 // 2


@pytest.mark.parametrize("config", [{"text_config": {"index_topk": 2048}}, {"index_topk": None}])
def test_servers_of_a_model(tmp_path, config):
    """Sparse attention has one page size and arrangement, and refuses KVPOOL_PREFILL_READS_ROWS."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    for table, leg in zip(LEGS, soak.parse(["--model", str(tmp_path)]).legs, strict=True):
        assert leg.sparse == ("text_config" in config)
        for server in (soaked_server(leg, tmp_path, tmp_path, [], []), cold_server(leg, tmp_path, [])):
            told = dict(zip(server.arguments, server.arguments[1:], strict=False))
            assert told["--page-size"] == str(64 if leg.sparse else table.page_size_tokens)
            assert (env.PREFILL_READS_ROWS in server.environment) != leg.sparse
            if "--kv-cache-arrangement" in told:
                assert told["--kv-cache-arrangement"] == ("layer_major" if leg.sparse else table.arrangement)
