#!/usr/bin/env python3
"""Tables of ``docs/attention.md``: what the compiler makes of `mla_decode`, and the limits by arithmetic.

Needs Triton and no GPU. `--write` puts the tables into the page, `--check` fails if they differ from it.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "attention")]

import page_tables  # noqa: E402

from sgl_kvpool.attention.decode_config import decode_config, table  # noqa: E402
from sgl_kvpool.layout import Encoding, MLAKVCacheLayout  # noqa: E402

PAGE = ROOT / "docs" / "attention.md"
#: Of an H200: bytes per second seen, bf16 products seen, SMs, clock, shared memory bytes per clock and SM.
BYTES, FLOPS, SMS, CLOCK, SHARED = 4.3e12, 790e12, 132, 1.7e9, 128
#: 32-bit integer operations (shifts, logic) per clock and SM.
LANES = 64
#: 32-bit operations per decoded value, counted in `triton_operands.py`: FP4 4 per pair and the product, and
#: 6 per block of 16 for its scale; e4m3 9 per four values.
OPERATIONS = {Encoding.BF16: 0.0, Encoding.E4M3: 9 / 4, Encoding.E2M1: 5 / 2 + 6 / 16}


def facts_table() -> str:
    import compile_decode
    import compile_kernels

    lines = [
        "| layout | pairs | registers | spilled bytes | shared bytes | 16-byte loads | copies | wgmma |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for layout, tile in table():
        compiled = compile_decode.compile_decode(layout.value, tile.pairs, tile.pairs)
        found = compile_decode.facts(compiled, *compile_kernels.machine_code(compiled))
        lines.append(
            f"| `{layout}` | {tile.pairs} | {found['registers']} | {found['stack_bytes']} | "
            f"{found['shared_bytes']} | {found['loads_16_bytes']} | {found['copies_16_bytes']} | "
            f"{found['wgmma']} |"
        )
    return "\n".join(lines)


def limits_table() -> str:
    lines = [
        "| layout | heads | bytes | products | decoding | shared memory | tightest, TB/s of rows |",
        "|---|---|---|---|---|---|---|",
    ]
    for layout in MLAKVCacheLayout:
        fmt = layout.row_format(512, 64)
        for heads in (16, 32, 64, 128):
            config = decode_config(fmt, heads, 1, 64, 8192)
            tiles, pairs, block = config.tiles, config.tile.pairs, config.tile.block_rows
            width, rank = fmt.head_dim, fmt.kv_lora_rank
            # Tiles of one list read the same rows at about the same time: memory once, the rest per tile.
            by_bytes = BYTES / fmt.row_bytes
            # Both warp groups compute all scores (64 rows are one instruction high).
            products = 2 * pairs * tiles * (2 * width + rank)
            by_products = FLOPS / products
            decoded = rank * OPERATIONS[fmt.nope.encoding] + (width - rank) * OPERATIONS[fmt.rope.encoding]
            by_decoding = LANES * CLOCK * SMS / (decoded * tiles) if decoded else float("inf")
            # Operands are written once and read twice for scores, their latent part once for values; queries
            # are read by both warp groups in each block, weights once per 64 values.
            row = 2 * (width + 2 * width + rank)
            queries = 2 * 2 * width * pairs / block
            weights = 2 * pairs * (rank / 64)
            by_shared = SHARED * CLOCK * SMS / ((row + queries + weights) * tiles)
            limits = (by_bytes, by_products, by_decoding, by_shared)
            cells = [f"{limit / 1e9:.1f}" if limit < float("inf") else "-" for limit in limits]
            lines.append(
                f"| `{layout}` | {heads} | {' | '.join(cells)} | {min(limits) * fmt.row_bytes / 1e12:.1f} |"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    page_tables.add_arguments(parser, PAGE)
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        parser.error("unset TRITON_INTERPRET: the interpreter compiles nothing")
    tables = {"compile facts": facts_table, "limits": limits_table}
    return page_tables.carry_out(arguments, PAGE, tables, Path(__file__).name)


if __name__ == "__main__":
    sys.exit(main())
