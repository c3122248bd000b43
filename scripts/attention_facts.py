#!/usr/bin/env python3
"""Clocks per row of four units of a multiprocessor in each tile of `mla_decode`: decode's only cost model.

Needs Triton, and g++ for ptxrun, but no GPU. Each tile is compiled for sm_90a, the instructions of its loop
are counted in the machine code (`loop_costs.py`), and ptxrun runs its PTX over a few blocks to find bank
conflicts.

`--json` writes a list of objects, one per layout, kernel and number of query heads. `--write` puts them into
``sgl_kvpool/commands/bench/attention/tile_costs.json``, and the tables made of them into
``docs/attention.md`` and ``README.md``; `--check` fails if these differ. `--try` counts a tile that is not in
the table.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / folder) for folder in ("attention", "codec", "ptxrun"))]

import loop_costs  # noqa: E402
import page_tables  # noqa: E402

from sgl_kvpool.attention.decode_config import (  # noqa: E402
    DEFAULT_SM_COUNT,
    TileConfig,
    tile_config,
    tiles_of_both_kernels,
)
from sgl_kvpool.commands.bench.attention.limits import TILE_COSTS, UNITS, busiest_unit_clk  # noqa: E402
from sgl_kvpool.commands.bench.outputs import replace_file, require_writable  # noqa: E402
from sgl_kvpool.layout import MLAKVCacheLayout  # noqa: E402

PAGE = ROOT / "docs" / "attention.md"
README = ROOT / "README.md"
HEADS = (8, 16, 32, 64, 128)
#: Bytes of rows per second from device memory, about 90 % of the data sheet's.
MEMORY_BYTES_PER_S = {"H100": 3.0e12, "H200": 4.3e12}
CLOCK_HZ = 1.7e9
#: Clocks per row of the busiest unit, 16 query heads, of the Triton kernel at commit 3a07fce.
BEFORE_CLK_PER_ROW = {"bf16": 65.1, "fp8": 75.1, "fp8_block_scale": 78.2, "fp4": 74.2}
#: Query heads of the columns of README's table.
_README_HEADS = (8, 16, 128)
#: Registers of an SM, and its shared memory, including the 1 KB that each program reserves.
_REGISTERS, _SHARED_BYTES, _RESERVED_BYTES = 65536, 233472, 1024
#: Blocks that ptxrun executes; the last block does not prefetch.
_BLOCKS = 3


@cache
def tile_costs(layout: MLAKVCacheLayout, tile: TileConfig) -> dict[str, Any]:
    """Compiled properties of a tile, and its clocks per row."""
    import compile_decode
    import compile_kernels

    compiled = compile_decode.compile_decode(layout.value, tile.query_heads, tile=tile)
    sass, usage = compile_kernels.machine_code(compiled)
    found = compile_decode.facts(compiled, sass, usage)
    loop = loop_costs.costs(loop_costs.main_loop(sass).instructions, tile.block_rows, tile.warps)
    through_l1 = loop.clk["shared"] + loop.clk["spills"] + loop.clk["loads"]
    return {
        "registers": found["registers"],
        "spilled_bytes": found["stack_bytes"],
        "shared_bytes": found["shared_bytes"],
        "programs_per_sm": _programs_per_sm(found["registers"], found["shared_bytes"], tile.warps),
        "warp_instructions_per_row": loop.warp_instructions,
        "shared_memory_clk_per_row": through_l1 + bank_conflict_clk(compiled, layout, tile),
        "issue_clk_per_row": loop.clk["issue"],
        "integer_clk_per_row": loop.clk["integer"],
        "tensor_clk_per_row": loop.clk["tensor"],
        "draining_waits_per_block": loop.draining_waits,
    }


def _programs_per_sm(registers: int, shared_bytes: int, warps: int) -> int:
    of_a_warp = -(-registers // 8) * 8 * 32
    return min(_REGISTERS // (of_a_warp * warps), _SHARED_BYTES // (shared_bytes + _RESERVED_BYTES))


def bank_conflict_clk(compiled: Any, layout: MLAKVCacheLayout, tile: TileConfig) -> float:
    """Extra passes over shared memory per row due to bank conflicts, found by ptxrun."""
    import ptxrun
    import torch

    fmt, heads, rows = layout.row_format(512, 64), tile.query_heads, _BLOCKS * tile.block_rows
    arguments = {
        "q_ptr": torch.zeros(heads, 512, dtype=torch.bfloat16),
        "q_rope_ptr": torch.zeros(heads, 64, dtype=torch.bfloat16),
        "pool_ptr": torch.zeros(rows, fmt.row_bytes, dtype=torch.uint8),
        "ids_ptr": torch.arange(rows, dtype=torch.int32),
        "counts_ptr": torch.tensor([rows], dtype=torch.int32),
        "list_index_ptr": torch.tensor([0], dtype=torch.int32),
        "out_ptr": torch.zeros(heads, 512),
        "lse_ptr": torch.zeros(heads),
        **dict.fromkeys(["row_count", "bound"], rows),
        **dict.fromkeys(["lists", "splits", "score_scale", "value_scale"], 1),
        **{"q_head_stride": 512, "q_rope_head_stride": 64, "out_head_stride": 512},  # noqa: PIE800
    }
    # The remaining strides are those of tokens, lists and splits, whose size is 1.
    parameters = [name for name, kind in compiled.src.signature.items() if kind != "constexpr"]
    result = ptxrun.Module(compiled.asm["ptx"]).launch(
        block=32 * tile.warps,
        args=[arguments.get(name, 0) for name in parameters],
        dynamic_shared_bytes=compiled.metadata.shared,
        **dict.fromkeys(["races", "global_races", "uninit_regs", "uninit_shared", "timing"], 0),
    )
    in_loop = [line for line in result.bank_conflicts() if line["count"] == _BLOCKS * tile.warps]
    return sum(line["units"] - line["ideal"] for line in in_loop) / rows


def costs_of(layout: MLAKVCacheLayout, heads: int, tile: TileConfig) -> dict[str, Any]:
    """An object of the JSON: costs of all tiles of a list, and the limits that follow."""
    tiles = -(-heads // tile.query_heads)
    found = {
        name: round(tiles * value, 2) if name.endswith("_per_row") else value
        for name, value in tile_costs(layout, tile).items()
    }
    row_bytes = layout.row_format(512, 64).row_bytes
    chip = DEFAULT_SM_COUNT * CLOCK_HZ / busiest_unit_clk(found)
    return {
        "layout": layout.value,
        "kernel": tile.kernel,
        "heads": heads,
        "tiles": f"{tiles} x {tile.query_heads} query heads, {tile.block_rows} rows, {tile.warps} warps",
        **found,
        # Tiles of a list read the same rows at about the same time, so device memory is read once.
        "limit_g_rows_per_s": {
            device: round(min(chip, rate / row_bytes) / 1e9, 2) for device, rate in MEMORY_BYTES_PER_S.items()
        },
    }


def counted(layouts: list[MLAKVCacheLayout], heads: list[int]) -> list[dict[str, Any]]:
    """Every object of the JSON for these layouts and numbers of query heads."""
    found = []
    for layout in layouts:
        for count in heads:
            tiles = [tile_config(layout, count, kernel) for kernel in ("triton", "gluon")]
            found += [costs_of(layout, count, tile) for tile in dict.fromkeys(tiles)]
    return found


def tiles_table(costs: list[dict[str, Any]]) -> str:
    """A line per tile of the table."""
    of = {(found["layout"], found["kernel"], found["heads"]): found for found in costs}
    columns = [
        "layout",
        "kernel",
        "query heads",
        "rows",
        "warps",
        "registers",
        "spilled bytes",
        "shared bytes",
        "programs per SM",
    ]
    columns += [
        "warp instructions per row",
        "waits per block",
        *(f"{_unit(unit)}, clk/row" for unit in UNITS),
    ]
    lines = _head(columns)
    for layout, tile in sorted(tiles_of_both_kernels(), key=lambda of: list(MLAKVCacheLayout).index(of[0])):
        found = of[layout.value, tile.kernel, tile.query_heads]
        names = ("registers", "spilled_bytes", "shared_bytes", "programs_per_sm")
        cells = [
            f"`{layout}`",
            tile.kernel,
            tile.query_heads,
            tile.block_rows,
            tile.warps,
            *(found[name] for name in names),
        ]
        cells += [f"{found['warp_instructions_per_row']:.0f}", found["draining_waits_per_block"]]
        cells += [f"{found[f'{unit}_clk_per_row']:.1f}" for unit in UNITS]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _head(columns: list[str]) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def _unit(name: str) -> str:
    return {"tensor": "products"}.get(name, name.replace("_", " "))


def limits_table(costs: list[dict[str, Any]]) -> str:
    """A line per layout, kernel and number of query heads."""
    columns = [
        "layout",
        "kernel",
        "heads",
        "tiles",
        "busiest unit",
        "clk/row",
        *MEMORY_BYTES_PER_S,
        "TB/s of rows, H200",
    ]
    lines = _head(columns)
    for found in costs:
        layout = MLAKVCacheLayout(found["layout"])
        tiles = found["tiles"].partition(" x ")[0]
        unit = max(UNITS, key=lambda unit: found[f"{unit}_clk_per_row"])
        limits = found["limit_g_rows_per_s"]
        cells = [
            f"`{layout}`",
            found["kernel"],
            found["heads"],
            tiles,
            _unit(unit),
            f"{busiest_unit_clk(found):.1f}",
        ]
        cells += [f"{limit:.1f}" for limit in limits.values()]
        cells.append(f"{limits['H200'] * layout.row_format(512, 64).row_bytes / 1e3:.1f}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def readme_table(costs: list[dict[str, Any]]) -> str:
    """A line per layout: limits on an H100 of the kernel that serves it, and of commit 3a07fce's kernel."""
    # If a layout has two kernels, Gluon's costs come second and replace Triton's: servers use Gluon.
    limits = {(found["layout"], found["heads"]): found["limit_g_rows_per_s"]["H100"] for found in costs}
    columns = [f"{heads} heads" for heads in _README_HEADS]
    lines = _head(["layout", *columns, "16 heads before"])
    for layout in MLAKVCacheLayout:
        cells = [f"{limits[layout.value, heads]:.1f}" for heads in _README_HEADS]
        clk = BEFORE_CLK_PER_ROW.get(layout.value)
        if clk is None:
            cells.append("")
        else:
            rate = MEMORY_BYTES_PER_S["H100"] / layout.row_format(512, 64).row_bytes
            cells.append(f"{min(DEFAULT_SM_COUNT * CLOCK_HZ / clk, rate) / 1e9:.1f}")
        lines.append(f"| {' | '.join([f'`{layout}`', *cells])} |")
    return "\n".join(lines)


