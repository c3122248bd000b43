"""docs/reference.md is the output of `sgl-kvpool reference`, which has every argument, metric and event."""

import re
from pathlib import Path

from sgl_kvpool import env
from sgl_kvpool.attention.readers import KVPOOL_BACKEND
from sgl_kvpool.attention.topk_transform import IMPLEMENTATIONS
from sgl_kvpool.cli import main
from sgl_kvpool.events import FAILURES, METRICS, UNCACHED
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.sglang_plugin.hook_groups import GROUPS
from sgl_kvpool.sglang_plugin.options import OPTIONS
from sgl_kvpool.sglang_plugin.rules import features

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference.md"


def first_cells(title):
    """Names in the first cells of a section's table."""
    section = PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


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
    section = PAGE.read_text().split("\n## Hooks\n")[1]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][2:]
    hooks = [".".join(target.split(".")[-2:]) for group in GROUPS for target in group.declared.hooks]
    assert sorted(row[1].strip("`") for row in rows) == sorted(hooks)
    assert all(len(row) == 3 and len(row[2].split()) > 4 for row in rows)
