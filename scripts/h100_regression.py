#!/usr/bin/env python3
"""Release check in one command: checks, servers and timings on a Hopper GPU.

    python scripts/h100_regression.py --first-light           nine minutes on a GPU: which kernels are correct
    python scripts/h100_regression.py --core                  steps that do not need SGLang
    python scripts/h100_regression.py                         also servers of small random models
    python scripts/h100_regression.py --model PATH --tp 8     servers of a real checkpoint instead
    python scripts/h100_regression.py --compare old.jsonl     also exit 1 after a regression
    python scripts/h100_regression.py --compare old.jsonl --with new.jsonl

Every step has a time limit and a log, and a step that fails does not stop the others. Exit status: 0 if
nothing failed, 1 if a step failed, no step was ok, or a comparison found a regression, 2 for wrong arguments
or if nothing could be compared, 128 plus the signal's number after an interruption. Without a GPU a reduced
form runs on the CPU and lists what it skipped. docs/benchmarks.md has details.

This program has never been run on a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# sys.path is extended before the imports.
from scripts.kit.arguments import names
from scripts.kit.environment import Machine, facts_of, find_machine
from scripts.kit.records import Run, read_run
from scripts.kit.runner import Step, in_words
from scripts.servers.compare import compare
from scripts.servers.durations import in_all, with_durations
from scripts.servers.first_light import MINUTES, FirstLight, first_light_steps
from scripts.servers.options import Options
from scripts.servers.results import Results
from scripts.servers.shapes import ARRANGEMENTS, LAYOUTS
from scripts.servers.steps import all_steps, choose

HOPPER = [9, 0]


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        usage="%(prog)s [options]; --help lists them",
    )  # fmt: skip
    what = made.add_argument_group("what is run")
    what.add_argument(
        "--first-light", action="store_true",
        help="correctness of kernels and the tile table to commit; nine minutes; continues the run in --out",
    )  # fmt: skip
    what.add_argument("--core", action="store_true", help="only steps that do not need SGLang; no servers")
    what.add_argument("--quick", action="store_true", help="benchmarks in their short form")
    what.add_argument("--thorough", action="store_true", help="also the server tests of tests/gpu (hours)")
    what.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda if torch sees a GPU")
    what.add_argument(
        "--layouts", type=names(LAYOUTS), default=LAYOUTS, help="layouts to serve, separated by commas"
    )
    what.add_argument(
        "--arrangements", type=names(ARRANGEMENTS), help="arrangements to serve, separated by commas"
    )
    what.add_argument("--only", action="append", default=[], help="steps by name, or a pattern (serve-v3-*)")
    what.add_argument("--list", action="store_true", help="show the steps and run nothing")
    model = made.add_argument_group("a real checkpoint")
    model.add_argument("--model", help="folder of the checkpoint; served instead of the random models")
    model.add_argument("--tp", type=int, default=1, help="ranks that serve it (1)")
    model.add_argument("--server-args", default="", help="more arguments of its servers, in one string")
    model.add_argument("--server-env", type=_assignment, action="append", default=[], metavar="NAME=VALUE")
    model.add_argument("--gsm8k-data", type=Path, help="test.jsonl of GSM8K; else SGLang downloads it")
    model.add_argument("--gsm8k-questions", type=int, default=500)
    model.add_argument("--retrieval-characters", default="16000,64000,200000", help="text lengths")
    run = made.add_argument_group("how")
    run.add_argument("--out", type=Path, help="folder of results (DATE or first-light in regression-results)")
    run.add_argument("--minutes", type=_positive, help="time limit of all steps together")
    run.add_argument(
        "--time-limit-scale", type=_positive, default=1.0,
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
    if arguments.core and arguments.model:
        raise ValueError("--core starts no servers; leave out one of --core and --model")
    if arguments.first_light:
        others = [name for name in ("core", "quick", "thorough", "model") if getattr(arguments, name)]
        if others:
            raise ValueError(f"--first-light has steps of its own; leave out --{others[0]}")
        if not machine.gpus and arguments.device != "cpu":
            raise ValueError("--first-light: torch sees no GPU; --device cpu rehearses it without a GPU")
    if arguments.gsm8k_questions < 1:
        raise ValueError(f"--gsm8k-questions {arguments.gsm8k_questions}: give 1 or more")
    if arguments.tp < 1:
        raise ValueError(f"--tp {arguments.tp}: give the number of ranks")
    if arguments.gsm8k_data is not None and not arguments.gsm8k_data.is_file():
        raise ValueError(f"--gsm8k-data {arguments.gsm8k_data}: no such file")
    if arguments.model is None:
        for name in ("gsm8k_data", "server_args"):
            if getattr(arguments, name):
                raise ValueError(f"--{name.replace('_', '-')} needs --model")
        if arguments.tp != 1:
            raise ValueError(
                f"--tp {arguments.tp} needs --model; servers of random models with two ranks: --only 'tp2-*'"
            )
    try:
        lengths = tuple(int(text) for text in arguments.retrieval_characters.split(","))
    except ValueError:
        lengths = ()
    if not lengths or min(lengths) < 1:
        raise ValueError(f"--retrieval-characters {arguments.retrieval_characters}: give numbers above 0")
    return Options(
        core=arguments.core,
        quick=arguments.quick,
        thorough=arguments.thorough,
        on_gpu=bool(machine.gpus) and arguments.device != "cpu",
        layouts=arguments.layouts,
        arrangements=arguments.arrangements or ARRANGEMENTS,
        arrangements_named=arguments.arrangements is not None,
        model=arguments.model,
        tp=arguments.tp,
        server_arguments=tuple(shlex.split(arguments.server_args)),
        server_environment=tuple(arguments.server_env),
        gsm8k_data=arguments.gsm8k_data and str(arguments.gsm8k_data.resolve()),
        gsm8k_questions=arguments.gsm8k_questions,
        retrieval_characters=lengths,
        models=str(out / "models"),
        time_limit_scale=arguments.time_limit_scale,
    )


def model_facts(path: str | None) -> dict[str, str] | None:
    """Facts that identify a checkpoint."""
    if path is None:
        return None
    config = (Path(path) / "config.json").read_bytes()
    return {"name": Path(path).resolve().name, "config_sha256": hashlib.sha256(config).hexdigest()}


def say(text: str) -> None:
    """Print; a reader of standard output that has ended, such as `head`, does not end the run."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def compared(old: Run, new: Run) -> int:
    """Compare two runs and print; returns the exit status."""
    found = compare(old, new)
    say("\n" + "\n".join(found.lines()) + "\n")
    return found.status


