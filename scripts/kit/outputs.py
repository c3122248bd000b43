"""Arguments that several programs have, their output files and tables, and the commit of their results."""

import argparse
import json
import os
import subprocess
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from scripts import ROOT
from sgl_kvpool.commands.arguments import naming, number
from sgl_kvpool.folders import beside, replace_file

#: Type of an argument.
positive = partial(number, what="a finite number above 0", limit=1e9)


def require_writable(parser: argparse.ArgumentParser, path: Path | None) -> None:
    """End the program, with usage and reason, if the file of --json cannot be written; None is skipped."""
    if path is None:
        return
    try:
        with naming("--json", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_file() or not path.exists():
                beside(path).open("w").close()  # its name is longer
                beside(path).unlink()
            elif not path.is_dir():
                raise ValueError(f"--json {str(path)!r} is not a regular file; name another")
            path.open("a").close()
    except ValueError as error:
        parser.error(str(error))


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
    ValueError: if these results are of another commit, schema, program, device or size, or there is no file.
    """

    def __init__(self, path: Path | None, facts: dict[str, Any], goes_on: bool = False) -> None:
        self.path, self.facts = path, facts
        self.rows: list[dict[str, Any]] = []
        if goes_on and path is None:
            raise ValueError("--continue keeps the results of a file; name it with --json")
        if goes_on and path is not None and path.exists() and path.stat().st_size:
            with naming("--json", path):
                kept = json.loads(path.read_text("utf-8"))
            way_out = "name another file, or leave out --continue"
            if not isinstance(kept, dict) or not isinstance(kept.get("results"), list):
                raise ValueError(f"{path} has no results; {way_out}")
            for name in ("benchmark", "script", "schema", "commit", "device", "quick"):
                if kept.get(name) != facts.get(name):
                    raise ValueError(
                        f"{path} has results of {name} {kept.get(name)}, not {facts.get(name)}; {way_out}"
                    )
            self.rows = [row for row in kept["results"] if row["status"] != "not run"]
        self._jobs = {_key(row["job"]) for row in self.rows}

    def has(self, job: Any) -> bool:
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


def updated(text: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """A page's text with all tables, each between two comments with its name, computed anew.

    ValueError: if the page lacks a table.
    """
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        _, after = rest.split(end)
        text = f"{before}{begin}\n{table()}\n\n{end}{after}"
    return text
