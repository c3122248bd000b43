"""`sgl-kvpool plan`: capacity of each layout on a given GPU, before a server is started.

A process of its own imports SGLang, describes a Hopper GPU of the requested size, and lets SGLang's rules and
ours make the decisions of a server's start: arguments, attention, cache size. Sizes on the device come from
SGLang's own pool configurator; `planned.py` computes sizes of a host tier.
"""

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from sgl_kvpool import env
from sgl_kvpool.commands.arguments import add_server_arguments, given, naming, number, whole, without_secrets
from sgl_kvpool.commands.named_model import find_model
from sgl_kvpool.commands.plan import report
from sgl_kvpool.commands.plan.plannable import check_sizes
from sgl_kvpool.commands.plan.planned import CONTEXT_TOKENS, RANKS, Candidate, Plan
from sgl_kvpool.commands.processes.progress import progress
from sgl_kvpool.commands.processes.worker import Worker, WorkerEnded
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.transfer.host_options import NARROWEST_HOST_LAYOUT

#: Memory of CUDA and NCCL on a GPU before the weights are loaded. SGLang's logs of DeepSeek-V3 on 8 GPUs say
#: "Load weight begin. avail mem" 137.3 to 137.6 on H200s of 140.4 (pull request 11716, issue 6017), and 77.8
#: on H100s of 79.6 (pull request 3888).
TAKEN_GIB = 3.0
_MODEL, _TP = ("--model-path", "--model"), ("--tp-size", "--tp", "--tensor-parallel-size")
#: Server arguments that this command sets itself, and those that it sets with --host-gb; --hicache-size
#: replaces --hicache-ratio.
_OURS = (*_MODEL, *_TP, "--device", "--kv-cache-layout", "--kv-host-layout")
_HOST = ("--hicache-size", "--hicache-ratio")
#: The same with --by-ranks.
_RANKS = (
    *("--attn-dp-size", "--dp-size", "--data-parallel-size", "--enable-dp-attention"),
    *("--dcp-size", "--decode-context-parallel-size"),
)
#: Server arguments that this command passes on, with their other names in SGLang.
_PASSED_ON = {
    "--pp-size": "--pipeline-parallel-size",
    "--dcp-size": "--decode-context-parallel-size",
    "--max-total-tokens": "",
}
#: Time limit of an answer of SGLang, which may import code of the checkpoint, in seconds.
_ANSWER_S = 3600.0
#: Last words of the programs that take server arguments.
_PROGRAMS = (("sglang", "serve"), ("-m", "sglang.launch_server"))

#: Argument that lets SGLang run code of checkpoints, and the one with the draft's checkpoint, which it reads
#: besides the model's.
_TRUST = "--trust-remote-code"
_DRAFT = ("--speculative-draft-model-path", "--speculative-draft-model")


