"""docs/reference.md is the output of `sgl-kvpool reference`, which has every argument, metric and event."""

import re
from pathlib import Path

from sgl_kvpool import env
from sgl_kvpool.cli import main
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.metrics import FAILURES, METRICS, UNCACHED
from sgl_kvpool.sglang_plugin.hook_groups import GROUPS
from sgl_kvpool.sglang_plugin.hook_points import TESTED
from sgl_kvpool.sglang_plugin.options import OPTIONS
from sgl_kvpool.sglang_plugin.rules import features
from sgl_kvpool.srt.facts.readers import KVPOOL_BACKEND
from sgl_kvpool.srt.facts.topk_transform import IMPLEMENTATIONS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference.md"


def entries(title):
    """Names and text of each entry of a section's table or lists; of a table the text is its other cells."""
    section = PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    found = re.findall(r"^[|*] (`.+?)(?: \| |: )(.+)$", section, re.MULTILINE)
    return [(re.findall(r"`([^`]+)`", names), text) for names, text in found]


def first_cells(title):
    """All names of a section's entries."""
    return [name for names, _ in entries(title) for name in names]


def test_the_page_is_what_the_command_prints(capsys):
    assert main(["reference"]) == 0
    assert capsys.readouterr().out == PAGE.read_text(), "sgl-kvpool reference > docs/reference.md"


def test_tables_are_whole():
    assert first_cells("Layouts") == [layout.value for layout in MLAKVCacheLayout]
    assert first_cells("Arguments") == [option.flag for option in OPTIONS]
    assert first_cells("Environment variables") == [*env.FLAGS, *env.CHOICES]
    assert first_cells("Metrics") == [metric.shown_name for metric in METRICS.values()]
    assert (first_cells("Failures"), first_cells("Uncached pages")) == (list(FAILURES), list(UNCACHED))
    refused = {
        feature.flag
        for name in vars(features)
        if name.endswith("_FEATURES")
        for feature in getattr(features, name)
    }
    assert refused <= set(first_cells("Refused features"))
    assert KVPOOL_BACKEND in first_cells("Attention backends")
    assert all(f"`{name}`" in PAGE.read_text() for name in IMPLEMENTATIONS)


def test_every_hook_is_described():
    hooks = [".".join(target.split(".")[-2:]) for group in GROUPS for target in group.declared.hooks]
    assert sorted([*first_cells("Hooks"), *first_cells("Repairs")]) == sorted(hooks)
    assert f"look at them again in {TESTED.rpartition('<')[2]}." in PAGE.read_text()
    assert all(len(text.split()) > 4 for _, text in entries("Hooks"))
