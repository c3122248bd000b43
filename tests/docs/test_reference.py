"""docs/reference.md is what `scripts.figures.reference` prints, with every argument, metric and event."""

import re
from pathlib import Path

from scripts.figures.reference import page
from sgl_kvpool.sglang_plugin.hook_groups import GROUPS
from sgl_kvpool.sglang_plugin.hook_points import TESTED

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference.md"


def entries(title):
    """Names and text of each entry of a section's table or lists; of a table the text is its other cells."""
    section = PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    found = re.findall(r"^[|*] (`.+?)(?: \| |: )(.+)$", section, re.MULTILINE)
    return [(re.findall(r"`([^`]+)`", names), text) for names, text in found]


def test_the_page_is_what_the_program_prints():
    assert f"{page()}\n" == PAGE.read_text(), "python -m scripts.figures.reference > docs/reference.md"


def test_every_hook_is_described():
    hooks = [".".join(target.split(".")[-2:]) for group in GROUPS for target in group.declared.hooks]
    listed = [name for title in ("Hooks", "Repairs") for names, _ in entries(title) for name in names]
    assert sorted(listed) == sorted(hooks)
    assert f"look at them again in {TESTED.rpartition('<')[2]}." in PAGE.read_text()
    assert all(len(text.split()) > 4 for _, text in entries("Hooks"))
