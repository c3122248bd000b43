#!/usr/bin/env python3
"""Release check in one command: checks, servers and timings on a Hopper GPU.

    python scripts/h100_regression.py --first-light           nine minutes on a GPU: which kernels are correct
    python scripts/h100_regression.py --core                  steps that do not need SGLang
    python scripts/h100_regression.py                         also servers of small random models
    python scripts/h100_regression.py --compare old.jsonl     also exit 1 after a regression
    python scripts/h100_regression.py --compare old.jsonl --with new.jsonl

Every step has a time limit and a log, and a step that fails does not stop the others. Exit status: 0 if
nothing failed, 1 if a step failed, no step was ok, or a comparison found a regression, 2 for wrong arguments
or if nothing could be compared, 3 if steps timed out and nothing was wrong, 128 plus the signal's number
after an interruption. The same command with the same --out continues a run. Without a GPU a reduced form runs
on the CPU: docs/benchmarks.md. This program has never been run on a GPU.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# sys.path is extended before the imports.
from scripts.kit.environment import Machine, facts_of, find_machine
from scripts.kit.outputs import positive
from scripts.kit.records import Run, read_run
from scripts.kit.runner import Step, in_words
from scripts.servers.regressions import compare
from scripts.servers.request import Options
from scripts.servers.results import Results
from scripts.servers.shapes import LAYOUTS
from scripts.servers.steps import FIRST_LIGHT_MINUTES, all_steps, choose, first_light_steps
from sgl_kvpool.attention.decode_config import HOPPER
from sgl_kvpool.commands.arguments import add_layouts, naming


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        usage="%(prog)s [options]; --help lists them",
    )  # fmt: skip
    what = made.add_argument_group("what is run")
    what.add_argument("--first-light", action="store_true", help="kernels and tile table; nine minutes")
    what.add_argument("--core", action="store_true", help="only steps that do not need SGLang; no servers")
    what.add_argument("--quick", action="store_true", help="benchmarks in their short form")
    what.add_argument("--thorough", action="store_true", help="also the server tests of tests/gpu (hours)")
    what.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda if torch sees a GPU")
    add_layouts(what, " to serve (all)")
    what.add_argument("--only", action="append", default=[], help="steps by name, or a pattern (serve-v3-*)")
    what.add_argument("--list", action="store_true", help="show the steps and run nothing")
    run = made.add_argument_group("how")
    run.add_argument("--out", type=Path, help="folder of results (DATE or first-light in regression-results)")
    run.add_argument("--minutes", type=positive, help="time limit of all steps together")
    run.add_argument(
        "--time-limit-scale", type=positive, default=1.0,
        help="factor of the time limits of steps and of server starts (1)",
    )  # fmt: skip
    other = made.add_argument_group("two runs")
    other.add_argument("--compare", type=Path, metavar="OLD.jsonl", help="an older results.jsonl")
    other.add_argument(
        "--with", type=Path, dest="beside", metavar="NEW.jsonl", help="compare this file and run nothing"
    )
    return made


def options_of(arguments: argparse.Namespace, machine: Machine, out: Path) -> Options:
    """Options of the steps.

    ValueError: if arguments contradict each other, or name missing files.
    """
    if arguments.device == "cuda" and not machine.gpus:
        raise ValueError("--device cuda: torch sees no GPU; leave it out for the reduced form")
    if arguments.first_light:
        others = [name for name in ("core", "quick", "thorough") if getattr(arguments, name)]
        if others:
            raise ValueError(f"--first-light has steps of its own; leave out --{others[0]}")
        if not machine.gpus and arguments.device != "cpu":
            raise ValueError("--first-light: torch sees no GPU; --device cpu rehearses it without a GPU")
    taken = ("core", "quick", "thorough", "time_limit_scale")
    return Options(
        **{name: getattr(arguments, name) for name in taken},
        layouts=tuple(name for name in LAYOUTS if name in (arguments.layouts or LAYOUTS)),
        on_gpu=bool(machine.gpus) and arguments.device != "cpu",
        models=str(out / "models"),
    )


def say(text: str) -> None:
    """Print; a reader of standard output that has ended, such as `head`, does not end the run."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def compared(old: Run, new: Run) -> int:
    found = compare(old, new)
    say("\n" + "\n".join(found.lines()) + "\n")
    return found.status


def main(argv: Sequence[str] | None = None) -> int:
    made = parser()
    arguments = made.parse_args(argv)
    try:
        with naming("--compare", arguments.compare):
            old = read_run(arguments.compare) if arguments.compare is not None else None
        if arguments.beside is not None:
            if old is None:
                made.error("--with NEW.jsonl needs --compare OLD.jsonl")
            with naming("--with", arguments.beside):
                new = read_run(arguments.beside)
            return compared(old, new)
        name = "first-light" if arguments.first_light else datetime.now().strftime("%Y%m%d-%H%M%S")
        out = (arguments.out or Path("regression-results") / name).resolve()
        machine = find_machine()
        options = options_of(arguments, machine, out)
        if arguments.first_light:
            every = first_light_steps(on_gpu=options.on_gpu)
        else:
            every = choose(all_steps(machine, options), arguments.only)
        steps = choose(every, arguments.only)
        if arguments.list:
            for step in steps:
                reason = machine.missing(step.needs)
                tail = f"  -- skipped: {reason}" if reason else ""
                print(f"{step.name:34} {in_words(step.expected_s):>10}  {step.what}{tail}")
            print(in_all(steps, machine))
            return 0
        facts = facts_of(machine, list(sys.argv[1:] if argv is None else argv))
        if not arguments.first_light:
            facts["options"] = {name: getattr(options, name) for name in ("layouts", "core", "quick")}
        with naming("--out", out):
            results = Results(out, "first_light" if arguments.first_light else "report", facts, every)
    except (ValueError, RuntimeError) as error:
        made.error(str(error))
    status = execute(arguments, options, machine, steps, results)
    if old is not None:
        status = max(status, compared(old, results.run_of))
    return status


def in_all(steps: Sequence[Step], machine: Machine) -> str:
    """Text with the total duration of the steps that are not skipped from the start."""
    ours = [step for step in steps if not machine.missing(step.needs)]
    about = in_words(sum(step.expected_s for step in ours))
    return f"{len(ours)} steps, about {about} in all; --minutes ends a run earlier"


def execute(
    arguments: argparse.Namespace, options: Options, machine: Machine, steps: Sequence[Step], results: Results
) -> int:
    """Start or continue a run; returns the exit status."""
    scale, facts = arguments.time_limit_scale, results.run_of.facts
    left = [step for step in steps if results.lacks(step.name)]
    minutes = arguments.minutes or (FIRST_LIGHT_MINUTES * scale if arguments.first_light else None)
    where = f"{facts['gpu_count']} x {facts['gpu']}" if options.on_gpu else f"CPU: {facts['cpu']}"
    say(f"{where}; results: {results.out}\n{in_all(left, machine)}\n")
    if not options.on_gpu:
        say("no GPU: the reduced form; its times say nothing about a GPU\n")
    elif tuple(facts["capability"]) != HOPPER:
        say(f"compute capability {facts['capability']}; the kernels are for Hopper, {HOPPER}\n")
    status = results.run(left, machine, time_limit_scale=scale, minutes=minutes, say=say)
    say(f"\n{results.text()}\nresults: {results.journal}\nexit status {status}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
