"""The table at the head of docs/compatibility.md, against SGLang's resolution of each line's arguments.

A layout without a column of its own has the state of the column "others", where `ran (fp4)` names one.
"""

import re
import shlex
from pathlib import Path

import pytest
from codec_oracle import LAYOUTS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "compatibility.md"


def table():
    """Lines of the first table: (feature, device, arguments, state by layout, reason)."""
    section = PAGE.read_text().split("\n## ")[1]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    header = [cell.strip() for cell in lines[0].strip("|").split("|")]
    assert header[2:-1] == ["`bf16`", "others"]
    rows = []
    for line in lines[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == len(header), line
        device, _, rest = cells[1].partition(" ")
        argv = () if rest == "(default)" else tuple(shlex.split(rest.strip("`")))
        states = {layout: cells[2 if layout == "bf16" else 3].partition(" (")[0] for layout in LAYOUTS}
        rows.append((cells[0], device, argv, states, cells[-1]))
    return rows


ROWS = table()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("row", ROWS, ids=[f"{row[1]}-{row[0]}" for row in ROWS])
def test_what_is_refused_is_refused_and_nothing_else(resolve, checkpoints, row, layout):
    _, device, argv, states, _ = row
    arguments = ("--kv-cache-layout", layout, *argv)
    if states[layout] == "refused":
        with pytest.raises(ValueError, match="does not work with") as error:
            resolve(checkpoints["mla"], *arguments, device=device)
        # Our refusal, with the name of the argument and a way out.
        assert re.search(r"kvpool_mla|--kv-cache-layout", str(error.value))
        assert str(error.value).split()[0] in argv
        assert "leave" in str(error.value) or "use" in str(error.value)
    else:
        resolve(checkpoints["mla"], *arguments, device=device)


def test_sglang_accepts_every_line_without_a_layout(resolve, checkpoints):
    for _, device, argv, _, _ in ROWS:
        resolve(checkpoints["mla"], *argv, device=device)


def test_what_ran_or_was_tested_names_a_test_that_exists():
    for title, _, _, states, shown in ROWS:
        named = re.findall(r"tests/[\w/]+(?:\.py)?", shown)
        assert all((ROOT / name).exists() for name in named), title
        if shown != "same" and {"ran", "tested"} & set(states.values()):
            assert named, title
        for function in re.findall(r"`(test_\w+)`", shown):
            assert any(f"def {function}(" in (ROOT / name).read_text() for name in named), function