def main(argv: Sequence[str] | None = None) -> int:
    """Run the requested steps; returns the exit status."""
    made = parser()
    arguments = made.parse_args(argv)
    try:
        old = read_run(arguments.compare) if arguments.compare is not None else None
        if arguments.beside is not None:
            if old is None:
                made.error("--with NEW.jsonl needs --compare OLD.jsonl")
            return compared(old, read_run(arguments.beside))
        name = "first-light" if arguments.first_light else datetime.now().strftime("%Y%m%d-%H%M%S")
        out = (arguments.out or Path("regression-results") / name).resolve()
        machine = find_machine()
        options = options_of(arguments, machine, out)
        every = all_steps(machine, options)
        if arguments.first_light:
            every = first_light_steps(machine, on_gpu=options.on_gpu)
        steps = with_durations(choose(every, arguments.only), on_gpu=options.on_gpu)
    except (ValueError, OSError, RuntimeError) as error:
        made.error(str(error))
    if arguments.list:
        for step in steps:
            reason = step.without or machine.missing(step.needs)
            about = in_words(step.expected_s) if step.expected_s else ""
            print(f"{step.name:34} {about:>10}  {step.what}{f'  -- skipped: {reason}' if reason else ''}")
        print(in_all(possible(steps, machine), on_gpu=options.on_gpu))
        return 0
    words = list(sys.argv[1:] if argv is None else argv)
    status, run = execute(
        arguments, options, machine, steps, every if arguments.first_light else steps, out, words
    )
    if old is not None:
        status = max(status, compared(old, run))
    return status


def possible(steps: Sequence[Step], machine: Machine) -> list[Step]:
    """Steps that are not skipped from the start."""
    return [step for step in steps if not (step.without or machine.missing(step.needs))]


def execute(
    arguments: argparse.Namespace, options: Options, machine: Machine, steps: list, every: list, out: Path,
    argv: list[str],
) -> tuple[int, Run]:  # fmt: skip
    """Start or continue a run; returns the exit status and the results."""
    facts = facts_of(machine, argv)
    if not arguments.first_light:
        shown = {"layouts": options.layouts, "core": options.core, "quick": options.quick, "tp": options.tp}
        facts |= {"options": shown, "model": model_facts(options.model)}
    try:
        results = (FirstLight if arguments.first_light else Results)(out, facts, every)
    except OSError as error:
        parser().error(f"--out {out}: {error.strerror}")
    except ValueError as error:
        parser().error(str(error))
    left = [step for step in steps if results.lacks(step.name)]
    minutes = arguments.minutes or (MINUTES * arguments.time_limit_scale if arguments.first_light else None)
    where = f"{facts['gpu_count']} x {facts['gpu']}" if options.on_gpu else f"CPU: {facts['cpu']}"
    say(f"{where}; results: {out}\n{in_all(possible(left, machine), on_gpu=options.on_gpu)}\n")
    if options.on_gpu and facts["capability"] != HOPPER:
        say(f"compute capability {facts['capability']}; the kernels are for Hopper, {HOPPER}\n")
    if not options.on_gpu:
        say("no GPU: the reduced form; its times say nothing about a GPU\n")
    status = results.run(left, machine, time_limit_scale=arguments.time_limit_scale, minutes=minutes, say=say)
    say(f"\n{results.text()}\nresults: {results.journal}\nexit status {status}\n")
    return status, results.as_run


if __name__ == "__main__":
    sys.exit(main())
