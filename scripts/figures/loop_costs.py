"""Clocks per row of every unit of a Hopper multiprocessor, counted in a kernel's main loop.

The code is text of `nvdisasm -c -hex`. If the warps of a program have roles, each role has a loop of its
own, and these loops are counted together: the innermost loops with wgmma instructions, and the largest loop
outside of them that copies to shared memory and waits on an mbarrier. The result is the number of clocks per
row for which each unit is busy if it runs alone. The largest is a lower bound, not a forecast:
units overlap only if programs or warp groups are in different phases, latencies are not counted, and
instructions under a predicate count as executed.

The control code of an instruction says how many clocks its warp waits before the next one (stall). The sum of
the stalls of the longest role is a second lower bound: a warp cannot pass its loop faster, whatever the other
units do.

Rates of a multiprocessor per clock: 4 warp instructions; 64 lanes of integer, logic, compare and select
operations; 16 of special functions and conversions (a GPU is faster at some conversions); 128 bytes of shared
memory; 2048 multiply-adds of bf16 (4096 of 8 bits). A wgmma reads B from shared memory each time, and A
unless that is in registers. Loads from global memory and spills go through the same L1 cache and its 128
bytes per clock. A store to another multiprocessor's shared memory (STAS) counts twice: the peer sends as
many. The bytes that a bulk copy (UTMALDG) writes are not in the code: `box_bytes`. Neither are bank
conflicts, which `attention_facts.py` adds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

#: Instructions by the unit that executes them.
_UNITS = {
    "integer": (
        *("LOP", "LOP3", "PLOP3", "SHF", "SGXT", "PRMT", "LEA", "IADD3", "VIADD", "VIMNMX", "ISETP", "SEL"),
        *("FMNMX", "FSETP", "FSEL", "BREV", "POPC", "FLO", "P2R", "R2P"),
    ),
    "special": ("MUFU", "F2FP", "I2F", "F2I", "F2F", "I2FP"),
}
_LANES = {"integer": 64, "special": 16}
_WARP, _WARPS_OF_A_GROUP = 32, 4
_ISSUED, _SHARED_BYTES, _BF16_FMA = 4, 128, 2048
_BYTES = {"128": 16, "64": 8, "U16": 2, "S16": 2, "16": 2, "U8": 1, "S8": 1, "8": 1}
_PREDICATE = re.compile(r"^@!?U?P\w+\s+")
_LINE = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;\s*/\* 0x[0-9a-f]{16} \*/")
_HIGH_WORD = re.compile(r"\s+/\* 0x([0-9a-f]{16}) \*/")
#: In an instruction's second word: clocks until the warp's next instruction.
_STALL_BIT, _STALL_MASK = 41, 15


class Instruction(NamedTuple):
    """Text of an instruction, and clocks until the next one from its control code."""

    text: str
    stall_clk: int

    @property
    def operation(self) -> str:
        return _PREDICATE.sub("", self.text).split()[0]

    @property
    def name(self) -> str:
        return self.operation.split(".")[0]


@dataclass(frozen=True)
class Loop:
    """A backward branch and its loop: label, position and instructions."""

    label: str
    first: int
    instructions: list[Instruction]

    @property
    def end(self) -> int:
        return self.first + len(self.instructions)

    def contains(self, other: Loop) -> bool:
        return self != other and self.first <= other.first and other.end <= self.end

    @property
    def products(self) -> int:
        return sum("GMMA" in instruction.name for instruction in self.instructions)

    @property
    def is_loader(self) -> bool:
        """Whether it copies to shared memory and waits on an mbarrier, without products."""
        names = {instruction.name for instruction in self.instructions}
        copies = names & {"LDGSTS", "UTMALDG"} or ("LDG" in names and names & {"STS", "STSM", "STAS"})
        return bool(copies) and "SYNCS" in names and not self.products


@dataclass(frozen=True)
class Costs:
    """Costs per row, summed over the warps of a program that run the loop.

    `clk`: Clocks by unit: "issue", "integer", "special", "tensor", "shared" (accesses to shared memory),
      "spills" and "loads" (which take the same 128 bytes per clock).
    `stall_clk`: Clocks per row of the role with the most stalls.
    `draining_waits`: Waits of one warp of each role per iteration until no product is in flight.
    """

    warp_instructions: float
    clk: dict[str, float]
    stall_clk: float
    draining_waits: int


def kernels(text: str) -> dict[str, str]:
    """Code of each kernel by name, from a text of nvdisasm."""
    return dict(re.findall(r"^\.text\.([\w$.]+):\n(.*?)(?=^\.text\.|\Z)", text, flags=re.S | re.M))


def _code(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions, and the position of each label; ValueError without control codes."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []
    lines = iter(text.splitlines())
    for line in lines:
        if found := re.match(r"\s*(\.L_x?_?\d+):", line):
            waiting.append(found[1])
        elif found := _LINE.match(line):
            labels.update(dict.fromkeys(waiting, len(code)))
            waiting = []
            high = _HIGH_WORD.fullmatch(next(lines, ""))
            if high is None:
                raise ValueError(f"the second word of {found[1]!r} is missing")
            word = int(high[1], 16)
            code.append(Instruction(found[1], word >> _STALL_BIT & _STALL_MASK))
    if not code:
        raise ValueError("no instruction with its words in this text: it has to be of nvdisasm -c -hex")
    return code, labels


def loops(text: str) -> Iterator[Loop]:
    """Every loop of all kernels in a text of nvdisasm."""
    code, labels = _code(text)
    for at, instruction in enumerate(code):
        found = re.search(r"\bBRA\b.*`\((\.L\w+)\)", instruction.text)
        if found and labels.get(found[1], at + 1) <= at:
            yield Loop(found[1], labels[found[1]], code[labels[found[1]] : at + 1])


def _is_entered_at_its_label(loop: Loop, code: Sequence[Instruction], labels: dict[str, int]) -> bool:
    """False for a branch back from a wait that the compiler placed after the kernel's end."""
    seen, waiting = set[int](), [0]
    while waiting:
        at = waiting.pop()
        if at in seen or at == loop.first or at >= len(code):
            continue
        if at == loop.end - 1:
            return False
        seen.add(at)
        text, name = code[at].text, code[at].name
        if not re.match(r"(BRA\S* `|BRX|RET|EXIT)", text):
            waiting.append(at + 1)
        if name in ("BRA", "BRX"):
            waiting += [labels[label] for label in re.findall(r"\.L_x?_?\d+", text) if label in labels]
    return True


