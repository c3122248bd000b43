"""An SGLang server as a child process.

Imports neither torch nor SGLang, so that it needs little memory beside a server.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sgl_kvpool.demo.local_server import LocalServer, ServerFailed, free_port, past_proxies

__all__ = ["DEMO_MODELS", "Server", "ServerFailed", "cpu_arguments", "free_port", "serve_command"]

#: Package in which SGLang finds the classes of the demo's models.
DEMO_MODELS = "sgl_kvpool.demo.models"

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
    """`sglang serve` with given arguments, which contain a port, or another program in its place.

    Raises
    ------
    ServerFailed
        On entering and in a request, if the server ends or does not answer in time.
    """

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
        """`/server_info`."""
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
