"""The command `sgl-kvpool`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sgl_kvpool import __version__
from sgl_kvpool.layout import MLAKVCacheLayout

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="sgl-kvpool", description="KV-cache layouts for MLA models in SGLang."
    )
    parser.add_argument("--version", action="version", version=f"sgl-kvpool {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    layouts = commands.add_parser("layouts", help="the bytes of a row in every layout")
    layouts.add_argument("--kv-lora-rank", type=int, default=512, help="latent values (512)")
    layouts.add_argument("--qk-rope-head-dim", type=int, default=64, help="rotary values (64)")
    layouts.set_defaults(run=_layouts)

    demo = commands.add_parser(
        "demo", help="start the real SGLang server once per layout and compare what it answers"
    )
    demo.add_argument(
        "--layouts",
        type=_layout_list,
        default=list(MLAKVCacheLayout),
        metavar="NAME[,NAME...]",
        help=f"which layouts, of {', '.join(m.value for m in MLAKVCacheLayout)} (all)",
    )
    demo.add_argument(
        "--write-model", metavar="FOLDER", help="only write the demo's model there, to serve it yourself"
    )
    demo.set_defaults(run=_demo)

    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)
    except (ValueError, OSError) as error:
        print(f"sgl-kvpool: {error}", file=sys.stderr)
        return 2


def _layout_list(text: str) -> list[MLAKVCacheLayout]:
    try:
        return [MLAKVCacheLayout.parse(name.strip()) for name in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _layouts(arguments: argparse.Namespace) -> int:
    """Print the byte table of one geometry."""
    formats = [
        member.row_format(arguments.kv_lora_rank, arguments.qk_rope_head_dim) for member in MLAKVCacheLayout
    ]
    widest = max(fmt.row_bytes for fmt in formats)
    print(f"one token of one layer, latent {formats[0].kv_lora_rank}", end="")
    print(f", rope {formats[0].qk_rope_head_dim}")
    print(f"{'layout':16} {'bytes':>6} {'tokens':>7}  content, in order")
    for fmt in formats:
        content = [f"{s.count} x {s.encoding.value[0]}" for s in fmt.segments]
        if fmt.padding_bytes:
            content.append(f"{fmt.padding_bytes} zero bytes")
        print(
            f"{fmt.layout.value:16} {fmt.row_bytes:6} {widest / fmt.row_bytes:6.2f}x  " + " | ".join(content)
        )
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    if arguments.write_model is not None:
        from pathlib import Path

        folder = Path(arguments.write_model)
        if not arguments.write_model or (folder.is_dir() and any(folder.iterdir())):
            raise ValueError(
                f"--write-model {arguments.write_model!r}: name a folder that is new or empty, so that no "
                "other model is overwritten"
            )
        from sgl_kvpool.demo.checkpoint import write_random_model

        print(write_random_model(folder))
        return 0
    from sgl_kvpool.demo.compare import compare

    return compare(arguments.layouts)


if __name__ == "__main__":
    sys.exit(main())
