#!/usr/bin/env python3
"""Drive SGLang servers with concurrent clients, aborts and cache pressure, and check their state afterwards.

    python -m scripts.soak                       # 5 minutes of traffic, all layouts, demo's model on the CPU
    python -m scripts.soak --minutes 1 --legs fp4
    python -m scripts.soak --model PATH          # a GPU; not run yet

docs/benchmarks.md lists the checks. Exits with 1 after a violation, with 2 for wrong arguments, with 3
without a violation if a server got too few requests for its checks to mean anything, or --break damaged one
and no check noticed. Ctrl-C, SIGTERM and SIGHUP end the server too; the status is then 128 plus the signal's
number.
"""

import argparse
import json
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.kit.outputs import commit, positive, require_writable
from scripts.kit.runner import Interrupted, signals_interrupt
from scripts.soak.in_server.breakages import BREAKAGES
from scripts.soak.leg import soak
from scripts.soak.servers import LEGS, of_model
from sgl_kvpool.commands.arguments import naming, without_secrets
from sgl_kvpool.commands.evaluate.report import measured_on
from sgl_kvpool.commands.processes.server import ServerFailed
from sgl_kvpool.folders import replace_file
from sgl_kvpool.sglang_plugin.options import environment_problems

SCHEMA = 4
#: Exit status of a soak without violations whose checks mean nothing.
MEANS_NOTHING = 3


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--minutes", type=positive, default=5.0, help="traffic on all servers together (5)")
    names = [leg.name for leg in LEGS]
    parser.add_argument("--legs", nargs="+", choices=names, default=names, help="servers by name (all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random requests (0)")
    parser.add_argument("--model", help="checkpoint to be served on a GPU instead of the demo's on the CPU")
    parser.add_argument("--server-args", default="", help="more arguments of all servers")
    parser.add_argument(
        "--break", dest="breakages", nargs="+", choices=BREAKAGES, default=[], metavar="DAMAGE",
        help=f"damage the servers on purpose, with {', '.join(BREAKAGES)} (none)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="write the report to this file")
    parser.add_argument("--out", type=Path, help="keep logs in this folder")
    options = parser.parse_args(arguments)
    if problems := environment_problems():
        parser.error("; ".join(problems))
    require_writable(parser, options.json)
    legs = [leg for leg in LEGS if leg.name in options.legs]
    try:
        options.server_args = shlex.split(options.server_args)
    except ValueError as error:
        parser.error(f"--server-args {options.server_args!r}: {error}")
    if without_secrets(options.server_args) != options.server_args:
        parser.error("--server-args has a secret, which report and logs would keep; leave it out")
    try:
        if options.out is not None:
            with naming("--out", options.out):
                options.out.mkdir(parents=True, exist_ok=True)
        options.legs = legs if options.model is None else [of_model(leg, options.model) for leg in legs]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return options


def facts(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "command": shlex.join(["python", "-m", "scripts.soak", *sys.argv[1:]]),
        "commit": commit(),
        **measured_on(),
        "model": options.model or "demo",
        "seed": options.seed,
        "broken_on_purpose": options.breakages,
    }


def show(record: dict[str, Any]) -> None:
    for name in ("answers_complete", "found_tokens", "server_counts", "transfers_compared", "outputs"):
        if name in record:
            print(f"  {name.replace('_', ' ')}: {record[name]}")
    for few in record.get("too_few", ()):
        print(f"  too few requests: {few}")
    for violation in record["violations"]:
        print(f"  VIOLATION: {violation}")


def main() -> int:
    options = parse()
    report: dict[str, Any] = {**facts(options), "legs": []}
    print(
        f"servers {', '.join(leg.name for leg in options.legs)}, one after the other, "
        f"{60 * options.minutes / len(options.legs):.0f} s of traffic on each, then longer to compare",
        flush=True,
    )
    try:
        with signals_interrupt():
            soak_all(options, report["legs"])
    except Interrupted as caught:
        report["stopped_by"] = str(caught)
    return finish(report, options)


def soak_all(options: argparse.Namespace, records: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        for leg in options.legs:
            try:
                record = soak(leg, options.out or Path(temporary), options)
            except (ServerFailed, ValueError) as error:  # the other servers are still soaked
                record = {"name": leg.name, "violations": [f"not soaked to the end: {error}"]}
            records.append(record)
            show(record)


def finish(report: dict[str, Any], options: argparse.Namespace) -> int:
    records, servers = report["legs"], len(options.legs)
    violations = report["violations"] = sum(len(record["violations"]) for record in records)
    if options.json:
        replace_file(options.json, json.dumps(report, indent=1) + "\n")
    unnoticed = [one["name"] for one in records if options.breakages and not one["violations"]]
    if unnoticed:
        print(f"DAMAGE NOT NOTICED on {', '.join(unnoticed)}: {', '.join(options.breakages)}")
    idle = [record["name"] for record in records if record.get("too_few")]
    if idle:
        print(
            f"TOO FEW REQUESTS to mean anything on {', '.join(idle)}: give each server a minute of traffic "
            f"(--minutes {max(servers, 2 * options.minutes):g}), or take an idle machine"
        )
    if "stopped_by" in report:
        print(f"stopped by {report['stopped_by']}; {len(records)} of {servers} servers were soaked")
    print(f"violations: {violations}; again: {report['command']}")
    if "stopped_by" in report:
        return 128 + signal.Signals[report["stopped_by"]]
    if violations:
        return 1
    return MEANS_NOTHING if idle or unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
