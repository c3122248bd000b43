"""Output files of a program, and the commit of its results."""

import argparse
import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from scripts import ROOT


def require_writable(parser: argparse.ArgumentParser, *paths: Path | None) -> None:
    """End the program, with usage and reason, if one of the files cannot be written; None is skipped."""
    for path in paths:
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
        except OSError as error:
            parser.error(f"{path} cannot be written ({error.strerror}); name a file that can")


@cache
def commit() -> str | None:
    """Commit of this checkout, with "-dirty" after changes; None in a copy without git."""
    # These variables are set inside a git hook of another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


class Report:
    """Results that are written after each addition, so that a program may be ended at any time.

    `path`: A JSON file, replaced atomically at each write. None keeps the results in memory.
    `facts`: Fields of the file beside "results".
    `goes_on`: Whether to keep the results that the file has already.
    ValueError: if these results have another schema, or are of another commit.
    """

    def __init__(self, path: Path | None, facts: dict[str, Any], goes_on: bool = False) -> None:
        self.path, self.facts = path, facts
        self.rows: list[dict[str, Any]] = []
        if goes_on and path is not None and path.exists() and path.stat().st_size:
            kept = json.loads(path.read_text("utf-8"))
            for name in ("schema", "commit"):
                if kept.get(name) != facts.get(name):
                    raise ValueError(
                        f"{path} has results of {name} {kept.get(name)}, not {facts.get(name)}; name "
                        "another file, or leave out --continue"
                    )
            self.rows = [row for row in kept["results"] if row["status"] != "not run"]
        self._jobs = {_key(row["job"]) for row in self.rows}

    def has(self, job: Any) -> bool:
        """Whether a row has this "job"."""
        return _key(job) in self._jobs

    def add(self, row: dict[str, Any]) -> None:
        """Add a row, whose "job" identifies the measurement, and write the file."""
        self._jobs.add(_key(row["job"]))
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        """Write the file again, after a change of the facts."""
        if self.path is not None:
            replace_file(self.path, json.dumps({**self.facts, "results": self.rows}, indent=1) + "\n")


def _key(job: Any) -> str:
    return json.dumps(job, sort_keys=True)


def replace_file(path: Path, text: str) -> None:
    """Write a file atomically: a reader gets the old text or the new text, never a part."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(text, "utf-8")
    beside.replace(path)
