#!/usr/bin/env python3
"""Clocks per row of every unit of a Hopper multiprocessor, counted in a kernel's main loop.

    loop_costs.py FILE --rows 64 --warps 4 [--loop LABEL,LABEL]

FILE is text of `nvdisasm -c`. The main loop is the innermost loop with the most wgmma instructions; --loop
names other loops (for instance a consumer's and its loader's, counted together). The result is the number of
clocks per row for which each unit is busy if it runs alone. The largest is a lower bound, not a forecast:
units overlap only if programs or warp groups are in different phases, latencies are not counted, and
instructions under a predicate count as executed.

Rates of a multiprocessor per clock: 4 warp instructions; 64 lanes of integer, logic, compare and select
operations, and 64 of IMAD; 128 of float32 and packed 16-bit arithmetic; 16 of special functions and
conversions (a GPU is faster at some conversions); 32 of shuffles; 128 bytes of shared memory; 2048
multiply-adds of bf16 (4096 of 8 bits). A wgmma reads B from shared memory each time, and A unless that is in
registers. Loads from global memory and spills go through the same L1 cache and its 128 bytes per clock. Bank
conflicts are not visible in the code: `attention_facts.py` adds them.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Costs", "Loop", "costs", "loops", "main_loop"]

#: Instructions by the unit that executes them.
_UNITS = {
    "integer": (
        *("LOP", "LOP3", "PLOP3", "SHF", "SGXT", "PRMT", "LEA", "IADD3", "VIADD", "VIMNMX", "ISETP", "SEL"),
        *("FMNMX", "FSETP", "FSEL", "BREV", "POPC", "FLO", "P2R", "R2P"),
    ),
    "imad": ("IMAD",),
    "fma": ("FMUL", "FADD", "FFMA", "HMUL2", "HADD2", "HFMA2", "MOV", "CS2R"),
    "special": ("MUFU", "F2FP", "I2F", "F2I", "F2F", "I2FP"),
    "shuffle": ("SHFL",),
}
_LANES = {"integer": 64, "imad": 64, "fma": 128, "special": 16, "shuffle": 32}
_WARP, _WARPS_OF_A_GROUP = 32, 4
_ISSUED, _SHARED_BYTES, _BF16_FMA = 4, 128, 2048
_BYTES = {"128": 16, "64": 8, "U16": 2, "S16": 2, "16": 2, "U8": 1, "S8": 1, "8": 1}
_PREDICATE = re.compile(r"^@!?U?P\w+\s+")


@dataclass(frozen=True)
class Loop:
    """A backward branch and its loop: label, position and instructions."""

    label: str
    first: int
    instructions: list[str]

    @property
    def end(self) -> int:
        return self.first + len(self.instructions)

    def contains(self, other: Loop) -> bool:
        return self != other and self.first <= other.first and other.end <= self.end

    @property
    def products(self) -> int:
        return sum("GMMA" in instruction for instruction in self.instructions)


@dataclass(frozen=True)
class Costs:
    """Costs per row, summed over the warps of a program that run the loop.

    Attributes
    ----------
    warp_instructions : float
    clk : dict of str to float
        Clocks by unit: "issue", "integer", "imad", "fma", "special", "shuffle", "tensor", "shared" (accesses
        to shared memory), "spills" and "loads" (which take the same 128 bytes per clock).
    draining_waits : int
        Waits of a warp per iteration until no product is in flight.
    operations : Counter
        Number of instructions of a warp, by name.
    """

    warp_instructions: float
    clk: dict[str, float]
    draining_waits: int
    operations: Counter[str]


def loops(text: str) -> Iterator[Loop]:
    """Every loop of all kernels in a text of nvdisasm."""
    code: list[str] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []
    for line in text.splitlines():
        if found := re.match(r"\s*(\.L_x?_?\d+):", line):
            waiting.append(found[1])
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            labels.update(dict.fromkeys(waiting, len(code)))
            waiting = []
            code.append(found[1])
    for at, instruction in enumerate(code):
        found = re.search(r"\bBRA\b.*`\((\.L\w+)\)", instruction)
        if found and labels.get(found[1], at + 1) <= at:
            yield Loop(found[1], labels[found[1]], code[labels[found[1]] : at + 1])


def main_loop(text: str) -> Loop:
    """The innermost loop with the most products; ValueError without any products."""
    found = [loop for loop in loops(text) if loop.products]

    inner = [loop for loop in found if not any(loop.contains(other) for other in found)]
    if not inner:
        raise ValueError("no loop with HGMMA in this code; name one with --loop")
    return max(inner, key=lambda loop: (loop.products, -len(loop.instructions)))


def _access_bytes(operation: str) -> int:
    """Bytes of a warp's access; a narrow access takes a whole pass too."""
    suffix = re.search(r"\.(128|64|[US]?16|[US]?8)\b", operation)
    return max(_SHARED_BYTES, _WARP * (_BYTES[suffix[1]] if suffix else 4))


