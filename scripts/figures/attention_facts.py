#!/usr/bin/env python3
"""Clocks per row of five units of a multiprocessor in each tile of `mla_decode`: decode's only cost model.

Needs Triton, and g++ for ptxrun, but no GPU. Each tile is compiled for sm_90a, the instructions of its loop
are counted in the machine code (`loop_costs.py`), and ptxrun runs its PTX over a few blocks to find bank
conflicts. FlashMLA's kernels are counted in the installed wheel (`flashmla_costs.py`).

Prints a list of objects, one per layout, kernel and number of query heads. `--write` puts them into
``tile_costs.json``, and the table made of them into ``docs/attention.md``. `--try` counts a tile that is not
in the table.
"""

import argparse
import json
import os
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any

from scripts import ROOT
from scripts.figures import flashmla_costs, loop_costs
from scripts.kit.outputs import updated
from sgl_kvpool.attention.decode_config import DEFAULT_SM_COUNT, TileConfig, tile_config
from sgl_kvpool.commands.tables import markdown
from sgl_kvpool.layout import MLAKVCacheLayout

sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("attention", "codec", "ptxrun")]

PAGE = ROOT / "docs" / "attention.md"
#: A list of objects, one per layout, kernel and number of query heads, FlashMLA's kernels last.
TILE_COSTS = Path(__file__).with_name("tile_costs.json")
#: Units of a multiprocessor whose clocks per row are in `TILE_COSTS`.
UNITS = ("shared_memory", "issue", "integer", "special", "tensor")
HEADS = (8, 16, 32, 64, 128)
#: Bytes of rows per second from device memory, about 90 % of the data sheet's.
MEMORY_BYTES_PER_S = {"H100": 3.0e12, "H200": 4.3e12}
CLOCK_HZ = 1.7e9
#: What can be expected: a share of the memory's rate, and the least and the most of the multiprocessors'
#: limit. FlashMLA's sparse and its dense kernel reach 0.59 and 0.77 of the latter.
EXPECTED_OF_MEMORY, EXPECTED_OF_CHIP = 0.9, (0.57, 0.72)
#: Registers of an SM, and its shared memory, including the 1 KB that each program reserves.
_REGISTERS, _SHARED_BYTES, _RESERVED_BYTES = 65536, 233472, 1024
#: Blocks that ptxrun executes; the last block does not prefetch.
_BLOCKS = 3


