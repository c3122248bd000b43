#!/usr/bin/env python3
"""Drive SGLang servers with concurrent clients, aborts and cache pressure, and check their state afterwards.

    python -m scripts.soak                       # 5 minutes of traffic, all layouts, demo's model on the CPU
    python -m scripts.soak --minutes 1 --layouts fp4
    python -m scripts.soak --model PATH          # a GPU; not run yet

docs/benchmarks.md lists the checks. Exits with 1 after a violation, with 2 for wrong arguments, with 3
without a violation if a server got too few requests for its checks to mean anything, or --break damaged one
and no check noticed. Ctrl-C, SIGTERM and SIGHUP end the server too; the status is then 128 plus the signal's
number.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scripts.kit.outputs import commit, replace_file, require_writable
from scripts.kit.runner import Interrupted, signals_interrupt
from scripts.soak.leg import SoakOptions, soak
from scripts.soak.servers import LEGS, Leg, has_sparse_attention
from sgl_kvpool import __version__
from sgl_kvpool.demo.server import ServerFailed
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.sglang_plugin.options import ARRANGEMENT, HOST_LAYOUT, environment_problems

SCHEMA = 1
#: Exit status of a soak without violations whose checks mean nothing.
MEANS_NOTHING = 3
#: Names in `in_server.breakages`, which is not imported here because it imports torch.
BREAKAGES = ("load-byte", "load-order", "host-overwrite", "device-leak", "host-leak")
#: Seconds that a server of the demo's model takes on two idle cores besides its traffic: for its start and
#: the start of the cold run; for checks and cold run, per second of traffic; and the maximum for checks and
#: cold run, since a cold run sends every prompt once.
_STARTS_S, _CHECKS_PER_S, _CHECKS_AT_MOST_S = 90, 2.3, 180


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    layouts = [layout.value for layout in MLAKVCacheLayout]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--minutes",
        type=float,
        default=5.0,
        help="minutes of traffic over all servers (5), without starts and checks",
    )
    parser.add_argument(
        "--layouts",
        nargs="+",
        choices=[*layouts, "all"],
        default=["all"],
        metavar="LAYOUT",
        help=f"servers with these layouts on the device, of {', '.join(layouts)} (all)",
    )
    legs = [leg.name for leg in LEGS]
    parser.add_argument(
        "--legs", nargs="+", choices=legs, metavar="NAME", help=f"servers by name, of {', '.join(legs)} (all)"
    )
    parser.add_argument(
        "--arrangement", choices=ARRANGEMENT.choices, help="arrangement of all servers, instead of their own"
    )
    parser.add_argument(
        "--host-layout", choices=HOST_LAYOUT.choices, help="host layout of all servers, instead of their own"
    )
    parser.add_argument("--clients", type=int, default=6, help="number of concurrent clients (6)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random requests (0)")
    parser.add_argument("--model", help="checkpoint to be served on a GPU instead of the demo's on the CPU")
    parser.add_argument("--device-tokens", type=int, help="pool size (2048; 8192 with --model)")
    parser.add_argument(
        "--tie-tolerance",
        type=float,
        help="largest log-probability difference to a cold run (0.05; --model: 0.5; narrower host: 3)",
    )
    parser.add_argument("--server-args", default="", help="more arguments of all servers, in one string")
    parser.add_argument("--tier-args", default="", help="more arguments of servers with a host tier")
    parser.add_argument(
        "--break", dest="breakages", nargs="+", choices=BREAKAGES, default=[], metavar="DAMAGE",
        help=f"damage the servers on purpose, with {', '.join(BREAKAGES)} (none)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="write the report to this file")
    parser.add_argument("--out", type=Path, help="keep logs in this folder")
    options = parser.parse_args(arguments)
    if not 0 < options.minutes < math.inf:
        parser.error(f"--minutes {options.minutes:g} is not above 0 and finite")
    if options.clients < 1:
        parser.error(f"--clients {options.clients} is below 1")
    if options.device_tokens is not None and options.device_tokens < 1024:
        parser.error(f"--device-tokens {options.device_tokens} is below 1024, too few for two requests")
    if options.tie_tolerance is not None and not 0 <= options.tie_tolerance < math.inf:
        parser.error(f"--tie-tolerance {options.tie_tolerance} must be 0 or more")
    for name in ("server_args", "tier_args"):
        try:
            setattr(options, name, shlex.split(getattr(options, name)))
        except ValueError as error:
            parser.error(f"--{name.replace('_', '-')} is not a list of words: {error}")
    if problems := environment_problems():
        parser.error("; ".join(problems))
    require_writable(parser, options.json)
    if options.out is not None:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--out {options.out} cannot be made ({error.strerror}); name another folder")
    return options


def chosen(options: argparse.Namespace) -> list[Leg]:
    """Servers of this soak."""
    legs = [
        leg
        for leg in LEGS
        if (options.legs is None or leg.name in options.legs)
        and ("all" in options.layouts or leg.layout in options.layouts)
    ]
    tokens = options.device_tokens or (2048 if options.model is None else 8192)
    legs = [replace(leg, model=options.model, device_tokens=tokens) for leg in legs]
    if options.model is not None and has_sparse_attention(options.model):
        legs = [leg.for_sparse_attention() for leg in legs]
    return [leg.with_options(options.arrangement, options.host_layout) for leg in legs]


def _repeated(arguments: list[str]) -> list[str]:
    """Arguments for a repetition, without the output paths."""
    kept, skip = [], False
    for argument in arguments:
        is_path = argument.partition("=")[0] in ("--json", "--out")
        if not skip and not is_path:
            kept.append(argument)
        skip = is_path and "=" not in argument
    return kept


def facts(options: argparse.Namespace) -> dict[str, Any]:
    """Versions, machine and options of this run."""
    return {
        "schema": SCHEMA,
        "script": "scripts.soak",
        "command": shlex.join(["python", "-m", "scripts.soak", *_repeated(sys.argv[1:])]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "versions": {**{name: version(name) for name in ("sglang", "torch")}, "sgl-kvpool": __version__},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "model": options.model or "demo",
        "clients": options.clients,
        "seed": options.seed,
        "broken_on_purpose": options.breakages,
    }


def show(record: dict[str, Any]) -> None:
    """A few lines about one server."""
    if record.get("requests"):
        outputs, counts = record["outputs"], record.get("server_counts", {})
        print(f"  {record['answers_complete']} answers, {record['answers_given_up']} aborted requests")
        print(f"  cached tokens by tier: {record['found_tokens']}; counters: {counts}")
        print(
            f"  {record['censuses']} censuses, {record['pages_in_both_tiers_compared']} pages compared that "
            f"were in both tiers; transfers: {record['transfers_compared']}"
        )
        print(f"  resident MB of the scheduler: {record['resident_megabytes']}")
        if outputs:
            print(
                f"  {outputs['outputs']} outputs: {outputs['same_outputs']} equal to the cold run's, "
                f"{outputs['near_ties']} "
                f"near ties within {outputs['tie_tolerance']}, {outputs['mismatches']['count']} others; "
                f"{outputs['same_bits']} of "
                f"{outputs['compared_tokens']} log-probabilities are the same bits, the others up to "
                f"{outputs['largest_difference']:.4f} apart"
            )
    if record.get("too_few"):
        print(f"  TOO FEW REQUESTS to mean anything: {'; '.join(record['too_few'])}")
    for violation in record["violations"]:
        print(f"  VIOLATION: {violation}")


def announcement(legs: Sequence[Leg], minutes: float) -> str:
    """Text with the planned servers and the estimated time."""
    count = "1 server" if len(legs) == 1 else f"{len(legs)} servers, one after the other"
    each = "it is" if len(legs) == 1 else "each is"
    traffic_s = 60 * minutes / len(legs)
    on_each = "" if len(legs) == 1 else " on each"
    text = (
        f"{count} ({', '.join(leg.name for leg in legs)}), {traffic_s:.0f} s of traffic{on_each}; then "
        f"{each} started again without caches, to compare"
    )
    if legs[0].model is not None:
        return f"{text}. The time of starts and checks comes on top; it depends on the model"
    seconds = len(legs) * (_STARTS_S + traffic_s + min(_CHECKS_PER_S * traffic_s, _CHECKS_AT_MOST_S))
    return f"{text}. About {math.ceil(seconds / 60)} minutes in all on two idle cores"


def main() -> int:
    """Soak, print, write; returns the exit status."""
    options = parse()
    try:
        legs = chosen(options)
    except ValueError as error:
        print(f"--model: {error}", file=sys.stderr)
        return 2
    if not legs:
        print("no server fits --legs and --layouts", file=sys.stderr)
        return 2
    report: dict[str, Any] = {**facts(options), "legs": []}
    print(announcement(legs, options.minutes), flush=True)
    try:
        with signals_interrupt():
            soak_all(legs, options, report["legs"])
    except Interrupted as caught:
        report["stopped_by"] = str(caught)
    return finish(report, options, len(legs))


def soak_all(legs: Sequence[Leg], options: argparse.Namespace, records: list[dict[str, Any]]) -> None:
    """Soak the servers; appends a record of each when it has ended."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.out or Path(temporary)
        for leg in legs:
            try:
                soak_options = SoakOptions(
                    seconds=60 * options.minutes / len(legs),
                    clients=options.clients,
                    seed=options.seed,
                    breakages=options.breakages,
                    server_args=options.server_args,
                    tier_args=options.tier_args,
                    tie_tolerance=options.tie_tolerance,
                )
                record = soak(leg, folder, soak_options, say=lambda text: print(text, flush=True))
            except ServerFailed as error:
                record = {"name": leg.name, "violations": [f"a server did not start: {error}"]}
            except ValueError as error:  # the other servers are still soaked
                record = {"name": leg.name, "violations": [f"not soaked to the end: {error}"]}
            records.append(record)
            show(record)
            left = len(legs) - len(records)
            if left:
                minutes = (time.monotonic() - began) / len(records) * left / 60
                print(f"about {math.ceil(minutes)} minutes left", flush=True)


def finish(report: dict[str, Any], options: argparse.Namespace, servers: int) -> int:
    """Write the report and print the last lines; returns the exit status."""
    violations = sum(len(record["violations"]) for record in report["legs"])
    report["violations"] = violations
    if options.json:
        replace_file(options.json, json.dumps(report, indent=1) + "\n")
    unnoticed = [one["name"] for one in report["legs"] if options.breakages and not one["violations"]]
    if unnoticed:
        print(f"DAMAGE NOT NOTICED on {', '.join(unnoticed)}: {', '.join(options.breakages)}")
    idle = [record["name"] for record in report["legs"] if record.get("too_few")]
    if idle:
        print(
            f"TOO FEW REQUESTS to mean anything on {', '.join(idle)}: give each server a minute of traffic "
            f"(--minutes {max(servers, 2 * options.minutes):g}), or take an idle machine"
        )
    if "stopped_by" in report:
        print(f"stopped by {report['stopped_by']}; {len(report['legs'])} of {servers} servers were soaked")
    print(f"{violations} violation{'' if violations == 1 else 's'}; again: {report['command']}")
    if "stopped_by" in report:
        return 128 + signal.Signals[report["stopped_by"]]
    if violations:
        return 1
    return MEANS_NOTHING if idle or unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