def role_loops(text: str) -> list[Loop]:
    """The loop of each role of a kernel's warps (module's docstring); ValueError without products."""
    code = _code(text)
    found = [loop for loop in loops(text) if _is_entered_at_its_label(loop, *code)]
    products = [loop for loop in found if loop.products]
    roles = [loop for loop in products if not any(loop.contains(other) for other in products)]
    if not roles:
        raise ValueError("no loop with HGMMA in this code")
    loaders = [loop for loop in found if loop.is_loader and not any(role.contains(loop) for role in roles)]
    inner = [loop for loop in loaders if not any(loop.contains(other) for other in loaders)]
    return roles + sorted(inner, key=lambda loop: len(loop.instructions))[-1:]


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


def least_load_lead(role: Sequence[Instruction]) -> float:
    """Stall clocks from a load of global memory to the first use of what it loads, the least of a loop's
    loads, as a share of the loop's; 1 without loads. A use may be in the next iteration.
    """
    leads = [1.0]
    for at, load in enumerate(role):
        if load.name == "LDG":
            first = int(re.findall(r"\bR(\d+)", load.text)[0])
            words = _access_bytes(load.operation) // (4 * _WARP)
            loaded = {f"R{register}" for register in range(first, first + words)}
            clk = load.stall_clk
            for other in [*role[at + 1 :], *role[:at]]:
                if loaded & set(re.findall(r"\bR\d+", other.text)):
                    break
                clk += other.stall_clk
            leads.append(clk / sum(instruction.stall_clk for instruction in role))
    return min(leads)


def costs(
    roles: Sequence[Sequence[Instruction]], rows: int, warps: int, *, programs: int = 1, box_bytes: int = 0
) -> Costs:
    """Costs of a program's loops per row.

    `roles`: Instructions of one warp in one iteration, by role.
    `rows`: Rows per iteration.
    `warps`: Warps of each role.
    `programs`: Programs of a multiprocessor, whose stalls pass at the same time.
    `box_bytes`: Bytes that a UTMALDG, which one thread of a program issues, writes to shared memory.
    """
    shared = spills = loads = multiply_adds = 0.0
    drains = 0
    instructions = [instruction for role in roles for instruction in role]
    for instruction in instructions:
        operation, name = instruction.operation, instruction.name
        if name in ("HGMMA", "QGMMA", "IGMMA"):
            read, products = _wgmma(_PREDICATE.sub("", instruction.text), operation)
            shared += read
            multiply_adds += products
        elif name in ("LDS", "STS", "ATOMS", "LDGSTS"):
            shared += _access_bytes(operation)
        elif name == "STAS":
            shared += 2 * _access_bytes(operation)
        elif name in ("LDSM", "STSM"):
            matrices = re.search(r"\.([24])\b", operation)
            shared += _SHARED_BYTES * (int(matrices[1]) if matrices else 1)
        elif name == "UTMALDG":
            if not box_bytes:
                raise ValueError("the loop has UTMALDG, and the bytes of its boxes are not given")
            shared += box_bytes / warps
        elif name in ("LDL", "STL"):
            spills += _access_bytes(operation)
        elif name == "LDG":
            loads += _access_bytes(operation)
        elif operation.startswith("WARPGROUP.DEPBAR") and instruction.text.endswith("0x0"):
            drains += 1
    per_row = warps / rows
    lanes = {
        unit: _WARP * sum(instruction.name in names for instruction in instructions)
        for unit, names in _UNITS.items()
    }
    clk = {
        "issue": len(instructions) / _ISSUED,
        **{unit: count / _LANES[unit] for unit, count in lanes.items()},
        "tensor": multiply_adds / _BF16_FMA,
        "shared": shared / _SHARED_BYTES,
        "spills": spills / _SHARED_BYTES,
        "loads": loads / _SHARED_BYTES,
    }
    return Costs(
        len(instructions) * per_row,
        {unit: clk[unit] * per_row for unit in clk},
        max(sum(instruction.stall_clk for instruction in role) for role in roles) / rows / programs,
        drains,
    )
