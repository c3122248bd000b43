#!/usr/bin/env python3
"""Drive real servers with concurrent clients, aborts and cache pressure, and check what is left afterwards.

    python scripts/soak.py                       # 5 minutes of traffic, all layouts, demo's model on the CPU
    python scripts/soak.py --minutes 1 --layouts fp4
    python scripts/soak.py --model PATH          # a GPU; not run yet

docs/soak.md says what is checked. Exits with 1 if anything is not as it has to be.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import sys
import tempfile
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from soak_leg import soak
from soak_servers import LEGS, Leg, has_sparse_attention

from sgl_kvpool.arrangement import KVArrangement
from sgl_kvpool.bench.outputs import commit
from sgl_kvpool.demo.server import ServerFailed
from sgl_kvpool.host.labels import HOST_LAYOUTS
from sgl_kvpool.layout import MLAKVCacheLayout

SCHEMA = 1
ROOT = Path(__file__).resolve().parent.parent
#: Of `soak_in_server.breakages`, which cannot be imported without SGLang.
BREAKAGES = ("load-byte", "load-order", "host-overwrite", "device-leak", "host-leak")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    layouts = [layout.value for layout in MLAKVCacheLayout]
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="traffic, of all servers together")
    parser.add_argument("--layouts", nargs="+", choices=[*layouts, "all"], default=["all"])
    parser.add_argument("--legs", nargs="+", choices=[leg.name for leg in LEGS], help="servers by name")
    arrangements = [arrangement.value for arrangement in KVArrangement]
    parser.add_argument("--arrangement", choices=arrangements, help="instead of the servers' own")
    parser.add_argument("--host-layout", choices=HOST_LAYOUTS, help="instead of the servers' own")
    parser.add_argument("--clients", type=int, default=6, help="that send requests at the same time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="checkpoint to be served on a GPU instead of the demo's on the CPU")
    parser.add_argument("--device-tokens", type=int, help="pool size (default: 2048, on a GPU 8192)")
    parser.add_argument(
        "--tie-tolerance",
        type=float,
        help="how far from a cold run's log-probabilities may be; left out, 0.05, and 0.5 with --model or a "
        "narrower host",
    )
    parser.add_argument("--server-args", default="", help="more arguments of all servers, in one string")
    parser.add_argument("--tier-args", default="", help="more arguments of those with a host tier")
    parser.add_argument(
        "--break", dest="breakages", nargs="+", choices=BREAKAGES, default=[], help="damage on purpose"
    )
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--out", type=Path, help="keep logs here")
    options = parser.parse_args(arguments)
    if options.minutes <= 0 or options.clients < 1:
        parser.error(f"--minutes {options.minutes} and --clients {options.clients} have to be above 0")
    if options.device_tokens is not None and options.device_tokens < 1024:
        parser.error(f"--device-tokens {options.device_tokens} is below 1024, too few for two requests")
    if options.tie_tolerance is not None and not 0 <= options.tie_tolerance < math.inf:
        parser.error(f"--tie-tolerance {options.tie_tolerance} has to be 0 or more")
    return options


def chosen(options: argparse.Namespace) -> list[Leg]:
    """Servers to be soaked."""
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
    """Arguments that matter to a repetition: not where results went."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and argument not in ("--json", "--out"):
            kept.append(argument)
        skip = argument in ("--json", "--out")
    return kept


def facts(options: argparse.Namespace) -> dict[str, Any]:
    """What this was run with."""
    return {
        "schema": SCHEMA,
        "script": "scripts/soak.py",
        "command": shlex.join(["python", "scripts/soak.py", *_repeated(sys.argv[1:])]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "versions": {name: version(name) for name in ("sglang", "torch", "sgl-kvpool")},
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
        print(f"  {record['answers_complete']} answers, {record['answers_given_up']} given up")
        print(f"  found, in tokens: {record['found_tokens']}; moved: {counts}")
        print(
            f"  {record['censuses']} censuses, {record['pages_in_both_tiers_compared']} pages compared that "
            f"were in both tiers; transfers: {record['transfers_compared']}"
        )
        print(f"  resident MB of the scheduler: {record['resident_megabytes']}")
        if outputs:
            print(
                f"  {outputs['outputs']} outputs, {outputs['same_outputs']} as cold, {outputs['near_ties']} "
                f"near ties within {outputs['tie_tolerance']}, {outputs['mismatches']['count']} others; "
                f"{outputs['same_bits']} of "
                f"{outputs['compared_tokens']} log-probabilities are the same bits, the others up to "
                f"{outputs['largest_difference']:.4f} apart"
            )
    for violation in record["violations"]:
        print(f"  VIOLATION: {violation}")


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
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.touch()  # fails now rather than afterwards
    report = {**facts(options), "legs": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for leg in legs:
            try:
                record = soak(
                    leg,
                    folder,
                    seconds=60 * options.minutes / len(legs),
                    clients=options.clients,
                    seed=options.seed,
                    breakages=options.breakages,
                    server_args=shlex.split(options.server_args),
                    tier_args=shlex.split(options.tier_args),
                    tie_tolerance=options.tie_tolerance,
                    say=lambda text: print(text, flush=True),
                )
            except ServerFailed as error:
                record = {"name": leg.name, "violations": [f"a server did not start: {error}"]}
            except ValueError as error:  # the other servers are soaked all the same
                record = {"name": leg.name, "violations": [f"not soaked to the end: {error}"]}
            report["legs"].append(record)
            show(record)
    violations = sum(len(record["violations"]) for record in report["legs"])
    report["violations"] = violations
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{violations} violations; again: {report['command']}")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