def page_of(costs: list[dict[str, Any]], text: str) -> str:
    """The page's text with the tables made of these costs."""
    return page_tables.updated(
        text, {"tiles": lambda: tiles_table(costs), "limits": lambda: limits_table(costs)}
    )


def readme_of(costs: list[dict[str, Any]], text: str) -> str:
    """README's text with the table made of these costs."""
    return page_tables.updated(text, {"decode limits": lambda: readme_table(costs)})


def text_of(costs: list[dict[str, Any]]) -> str:
    """The JSON, an object per line."""
    return "[\n" + ",\n".join(json.dumps(found) for found in costs) + "\n]\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path, help="write the counts to this file")
    layouts = [layout.value for layout in MLAKVCacheLayout]
    parser.add_argument("--layouts", nargs="+", choices=layouts, default=layouts, help="layouts (all)")
    parser.add_argument(
        "--heads", type=int, nargs="+", default=HEADS, help="query heads per rank (with --try: the tile's)"
    )
    parser.add_argument(
        "--try", dest="tile", type=int, nargs=5,
        metavar=("QUERY_HEADS", "ROWS", "WARPS", "STAGES", "PROGRAMS"),
        help="count this tile instead of the table's; the output's programs per SM follow "
        "from its registers and shared memory, not from PROGRAMS",
    )  # fmt: skip
    parser.add_argument("--kernel", choices=("gluon", "triton"), default="triton", help="kernel of --try")
    parser.add_argument(
        "--late", type=int, default=0, help="late_parts of the tile, for --try with the Gluon kernel (0)"
    )
    page_tables.add_arguments(parser, PAGE)
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        parser.error("unset TRITON_INTERPRET: the interpreter does not compile")
    if (arguments.write or arguments.check) and (
        arguments.tile or arguments.heads != HEADS or arguments.layouts != layouts
    ):
        parser.error("--write and --check are for all counts: leave out --layouts, --heads and --try")
    if min(arguments.heads) < 1:
        parser.error(f"--heads {min(arguments.heads)} is below 1")
    if shutil.which("g++") is None:
        parser.error("g++ is missing; install it to compile the emulator that finds bank conflicts")
    require_writable(parser, arguments.json)
    wanted = [MLAKVCacheLayout(name) for name in arguments.layouts]
    if arguments.tile:
        if any(size & (size - 1) or size < 1 for size in arguments.tile[:3]) or arguments.tile[2] not in (
            4,
            8,
        ):
            parser.error("--try: QUERY_HEADS and ROWS must be powers of two, and WARPS 4 or 8")
        tile = TileConfig(*arguments.tile, arguments.kernel, arguments.late)
        if tile.kernel == "gluon" and tile.block_rows != 16 * tile.warps:
            parser.error(f"--try: ROWS of the Gluon kernel are 16 per warp, {16 * tile.warps} here")
        heads = [tile.query_heads] if arguments.heads == HEADS else arguments.heads
        costs = [costs_of(layout, count, tile) for layout in wanted for count in heads]
    else:
        costs = counted(wanted, arguments.heads)
    if arguments.json:
        replace_file(arguments.json, text_of(costs))
    new = {TILE_COSTS: text_of(costs)}
    if arguments.write or arguments.check:
        new[PAGE] = page_of(costs, PAGE.read_text())
        new[README] = readme_of(costs, README.read_text())
    if arguments.write:
        for path, text in new.items():
            path.write_text(text)
    elif arguments.check:
        stale = [path for path, text in new.items() if path.read_text() != text]
        for path in stale:
            print(f"{path} is out of date; run {Path(__file__).name} --write", file=sys.stderr)
        return int(bool(stale))
    elif not arguments.json:
        print(text_of(costs), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
