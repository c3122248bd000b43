#!/usr/bin/env python3
"""Compare every hook point in two releases of SGLang; `sgl-kvpool doctor` checks the installed one.

    python scripts/check_hook_points.py OTHER/bin/python

The Python is of another environment with another SGLang, where this package need not be installed. Prints a
table of the hook groups of both, and lists the hook points that one release lacks, those with another
signature, functions with the same signature and another source, and those that fail in both; exits with 1 if
there are any. Each release takes half a minute to import.
"""

import argparse
import enum
import hashlib
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: Longest signature that is printed whole, in characters.
LONG_SIGNATURE = 700


def main(argv: list[str] | None = None) -> int:
    """Print the table, and the hook points that fail or changed; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("python", help="interpreter of an environment with another SGLang")
    parser.add_argument("--json", type=Path, help=argparse.SUPPRESS)  # passed by `examine_with`
    arguments = parser.parse_args(argv)
    found = examine()
    if arguments.json:
        arguments.json.write_text(json.dumps(found))
        return 0
    other = examine_with(arguments.python)
    print("\n".join(table(other, found)))
    changes = differences(other, found)
    print("\n".join(["", *changes]) if changes else "\nno hook point changed")
    return 1 if changes else 0


def examine() -> dict[str, Any]:
    """Version of the installed SGLang, and the points of each hook group with description and problem."""
    from sgl_kvpool.commands.doctor.probes import hook_groups
    from sgl_kvpool.sglang_plugin import hook_points

    groups = {}
    for group in hook_groups():
        points = {}
        for point in group.points():
            problems = hook_points.check([point])
            points[point.target] = {"problem": "; ".join(problems) or None, **described(point)}
        groups[group.name] = {"points": points}
    return {"version": hook_points.installed_version(), "groups": groups}


def examine_with(python: str) -> dict[str, Any]:
    """Result of `examine` in another interpreter, with the sources of this checkout."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "examined.json"
        done = subprocess.run(
            [python, __file__, python, "--json", path],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
        )
        if done.returncode or not path.exists():
            raise SystemExit(f"{python} ended with status {done.returncode}, see above")
        return json.loads(path.read_text())


def described(point: Any) -> dict[str, Any]:
    """Signature, members or value of a hook point, and a digest of its source; None for missing ones."""
    try:
        found = pkgutil.resolve_name(point.target)
    except (ImportError, AttributeError):
        return {"signature": None, "source": None}
    try:
        source = hashlib.sha256(inspect.getsource(found).encode()).hexdigest()[:16]
    except (OSError, TypeError):
        source = None
    return {"signature": signature(found), "source": None if inspect.ismodule(found) else source}


def signature(found: Any) -> str:
    """Parameters of a callable without annotations, names of an enum, value of a number or text."""
    if isinstance(found, type) and issubclass(found, enum.Enum):
        return ", ".join(found.__members__)
    if callable(found):
        try:
            parameters = inspect.signature(found).parameters.values()
        except (TypeError, ValueError):
            return type(found).__name__
        text = str(inspect.Signature([p.replace(annotation=p.empty) for p in parameters]))
        return re.sub(r" at 0x[0-9a-f]+", "", text)
    return repr(found) if isinstance(found, int | float | str) else type(found).__name__


def table(*releases: dict[str, Any]) -> list[str]:
    """Lines of a Markdown table of the hook groups, a column for each release."""
    heads = " | ".join(f"SGLang {release['version']}" for release in releases)
    lines = [f"| hook group | hook points | {heads} |", "|---|---|" + "---|" * len(releases)]
    for name, group in releases[-1]["groups"].items():
        cells = [verdict(release["groups"][name]["points"]) for release in releases]
        lines.append(f"| {name} | {len(group['points'])} | {' | '.join(cells)} |")
    return lines


def verdict(points: dict[str, Any]) -> str:
    """Whether a group works; `differences` lists what fails."""
    problems = sum(point["problem"] is not None for point in points.values())
    return f"{problems} fail" if problems else "works"


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Lines with the hook points in one release only, with another signature, and with another source."""
    before, after = (
        {target: point for group in release["groups"].values() for target, point in group["points"].items()}
        for release in (one, other)
    )
    versions = [release["version"] for release in (one, other)]
    found: dict[str, list[str]] = {
        "in one release only": [],
        "another signature, members or value": [],
        "the same signature, another source": [],
        "failing in both releases": [],
    }
    absent, signatures, sources, failing_in_both = found.values()
    for target in sorted(before.keys() & after.keys()):
        old, new = before[target], after[target]
        if (old["signature"] is None) != (new["signature"] is None):
            absent.append(f"  {target}: in {versions[old['signature'] is None]} only")
        elif old["signature"] != new["signature"] or old["problem"] != new["problem"]:
            signatures.append(f"  {target}")
            for version, point, opposite in zip(versions, (old, new), (new, old), strict=True):
                failing = f"  FAILS: {point['problem'].partition(': ')[2]}" if point["problem"] else ""
                signatures.append(
                    f"    {version} {shown(point['signature'], opposite['signature'])}{failing}"
                )
        elif new["problem"]:
            failing_in_both.append(f"  {new['problem']}")
        elif old["source"] != new["source"]:
            sources.append(f"  {target}")
    return [line for title, lines in found.items() if lines for line in (f"{title}:", *lines)]


def shown(text: str, opposite: str) -> str:
    """A signature; if it is long, as of ServerArgs, only the parameters that the other release lacks."""
    if len(text) <= LONG_SIGNATURE:
        return text
    others = set(opposite.strip("()").split(", "))
    return f"(..., {', '.join(part for part in text.strip('()').split(', ') if part not in others)})"


if __name__ == "__main__":
    sys.exit(main())