class NoAnswer(RuntimeError):
    """A server could not be sized, or the process has not answered; the message has its last output."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        required=True,
        metavar="PATH_OR_CONFIG",
        help="a checkpoint's folder, a config.json alone, or owner/name on Hugging Face",
    )
    parser.add_argument(
        "--gpu-gb",
        # nvidia-smi shows MiB: an H100 has 81559.
        type=partial(number, what="the memory of one GPU in GiB (MiB divided by 1024)", limit=1000),
        required=True,
        metavar="N",
        help="memory of one GPU as nvidia-smi shows it, in GiB: H100 79.6, H200 140.4",
    )
    parser.add_argument("--tp", type=whole, metavar="N", help="ranks of tensor parallelism (1)")
    for name, what in zip(
        _PASSED_ON,
        ("stages of a pipeline", "ranks that keep parts of the tokens", "limit of the tokens"),
        strict=True,
    ):
        parser.add_argument(name, type=whole, metavar="N", help=f"{what}, as in sglang serve")
    parser.add_argument(
        "--host-gb",
        type=partial(number, what="memory of one node in GB", limit=1e5),
        metavar="N",
        help="memory for the host tier of a node, for all its ranks together, in GB (1e9 bytes)",
    )
    parser.add_argument(
        "--context",
        type=whole,
        metavar="N",
        help=f"tokens of a request, prompt and answer (the model's context, {CONTEXT_TOKENS} at most)",
    )
    parser.add_argument(
        "--weights-gb",
        type=partial(number, what="memory in GiB", limit=1e5, least=0),
        metavar="N",
        help="GiB of all weights, including a draft's (size of the folders' safetensors files; else 0)",
    )
    parser.add_argument(
        "--taken-gb",
        type=partial(number, what="memory in GiB", limit=1e5, least=0),
        default=TAKEN_GIB,
        metavar="N",
        help=f"memory of a GPU in GiB that is in use before the weights are loaded ({TAKEN_GIB:g})",
    )
    parser.add_argument(
        "--by-ranks",
        action="store_true",
        help="plan each layout with tensor parallelism, DP attention and decode context parallelism (DCP)",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    add_server_arguments(parser, ", or a whole command, whose model is not used")


def run(arguments: argparse.Namespace) -> int:
    """Plan and print; returns 1 if none of our layouts can be served with these arguments.

    ValueError for a model that does not exist or an invalid argument; OSError and NoAnswer as `ask`.
    """
    with naming("--model", arguments.model):
        model = find_model(arguments.model)
    if model.config is not None:
        check_sizes(json.loads(model.config))
    _read_server_arguments(arguments)
    _check(arguments)
    weights_gib = arguments.weights_gb if arguments.weights_gb is not None else model.weights_gib
    machine = {
        "gpu_gib": arguments.gpu_gb,
        "gpu_count": max(arguments.tp, 8),  # SGLang checks the GPU count; a node has eight
        "taken_gib": arguments.taken_gb,
        "weights_gib": weights_gib or 0.0,
        "drafts_included": arguments.weights_gb is not None,
    }
    candidates = _candidates(arguments.host_gb is not None, arguments.by_ranks)
    with contextlib.ExitStack() as stack:
        trusted = given(arguments.server_arguments, (_TRUST,)) is not None
        path = stack.enter_context(model.sglang_path(trusted))
        others = list(_drafts_here(arguments.server_arguments, model.named, path, stack))
        # Any size of the host tier: it does not affect the device, and the size that fits is computed later.
        any_gb = None if arguments.host_gb is None else 1
        words = [one.arguments(arguments.tp, others, any_gb) for one in candidates]
        servers = [{"model_path": path, "arguments": each} for each in words]
        print(f"asking SGLang about {len(servers)} servers; a minute ...", file=sys.stderr, flush=True)
        answers = ask(machine, servers)
    plan = Plan.of(
        model=model.launch_path,
        machine=machine,
        weights_known=weights_gib is not None,
        tp_size=arguments.tp,
        host_gb=arguments.host_gb,
        context_tokens=arguments.context,
        servers=list(zip(candidates, answers, strict=True)),
        others=without_secrets(arguments.server_arguments),
    )
    print(json.dumps(asdict(plan), indent=1) if arguments.json else report.text(plan))
    return 0 if any(server.tokens for server in plan.servers if server.layout is not None) else 1


def ask(machine: dict[str, Any], servers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Size servers in a process that imports SGLang.

    Returns results of `sizing.size_server`, or `refused` with the reason; `added` are the arguments that a
    refusal named and with which the server was sized. OSError if SGLang cannot read the
    model or another file of the arguments, or config.json lacks a size.
    """
    # The process must see no GPU; and it must have a single thread, because it forks.
    alone = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "sgl_kvpool.commands.plan.child"]
    answers: list[dict[str, Any]] = []
    with progress("asking SGLang") as reached, tempfile.TemporaryFile("w+", errors="replace") as log:
        try:
            with Worker(command, {**env.of_children(), **alone}, log) as worker:
                reached("importing it")
                worker.hello(_ANSWER_S)
                for done, server in enumerate(servers):
                    reached(f"{done} of {len(servers)} servers")
                    answers.append(worker.run({"machine": machine, **server}, _ANSWER_S)["value"])
                    if "unreadable" in answers[-1]:  # for the other servers too
                        raise OSError(answers[-1]["unreadable"])
                    if "failed" in answers[-1]:
                        raise WorkerEnded(answers[-1]["failed"])
        except WorkerEnded as ended:
            log.seek(0)
            last = "\n".join(log.read().splitlines()[-15:])
            raise NoAnswer(f"SGLang was not asked to the end: {ended}. Last lines:\n{last}") from None
    return answers


