"""An SGLang server as a child process, and servers of one layout after the other.

Imports neither torch nor SGLang, so that it needs little memory beside a server.
"""

import json
import os
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

from sgl_kvpool.commands.processes.forks import Forks
from sgl_kvpool.commands.processes.local_server import LocalServer, ServerFailed, past_proxies
from sgl_kvpool.commands.processes.local_server import free_port as free_port
from sgl_kvpool.commands.processes.progress import progress
from sgl_kvpool.layout import MLAKVCacheLayout

#: Package in which SGLang finds the classes of the demo's models.
DEMO_MODELS = "sgl_kvpool.demo.models"

#: What an answer in another form than SGLang's raises, and what a server that ends or hangs does.
FAILURES = (ServerFailed, OSError, HTTPException, LookupError, TypeError, ValueError)
#: Hides GPUs: SGLang chooses kernels by visible GPUs, not by its --device.
_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def serve_command() -> list[str]:
    """`sglang serve` of this interpreter's environment."""
    script = Path(sysconfig.get_path("scripts"), "sglang")
    if script.exists():
        return [str(script), "serve"]
    # SGLang in the user's or another environment's packages; sglang.cli has no __main__.
    return [sys.executable, "-c", "from sglang.cli.main import main; main()", "serve"]


def cpu_arguments(model_path: str | Path, port: int, max_total_tokens: int = 16384) -> list[str]:
    """Arguments with which SGLang serves the demo model on a CPU."""
    return [
        *("--model-path", str(model_path)),
        *("--port", str(port)),
        *("--device", "cpu"),
        # Without GPU memory to profile, the pool size must be given.
        *("--mem-fraction-static", "0.3"),
        *("--max-total-tokens", str(max_total_tokens)),
        # SGLang's overlap scheduling needs streams.
        "--disable-overlap-schedule",
        # Otherwise an idle scheduler spins on a core that the next server needs.
        "--sleep-on-idle",
    ]


class Server(LocalServer):
    """`sglang serve` with given arguments, which contain a port, or another program in its place."""

    def __init__(
        self,
        arguments: Sequence[str],
        log: str | Path,
        environment: Mapping[str, str] | None = None,
        wait_seconds: float = 600.0,
        program: Sequence[str] | None = None,
    ):
        self.program = list(program or serve_command())
        self.arguments = list(arguments)
        on_cpu = ("--device", "cpu") in zip(self.arguments, self.arguments[1:], strict=False)
        super().__init__(
            [*self.program, *self.arguments],
            int(self.arguments[self.arguments.index("--port") + 1]),
            log,
            {
                "SGLANG_EXTERNAL_MODEL_PACKAGE": DEMO_MODELS,
                **(_NO_GPU if on_cpu else {}),
                **past_proxies(),
                **(environment or {}),
            },
            wait_seconds=wait_seconds,
        )

    def info(self) -> dict[str, Any]:
        return json.loads(self.get("/server_info"))

    def context_tokens(self) -> int:
        """Largest number of tokens of a request, prompt and answer."""
        return json.loads(self.get("/v1/models"))["data"][0]["max_model_len"]

    def token_ids(self, text: str) -> list[int]:
        """Token ids of a text, after those with which the tokenizer begins every text."""
        return self.post("/v1/tokenize", prompt=text)["tokens"]

    def generate(self, **fields: Any) -> Any:
        """Answer of SGLang's native `/generate` to the given fields of a request."""
        return self.post("/generate", **fields)


def import_once(forks: Forks) -> Forks | None:
    """The forks, once SGLang is imported; None if the process that imports it ends."""
    print("importing SGLang, once for all servers", flush=True)
    try:
        with progress("importing SGLang"), tempfile.NamedTemporaryFile() as output:
            forks.start([sys.executable, "-c", "pass"], os.environ, output.name).wait()
    except RuntimeError as error:
        print(f"failed: {error}\nEvery server imports it by itself, which takes longer.", flush=True)
        return None
    return forks


def in_words(error: Exception) -> str:
    """One of `FAILURES` with the name of its type, unless it is our own."""
    return str(error) if isinstance(error, ServerFailed) else f"{type(error).__name__}: {error}"


def in_turn(
    layouts: Sequence[MLAKVCacheLayout],
    server_of: Callable[[MLAKVCacheLayout], Server],
    ask: Callable[[Server, MLAKVCacheLayout, float], tuple[Any, str]],
    forks: Forks | None,
) -> tuple[list[Any], bool]:
    """Start each layout's server, ask it, stop it; what was found until one failed, and whether one did.

    `ask` gets the seconds of the start, and returns what it found and a text.
    """
    found: list[Any] = []
    for number, layout in enumerate(layouts, 1):
        what, began, server = f"[{number}/{len(layouts)}] {layout}", time.monotonic(), server_of(layout)
        server.forks = forks  # type: ignore[misc]
        try:
            with progress(what) as reached:
                reached("starting SGLang")
                with server:
                    start_seconds = time.monotonic() - began
                    print(f"{what}: ready after {start_seconds:.0f} s", flush=True)
                    reached("asking it")
                    result, text = ask(server, layout, start_seconds)
        except FAILURES as error:
            print(f"{what}: failed: {in_words(error)}\nthe server's log: {server.log}", flush=True)
            return found, True
        found.append(result)
        left = round((time.monotonic() - began) * (len(layouts) - number) / 60)
        print(f"{what}: {text}{f'; about {left} minutes left' if left else ''}", flush=True)
    return found, False
