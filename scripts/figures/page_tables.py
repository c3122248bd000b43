"""Computed tables in a documentation page, each between two comments with its name."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

__all__ = ["add_arguments", "carry_out", "main", "updated"]


def add_arguments(parser: argparse.ArgumentParser, page: Path) -> None:
    """Add `--write` and `--check`."""
    parser.add_argument("--write", action="store_true", help=f"write the tables into docs/{page.name}")
    parser.add_argument("--check", action="store_true", help="compare the result with the page")


def updated(text: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """A page's text with all tables computed anew; ValueError if the page lacks a table."""
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        _, after = rest.split(end)
        text = f"{before}{begin}\n{table()}\n\n{end}{after}"
    return text


def carry_out(
    arguments: argparse.Namespace, page: Path, tables: Mapping[str, Callable[[], str]], module: str
) -> int:
    """Print the tables, or write them into the page, or compare; returns the exit status."""
    if not (arguments.write or arguments.check):
        print("\n\n".join(table() for table in tables.values()))
        return 0
    old = page.read_text()
    new = updated(old, tables)
    if arguments.write:
        page.write_text(new)
        return 0
    if new != old:
        print(f"{page} is out of date; run python -m {module} --write", file=sys.stderr)
    return int(new != old)


def main(description: str, page: Path, tables: Mapping[str, Callable[[], str]], module: str) -> int:
    """A program that prints, writes or compares a page's tables; returns the exit status."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    add_arguments(parser, page)
    return carry_out(parser.parse_args(), page, tables, module)
