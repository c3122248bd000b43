"""Registers of the warp groups of `gluon_wide`, by its machine code."""

import re

from scripts.figures import loop_costs


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
    if re.search(r"\.128\b|\.M88\.4", text):
        return max(numbers) + 3
    return max(numbers) + bool(re.search(r"\.64\b|\.WIDE|\.M88\.2", text))
