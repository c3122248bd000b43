"""Clocks per row of FlashMLA's Hopper kernels, counted in the installed wheel as `mla_decode`'s are.

The rates that FlashMLA publishes are
of an H800, which has the 132 multiprocessors and the memory of an H100, at 128 query heads:
660 TFLOPS dense and 410 TFLOPS sparse (README of deepseek-ai/FlashMLA, "Performance"; its 640 TFLOPS are
sparse prefill).
"""

import importlib.metadata
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from scripts.figures import loop_costs

#: The release of sgl-flash-mla whose kernels are known here.
VERSION = "1.0.0"
_LIBRARY = "flash_mla/_C_legacy.abi3.so"
#: Query heads of a program, warps of a role, and bytes of a bulk copy: 64 rows of 64 bf16.
_HEADS, _WARPS, _BOX_BYTES = 64, 4, 64 * 64 * 2


@dataclass(frozen=True)
class Kernel:
    """A kernel of the wheel.

    `name`, `layout`: `layout` has the bytes of its rows.
    `symbol`: Part of its mangled name that no other kernel has.
    `rows`: Rows per iteration.
    `heads`: Query heads of a list that it takes.
    `tflops`: Published rate at 128 query heads.
    """

    name: str
    layout: str
    symbol: str
    rows: int
    heads: tuple[int, ...]
    tflops: int | None = None


_ANY = (8, 16, 32, 64, 128)
_SPARSE = "sparse39flash_fwd_splitkv_mla_fp8_sparse_kernelINS2_14KernelTemplateIL9ModelType0ELi{}E"
KERNELS = (
    Kernel("FlashMLA dense", "bf16", "TraitsIN7cutlass10bfloat16_tELi576E", 128, _ANY, 660),
    Kernel("FlashMLA dense", "fp8", "12float_e4m3_tENS2_10bfloat16_tELi512EELb0E", 64, _ANY),
    Kernel("FlashMLA sparse", "fp8_block_scale", _SPARSE.format(64), 64, (64,)),
    Kernel("FlashMLA sparse", "fp8_block_scale", _SPARSE.format(128), 64, (128,), 410),
)
NAMES = frozenset(kernel.name for kernel in KERNELS)


def clk_per_row(costs: loop_costs.Costs, conflicts_clk: float = 0) -> dict[str, float]:
    """Fields of the JSON, from the costs of a program's loops and its bank conflicts."""
    through_l1 = costs.clk["shared"] + costs.clk["spills"] + costs.clk["loads"]
    units = ("issue", "integer", "special", "tensor")
    return {
        "warp_instructions_per_row": costs.warp_instructions,
        "shared_memory_clk_per_row": through_l1 + conflicts_clk,
        **{f"{unit}_clk_per_row": costs.clk[unit] for unit in units},
        "stall_clk_per_row": costs.stall_clk,
    }


@cache
def _wheel() -> dict[str, str]:
    """Machine code by symbol of `KERNELS`."""
    import compile_decode

    found = importlib.metadata.distribution("sgl-flash-mla")
    if found.version != VERSION:
        raise ValueError(f"sgl-flash-mla is {found.version}; the kernels of {VERSION} are known here")
    code: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        library = str(found.locate_file(_LIBRARY))
        compile_decode.run_tool("cuobjdump", "-arch", "sm_90a", "-xelf", "all", library, cwd=folder)
        for cubin in Path(folder).iterdir():
            wanted = [k.symbol for k in KERNELS if k.symbol.encode() in cubin.read_bytes()]
            if wanted:
                text = compile_decode.run_tool("nvdisasm", "-c", "-hex", str(cubin))
                for name, kernel in loop_costs.kernels(text).items():
                    code.update((symbol, kernel) for symbol in wanted if symbol in name)
    return code


def counted() -> list[dict[str, Any]]:
    """An object per kernel and number of query heads; a list is read once per 64 of them."""
    found = []
    for kernel in KERNELS:
        roles = [loop.instructions for loop in loop_costs.role_loops(_wheel()[kernel.symbol])]
        costs = clk_per_row(loop_costs.costs(roles, kernel.rows, _WARPS, box_bytes=_BOX_BYTES))
        for heads in kernel.heads:
            tiles = -(-heads // _HEADS)
            warps = f"{len(roles)} x {_WARPS} warps"
            found.append(
                {
                    "layout": kernel.layout,
                    "kernel": kernel.name,
                    "heads": heads,
                    "tiles": f"{tiles} x {_HEADS} query heads, {kernel.rows} rows, {warps}",
                    **{name: round(tiles * value, 2) for name, value in costs.items()},
                    "published_tflops": kernel.tflops if heads == 128 else None,
                }
            )
    return found
