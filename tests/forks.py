"""Code that runs in processes with SGLang imported, as `python -c` would run it."""

import os
import subprocess
import sys
from pathlib import Path

from sgl_kvpool.commands.processes import forks

ROOT = Path(__file__).resolve().parent.parent


def without_folders(text: str) -> str:
    """Output without the folders of checkout and environment, which may have any name."""
    return text.replace(sys.prefix, "").replace(str(ROOT), "")


class Forks(forks.Forks):
    """`run` is `python -c` with the imports done; the first call waits for them.

    `output` is an empty folder for what the code prints.
    """

    def __init__(self, *modules: str, output: Path, environment: dict[str, str]):
        # Threads of numeric libraries do not survive a fork.
        self._environment = {**environment, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._output = output
        super().__init__(modules, self._environment)

    def run(
        self, code: str, folder: Path = ROOT, *, limit_s: int = 300, **environment: str
    ) -> subprocess.CompletedProcess:
        """Run `code` in `folder`; `environment` is added to the environment of the importing process."""
        output = [self._output / name for name in ("stdout", "stderr")]
        for path in output:
            path.write_bytes(b"")
        command = [sys.executable, "-c", code]
        process = self.start(
            command, {**self._environment, **environment}, *output, folder, children_fork=False
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            status = process.wait()
        return subprocess.CompletedProcess(code, status, *(path.read_text() for path in output))