@cache
def tile_costs(layout: MLAKVCacheLayout, tile: TileConfig) -> dict[str, Any]:
    """Compiled properties of a tile, and its clocks per row."""
    import compile_decode

    compiled = compile_decode.compile_decode(layout.value, tile.query_heads, tile=tile)
    sass, usage = compile_decode.machine_code(compiled, "-hex")
    found = compile_decode.facts(compiled, sass, usage)
    programs = _programs_per_sm(found["registers"], found["shared_bytes"], compiled.metadata.num_warps)
    roles = [loop.instructions for loop in loop_costs.role_loops(sass)]
    loop = loop_costs.costs(roles, tile.block_rows, tile.warps, programs=programs)
    conflicts_clk = bank_conflict_clk(compiled, layout, tile)
    return {
        "registers": found["registers"],
        "spilled_bytes": found["stack_bytes"],
        "shared_bytes": found["shared_bytes"],
        "programs_per_sm": programs,
        **flashmla_costs.clk_per_row(loop, conflicts_clk),
        "draining_waits_per_block": loop.draining_waits,
        "least_load_lead": round(min(map(loop_costs.least_load_lead, roles)), 2),
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
        "rows_ptr": torch.zeros(rows, fmt.row_bytes, dtype=torch.uint8),
        "kv_indices_ptr": torch.arange(rows, dtype=torch.int32),
        "kv_lens_ptr": torch.tensor([rows], dtype=torch.int32),
        "list_index_ptr": torch.tensor([0], dtype=torch.int32),
        "out_ptr": torch.zeros(heads, 512),
        "lse_ptr": torch.zeros(heads),
        **dict.fromkeys(["row_count", "list_width"], rows),
        **dict.fromkeys(["lists", "splits", "score_scale", "value_scale"], 1),
        **{"q_head_stride": 512, "q_rope_head_stride": 64, "out_head_stride": 512},  # noqa: PIE800
    }
    # The remaining strides are those of tokens, lists and splits, whose size is 1.
    parameters = [name for name, kind in compiled.src.signature.items() if kind != "constexpr"]
    result = ptxrun.Module(compiled.asm["ptx"]).launch(
        block=32 * compiled.metadata.num_warps,
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
    groups = "3 x " if tile.kernel == "gluon_wide" else ""
    size = f"{tile.query_heads} query heads, {tile.block_rows} rows, {groups}{tile.warps} warps"
    return {
        "layout": layout.value,
        "kernel": tile.kernel,
        "heads": heads,
        "tiles": f"{tiles} x {size}",
        **found,
        **rates(layout, found),
    }


def rates(layout: MLAKVCacheLayout, costs: dict[str, Any]) -> dict[str, Any]:
    """Limits and expectations of a layout's rows, in 10^9 rows per second, from the clocks per row."""
    row_bytes = layout.row_format(512, 64).row_bytes
    busiest = max(UNITS, key=lambda unit: costs[f"{unit}_clk_per_row"])
    chip = DEFAULT_SM_COUNT * CLOCK_HZ / costs[f"{busiest}_clk_per_row"] / 1e9
    # Tiles of a list read the same rows at about the same time, so device memory is read once.
    memory = {device: rate / row_bytes / 1e9 for device, rate in MEMORY_BYTES_PER_S.items()}
    return {
        "busiest_unit": busiest,
        "limit_g_rows_per_s": {device: round(min(chip, rate), 2) for device, rate in memory.items()},
        "expected_g_rows_per_s": {
            device: [round(min(EXPECTED_OF_MEMORY * rate, share * chip), 2) for share in EXPECTED_OF_CHIP]
            for device, rate in memory.items()
        },
    }


def flashmla(layouts: list[MLAKVCacheLayout], heads: list[int]) -> list[dict[str, Any]]:
    """Objects of the JSON for FlashMLA's kernels of these layouts and numbers of query heads."""
    return [
        {**one, **rates(MLAKVCacheLayout(one["layout"]), one)}
        for one in flashmla_costs.counted()
        if one["layout"] in layouts and one["heads"] in heads
    ]


def counted(layouts: list[MLAKVCacheLayout], heads: list[int]) -> list[dict[str, Any]]:
    """Every object of the JSON for these layouts and numbers of query heads."""
    found = []
    for layout in layouts:
        for count in heads:
            tiles = [tile_config(layout, count, kernel) for kernel in ("triton", "gluon")]
            found += [costs_of(layout, count, tile) for tile in dict.fromkeys(tiles)]
    return found + flashmla(layouts, heads)


def limits_table(costs: list[dict[str, Any]]) -> str:
    """A line per layout and kernel that serves it: limit, and in brackets the expectation, on an H100."""
    cells = {}
    for found in costs:  # if a layout has two kernels, Gluon's costs come second: servers use Gluon's
        kernel = found["kernel"] if found["kernel"] in flashmla_costs.NAMES else "`kvpool_mla`"
        limit = found["limit_g_rows_per_s"]["H100"]
        low, high = (f"{expected:.1f}" for expected in found["expected_g_rows_per_s"]["H100"])
        expected = low if low == high else f"{low}-{high}"
        cells[found["layout"], kernel, found["heads"]] = f"{limit:.1f} ({expected})"
    rows = [
        [f"`{layout}`", kernel, *(cells.get((layout, kernel, heads), "") for heads in HEADS)]
        for layout in (layout.value for layout in MLAKVCacheLayout)
        for kernel in dict.fromkeys(kernel for name, kernel, _ in cells if name == layout)
    ]
    return markdown(["layout", "kernel", *(f"{heads} heads" for heads in HEADS)], *rows)


def page_of(costs: list[dict[str, Any]], text: str) -> str:
    """The page's text with the table made of these costs."""
    return updated(text, {"limits": lambda: limits_table(costs)})


def text_of(costs: list[dict[str, Any]]) -> str:
    return "[\n" + ",\n".join(json.dumps(found) for found in costs) + "\n]\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
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
    parser.add_argument("--late", type=int, default=0, help="register_parts of --try with Gluon (0)")
    parser.add_argument("--write", action="store_true", help="write the counts and the page's table")
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        parser.error("unset TRITON_INTERPRET: the interpreter does not compile")
    if arguments.write and (arguments.tile or arguments.heads != HEADS or arguments.layouts != layouts):
        parser.error("--write is for all counts: leave out --layouts, --heads and --try")
    if shutil.which("g++") is None:
        parser.error("g++ is missing; install it to compile the emulator that finds bank conflicts")
    wanted = [MLAKVCacheLayout(name) for name in arguments.layouts]
    if arguments.tile:
        tile = TileConfig(*[*arguments.tile, arguments.kernel, arguments.late])
        if tile.kernel == "gluon" and tile.block_rows != 16 * tile.warps:
            parser.error(f"--try: ROWS of the Gluon kernel are 16 per warp, {16 * tile.warps} here")
        heads = [tile.query_heads] if arguments.heads == HEADS else arguments.heads
        costs = [costs_of(layout, count, tile) for layout in wanted for count in heads]
    else:
        costs = counted(wanted, arguments.heads)
    if arguments.write:
        TILE_COSTS.write_text(text_of(costs))
        PAGE.write_text(page_of(costs, PAGE.read_text()))
    else:
        print(text_of(costs), end="")


if __name__ == "__main__":
    main()