def _drafts_here(words: Sequence[str], model: str, path: str, stack: contextlib.ExitStack) -> Iterator[str]:
    """Server arguments in which a folder replaces the draft's name on Hugging Face; see `sglang_path`."""
    before, code = "", given(words, (_TRUST,)) is not None
    for word in words:
        name, equals, value = word.partition("=")
        flag, draft = (name, value) if equals else (before, word)
        if flag in _DRAFT and not Path(draft).exists():
            try:
                folder = path if draft == model else stack.enter_context(find_model(draft).sglang_path(code))
            except ValueError as error:
                raise ValueError(f"{flag}: {error}") from None
            yield f"{name}={folder}" if equals else folder
        else:
            yield word
        before = word


def _candidates(with_host: bool, by_ranks: bool) -> list[Candidate]:
    layouts = [layout.value for layout in MLAKVCacheLayout]
    found = [Candidate(None), *(Candidate(layout) for layout in layouts)]
    if with_host:
        narrowest = NARROWEST_HOST_LAYOUT
        found += [Candidate(layout, narrowest) for layout in layouts if layout != narrowest]
    return [replace(one, ranks=name) for one in found for name in RANKS] if by_ranks else found


def _read_server_arguments(arguments: argparse.Namespace) -> None:
    """Take program, model and --tp-size out of the words after --, and put `_PASSED_ON` before them."""
    words = list(arguments.server_arguments)
    first = next((place for place, word in enumerate(words) if word.startswith("--")), len(words))
    program = words[:first]
    ending = tuple(word.rpartition("/")[2] for word in program[-2:])
    if program and (ending not in _PROGRAMS or any("=" in word for word in program)):
        raise ValueError(
            f"{' '.join(word.partition('=')[0] for word in program)!r} is no program that serves; begin with "
            "its arguments, with sglang serve or python -m sglang.launch_server, and set variables before it"
        )
    found, rest = None, []
    remaining = iter(words[first:])
    for word in remaining:
        name, equals, value = word.partition("=")
        if name not in (*_MODEL, *_TP):
            rest.append(word)
            continue
        value = value if equals else next(remaining, "")
        if not value:
            raise ValueError(f"{name} after -- has no value; give one, or leave {name} out")
        if name in _TP:
            try:
                found = whole(value)
            except argparse.ArgumentTypeError as error:
                raise ValueError(f"{name}: {error}") from None
    if None not in (found, arguments.tp) and found != arguments.tp:
        raise ValueError(f"--tp {arguments.tp} is {found} after --; leave out one of the two")
    arguments.tp = arguments.tp or found or 1
    passed_on = []
    for name, other in _PASSED_ON.items():
        value = getattr(arguments, name[2:].replace("-", "_"))
        if value is None:
            continue
        if given(rest, (name, other)):
            raise ValueError(f"{name} {value} is given after -- too; leave out one of the two")
        passed_on += [name, str(value)]
    arguments.server_arguments = [*passed_on, *rest]


def _check(arguments: argparse.Namespace) -> None:
    ours = _OURS if arguments.host_gb is None else (*_OURS, *_HOST)
    ours = (*ours, *_RANKS) if arguments.by_ranks else ours
    if name := given(arguments.server_arguments, ours):
        raise ValueError(
            f"{name} is set by this command; use --model, --tp, --host-gb and --by-ranks, and leave it out "
            "after --, and out of a file that --config names"
        )
    if arguments.taken_gb >= arguments.gpu_gb:
        raise ValueError(
            f"--taken-gb {arguments.taken_gb:g} leaves no memory on a GPU of {arguments.gpu_gb:g} GiB"
        )
