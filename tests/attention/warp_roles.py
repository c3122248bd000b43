"""The warp groups of `gluon_wide` by their code: order of barriers and data in PTX, registers in SASS; and a
model that carries out their protocol in every interleaving.
"""

import re

from scripts.figures import loop_costs

#: Barriers in the order in which the kernel makes them, with the arrivals that complete a phase.
BARRIERS = {"full0": 1, "empty0": 2, "full1": 1, "empty1": 2, "p_full": 1, "p_empty": 1}
#: Kinds of accesses to shared memory by a pattern of their instructions.
KINDS = {
    "product": r"wgmma\.mma_async",
    "products done": r"wgmma\.wait_group",
    "load": r"ld\.shared|ldmatrix",
    "store": r"st\.shared|stmatrix",
    "proxy fence": r"fence\.proxy\.async",
    "barrier": r"bar\.sync",
}
_INSTRUCTION = re.compile(r"(@!?%p\d+ )?([a-z][\w.:]*)\s*(.*);")


def _value(values, operand):
    if operand == "global_smem":
        return 0
    return int(operand) if re.fullmatch(r"-?\d+", operand) else values.get(operand)


def _computed(operation, numbers):
    """Result of an integer instruction, 32 bits; None if it is not known."""
    name = operation.partition(".")[0]
    if None in numbers:
        return None
    first, *rest = numbers
    found = {
        "mov": lambda: first, "not": lambda: ~first, "add": lambda: first + rest[0],
        "sub": lambda: first - rest[0], "and": lambda: first & rest[0], "or": lambda: first | rest[0],
        "xor": lambda: first ^ rest[0], "shl": lambda: first << rest[0],
        "shr": lambda: (first & 0xFFFFFFFF) >> rest[0],
        "bfe": lambda: first >> rest[0] & ((1 << rest[1]) - 1),
    }.get(name)  # fmt: skip
    return None if found is None else found() & 0xFFFFFFFF


class _Text:
    """Instructions of a kernel's PTX, and where its labels are."""

    def __init__(self, ptx):
        self.code, self.labels, self.known, defined = [], {}, {}, {}
        for line in map(str.strip, ptx.splitlines()):
            if found := re.match(r"(\$L__BB\w+):", line):
                self.labels[found[1]] = len(self.code)
            elif found := _INSTRUCTION.match(re.sub(r"\s+", " ", line)):
                self.code.append((found[1], found[2], found[3].split(", ")))
                defined.setdefault(found[3].split(", ")[0], []).append(self.code[-1])
        for name, [(_, operation, operands), *more] in defined.items():
            if operation == "mov.b32" and not more:  # a constant, of whichever role
                self.known[name] = _value({}, operands[1])

    def has_barrier(self, first, end):
        return any(operation.startswith("mbarrier.") for _, operation, _ in self.code[first:end])

    def run(self, at, blocks, parts=1):
        """Events of one thread from an instruction on, up to each of the next setmaxnreg.

        What depends on memory or on the thread is unknown. Branches forward are not taken, and loops with
        barriers run once per block.
        """
        values, taken, events = dict(self.known), {}, [[]]
        while True:
            predicate, operation, operands = self.code[at]
            at += 1
            if operation.startswith("setmaxnreg"):
                if len(events) == parts:
                    return events
                events.append([])
            elif operation.startswith("bra") and operands[0] in self.labels:
                target = self.labels[operands[0]]
                again = taken.get(at, 1) < blocks and self.has_barrier(target, at)
                if predicate is None or (target < at and again):
                    taken[at] = taken.get(at, 1) + (predicate is not None)
                    at = target
            elif operation.startswith("mbarrier."):
                numbers = [_value(values, operand.strip("[]")) for operand in operands]
                events[-1].append((operation.split(".")[1], *numbers[-2:]))
            else:
                events[-1] += [kind for kind, pattern in KINDS.items() if re.match(pattern, operation)]
                numbers = [_value(values, operand) for operand in operands[1:]]
                for name in re.findall(r"%\w+", operands[0]) if operands else ():
                    values[name] = None if predicate else _computed(operation, numbers)
        return events


def events_of(ptx, blocks):
    """What each role does in a list of this many blocks: waits with barrier and parity, arrivals, and between
    them the kinds of accesses to shared memory, without repetitions.
    """
    text = _Text(ptx)
    numbered = reversed(list(enumerate(text.code)))  # of equal numbers the first counts
    marks = {operands[0]: at for at, (_, operation, operands) in numbered if "nreg.inc" in operation}
    # The first warp group begins with 256 registers, makes the barriers and goes on as the scores' role.
    first = marks.pop("256")
    values = marks.pop("160")
    (decoder,) = marks.values()
    made, scores = text.run(first + 1, blocks, 2)
    made = [event for event in made if event[0] == "init"]
    assert [count for _, _, count in made] == list(BARRIERS.values())
    names = {address: name for (_, address, _), name in zip(made, BARRIERS, strict=True)}
    found = {"scores": [], "values": [], "decoder": []}
    roles = (scores, *text.run(values + 1, blocks), *text.run(decoder + 1, blocks))
    for role, events in zip(found.values(), roles, strict=True):
        for event in events:
            if event[0] == "try_wait":
                event = ("wait", names.get(event[1]), event[2])
            elif event[0] == "arrive":
                event = ("arrive", names.get(event[2]))
            if not role or event != role[-1]:
                role.append(event)
    return found