def _wgmma(instruction: str, operation: str) -> tuple[float, float]:
    """A warp's share of its warp group's wgmma: bytes read from shared memory, and bf16 multiply-adds."""
    m, n, k = map(int, re.findall(r"(\d+)x(\d+)x(\d+)", operation)[0])
    eight_bits = not operation.startswith("HGMMA")
    size = 1 if eight_bits else 2
    a_in_registers = re.match(r"\S+\s+R\w+,\s*R", instruction)
    read = (0 if a_in_registers else m * k * size) + n * k * size
    return read / _WARPS_OF_A_GROUP, m * n * k / _WARPS_OF_A_GROUP / (2 if eight_bits else 1)


def costs(instructions: Sequence[str], rows: int, warps: int) -> Costs:
    """Costs of a loop per row.

    Parameters
    ----------
    instructions : sequence of str
        Instructions of one warp in one iteration.
    rows : int
        Rows per iteration.
    warps : int
        Warps of a program that run this loop.
    """
    operations: Counter[str] = Counter()
    shared = spills = loads = multiply_adds = 0.0
    drains = 0
    for text in instructions:
        instruction = _PREDICATE.sub("", text)
        operation = instruction.split()[0]
        name = operation.split(".")[0]
        operations[name] += 1
        if name in ("HGMMA", "QGMMA", "IGMMA"):
            read, products = _wgmma(instruction, operation)
            shared += read
            multiply_adds += products
        elif name in ("LDS", "STS", "ATOMS"):
            shared += _access_bytes(operation)
        elif name in ("LDSM", "STSM"):
            matrices = re.search(r"\.([24])\b", operation)
            shared += _SHARED_BYTES * (int(matrices[1]) if matrices else 1)
        elif name == "LDGSTS":
            shared += _access_bytes(operation)
        elif name in ("LDL", "STL"):
            spills += _access_bytes(operation)
        elif name == "LDG":
            loads += _access_bytes(operation)
        elif operation.startswith("WARPGROUP.DEPBAR") and instruction.rstrip().endswith("0x0"):
            drains += 1
    per_row = warps / rows
    lanes = {unit: _WARP * sum(operations[name] for name in names) for unit, names in _UNITS.items()}
    clk = {
        "issue": len(instructions) / _ISSUED,
        **{unit: count / _LANES[unit] for unit, count in lanes.items()},
        "tensor": multiply_adds / _BF16_FMA,
        "shared": shared / _SHARED_BYTES,
        "spills": spills / _SHARED_BYTES,
        "loads": loads / _SHARED_BYTES,
    }
    return Costs(len(instructions) * per_row, {unit: clk[unit] * per_row for unit in clk}, drains, operations)


def _named(text: str, labels: Sequence[str]) -> list[str]:
    found = {loop.label: loop for loop in loops(text)}
    missing = [label for label in labels if label not in found]
    if missing:
        raise ValueError(f"no loop begins at {', '.join(missing)}; loops begin at {', '.join(found)}")
    return [i for label in labels for i in found[label].instructions]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", type=int, required=True, help="rows of one iteration")
    parser.add_argument("--warps", type=int, required=True, help="warps of a program that run the loop")
    parser.add_argument("--loop", help="labels, separated by commas")
    arguments = parser.parse_args()
    if arguments.rows < 1 or arguments.warps < 1:
        parser.error(f"--rows {arguments.rows} and --warps {arguments.warps} must be 1 or more")
    try:
        text = arguments.file.read_text()
        chosen = _named(text, arguments.loop.split(",")) if arguments.loop else main_loop(text).instructions
    except (OSError, ValueError) as error:
        parser.error(f"{arguments.file}: {error}")
    found = costs(chosen, arguments.rows, arguments.warps)
    print(", ".join(f"{count} {name}" for name, count in found.operations.most_common(24)))
    print(f"{found.warp_instructions:.1f} warp instructions per row, {found.draining_waits} draining waits")
    for unit, clk in sorted(found.clk.items(), key=lambda item: -item[1]):
        print(f"{unit:8} {clk:6.1f} clk per row")


if __name__ == "__main__":
    main()
