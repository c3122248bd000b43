"""`sgl-kvpool plan --model owner/name`: config.json from Hugging Face or its cache, or an early refusal."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sgl_kvpool.commands import plan as command

#: Files of a repository.
FILES = ("config.json", "code.py")
V32 = Path(__file__).resolve().parent / "configs" / "deepseek_v32.json"

#: The command, with another time limit for Hugging Face.
WITH_LIMIT = (
    "import sys; from sgl_kvpool import cli; from sgl_kvpool.commands import named_model; "
    "named_model.FETCH_LIMIT_S = {}; sys.exit({})"
)


def hugging_face(home, limit_s, code="cli.main()", arguments=(), **environment):
    """A process that asks a Hugging Face whose cache is `home`."""
    program = [sys.executable, "-c", WITH_LIMIT.format(limit_s, code), *arguments]
    environment = {**os.environ, "HF_HOME": str(home), **environment}
    return subprocess.run(program, capture_output=True, text=True, env=environment, timeout=100)


@pytest.mark.parametrize("where", ["nowhere", "silent", "offline"])
def test_a_name_that_cannot_be_looked_up(where, tmp_path):
    """SGLang would try for minutes, once for each layout."""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and says nothing
        port = silent.getsockname()[1]
        environment = {
            "nowhere": {"HF_ENDPOINT": "https://no-such-name.invalid"},
            "silent": {"HF_ENDPOINT": f"http://127.0.0.1:{port}"},
            "offline": {"HF_HUB_OFFLINE": "1"},
        }[where]
        began = time.monotonic()
        arguments = ["plan", "--model", "nobody/no-such-model", "--gpu-gb", "80"]
        done = hugging_face(tmp_path, 3, arguments=arguments, **environment)
    assert time.monotonic() - began < 60  # of which imports take most on a busy machine
    assert (done.returncode, done.stdout) == (2, "")
    first, last = done.stderr.splitlines()
    assert first == "fetching config.json of nobody/no-such-model from Hugging Face, 3 s at most ..."
    assert (
        "config.json of nobody/no-such-model is neither available from Hugging Face nor in its cache" in last
    )
    assert ("no answer in 3 s" in last) == (where == "silent")


def test_a_name_that_was_looked_up_before(tmp_path):
    repository = tmp_path / "hub" / "models--nobody--cached"
    snapshot = repository / "snapshots" / ("0123456789" * 4)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(V32.read_text())
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    code = "print(named_model.find_model(sys.argv[1]).sglang_path().__enter__())"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        done = hugging_face(tmp_path, 1, code, ["nobody/cached"], HF_ENDPOINT=endpoint)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{snapshot}\n"


@pytest.mark.parametrize(
    ("words", "trusted"),
    [
        (["plan", "--gpu-gb", "80"], False),
        (["plan", "--gpu-gb", "80", "--", "--trust-remote"], True),  # SGLang accepts shortened names
        (["warmup", "--device", "cpu"], False),
    ],
)
def test_code_is_fetched_only_if_it_is_trusted(words, trusted, tmp_path):
    requested = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            requested.append(self.path)
            files = [{"type": "file", "path": name, "size": 2, "oid": name} for name in FILES]
            answer = files if "/tree/" in self.path else {"id": "nobody/new", "sha": "0" * 40}
            body = json.dumps(answer).encode()
            self.send_response(200 if self.path.startswith("/api/models/nobody/new") else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        command = [words[0], "--model", "nobody/new", *words[1:]]
        done = hugging_face(tmp_path, 9, arguments=command, HF_ENDPOINT=f"http://127.0.0.1:{hub.server_port}")
        hub.shutdown()
    assert done.returncode == 2
    fetched = {name for name in FILES if any(path.endswith(name) for path in requested)}
    assert fetched == {"config.json", *["code.py"] * trusted}


def test_names_of_drafts_are_looked_up_too(tmp_path):
    """A draft with the target's own name gets the folder of the target."""
    (tmp_path / "config.json").write_text("{}")
    here = str(tmp_path)
    flag = "--speculative-draft-model-path"
    with contextlib.ExitStack() as stack:

        def given(*words):
            return list(command._drafts_here(words, "M/N", "/cache/M/N", stack))

        assert given("--page-size", "64", flag, "M/N") == ["--page-size", "64", flag, "/cache/M/N"]
        assert given(f"{flag}=M/N", "--x", "M/N") == [f"{flag}=/cache/M/N", "--x", "M/N"]
        assert given(flag, here) == [flag, here]
        with pytest.raises(ValueError, match="'not/a/draft' does not exist"):
            given(flag, "not/a/draft")