def role_registers(sass):
    """(registers of a thread, highest register that it names) behind each setmaxnreg, up to the next one."""
    code, labels = loop_costs._code(sass)
    found = []
    for at, one in enumerate(code):
        if one.name != "USETMAXREG":
            continue
        seen, waiting = set(), [at + 1]
        while waiting:
            now = waiting.pop()
            if now in seen or code[now].name == "USETMAXREG":
                continue
            seen.add(now)
            assert code[now].name not in ("BRX", "JMX", "CALL", "RET"), code[now].text
            if target := re.search(r"`\((\.L\w+)\)", code[now].text):
                waiting.append(labels[target[1]])
            if not re.fullmatch(r"EXIT|BRA `\(\.L\w+\)", code[now].text):
                waiting.append(now + 1)
        found.append((int(one.text.split()[-1], 16), max(_highest(code[i].text) for i in seen)))
    return found


def _highest(text):
    """Highest register of an instruction, whose operands may be several registers."""
    numbers = [int(number) for number in re.findall(r"\bR(\d+)\b", text)]
    if not numbers:
        return -1
    if products := re.search(r"HGMMA\.64x(\d+)x", text):  # accumulators, and four registers of A
        return max(numbers[0] + int(products[1]) // 2 - 1, *(number + 3 for number in numbers[1:-1]), 0)
    wide = (
        3 if re.search(r"\.128\b|\.M88\.4", text) else int(bool(re.search(r"\.64\b|\.WIDE|\.M88\.2", text)))
    )
    return max(numbers) + wide


# The protocol

#: What a role accesses behind each barrier operation of block b: "r" or "w", the data, and whose block it is.
#: `{at}` is a set of tiles, `{n}` and `{next}` are sets of row numbers.
_ACCESSES = {
    "scores": ("r t0{at} b, r rope{at} b, r num{n} b", "w weights b, w factors b", "r t0{at} b", ""),
    "values": ("r factors b, r weights b, r t1{at} b", "", ""),
    "decoder": ("w num{next} b+1, w t0{at} b, w t1{at} b, w rope{at} b", ""),
}
#: The same before the first and behind the last block.
_FIRST = {"scores": "", "values": "", "decoder": "w num0 b"}
_LAST = {"scores": ("w factors end", ""), "values": ("r factors end",), "decoder": ()}


def _steps(text, block):
    """(begin, end) of each access, all of which may overlap."""
    names = {"at": block & 1, "n": block & 3, "next": (block + 1) & 3}
    found = [one.split() for one in text.format(**names).split(", ") if one]
    tags = {"b": block, "b+1": block + 1, "end": -2}
    accesses = [(kind, data, tags[tag]) for kind, data, tag in found]
    return [("begin", *one) for one in accesses] + [("end", *one) for one in accesses]


def programs_of(events, blocks):
    """Steps of each role: its barrier operations, as events of `events_of`, with accesses between them."""
    programs = []
    for role, accesses in _ACCESSES.items():
        program = _steps(_FIRST[role], 0)
        operations = [event for event in events[role] if event[0] in ("wait", "arrive")]
        for number, operation in enumerate(operations):
            block, place = divmod(number, len(accesses))
            more = accesses[place] if block < blocks else _LAST[role][place]
            program += [operation, *_steps(more, block)]
        programs.append(program)
    return programs


def fault_of(programs):
    """What goes wrong in some interleaving of the roles' steps; None if nothing does.

    A wait returns in the phase after the one whose parity it names. It is a fault to write data while a role
    reads or writes it, to read data while a role writes it, and to read data of another block.
    """
    data = sorted({step[2] for program in programs for step in program if step[0] in ("begin", "end")})
    first = (
        (0,) * len(programs),
        tuple((0, count) for count in BARRIERS.values()),
        tuple((None, 0, 0) for _ in data),
    )
    names, seen, waiting = list(BARRIERS), {first}, [first]
    while waiting:
        places, barriers, cells = waiting.pop()
        moved = False
        for role, program in enumerate(programs):
            if places[role] == len(program):
                continue
            step, now, held = program[places[role]], list(barriers), list(cells)
            if step[0] == "wait":
                if now[names.index(step[1])][0] == step[2]:
                    continue
            elif step[0] == "arrive":
                at = names.index(step[1])
                phase, left = now[at]
                now[at] = (phase, left - 1) if left > 1 else (phase ^ 1, BARRIERS[step[1]])
            else:
                at = data.index(step[2])
                block, readers, writers = held[at]
                if step[0] == "begin" and (writers or (readers if step[1] == "w" else block != step[3])):
                    return f"role {role}, {step}: block {block}, {readers} readers, {writers} writers"
                change = 1 if step[0] == "begin" else -1
                if step[1] == "r":
                    held[at] = (block, readers + change, writers)
                else:
                    held[at] = (step[3], readers, writers + change)
            moved = True
            state = (tuple(p + (i == role) for i, p in enumerate(places)), tuple(now), tuple(held))
            if state not in seen:
                seen.add(state)
                waiting.append(state)
        if not moved and any(place < len(program) for place, program in zip(places, programs, strict=True)):
            return f"deadlock at {[p[i : i + 1] for p, i in zip(programs, places, strict=True)]}"
    return None
