"""README's table of measurements holds every layout, with the numbers of the committed JSON."""

import json
from pathlib import Path

from sgl_kvpool.layout import MLAKVCacheLayout

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = [layout.value for layout in MLAKVCacheLayout]


def results(name, key="results"):
    return json.loads((ROOT / "docs" / "benchmarks" / f"{name}_cpu.json").read_text())[key]


def cells(layout):
    layer = next(r for r in results("host_attention") if r["layout"] == layout)
    return [f"{layer['large_over_small']:.2f}", f"1/{layer['whole_over_rows']:.0f}"]


def test_every_layout_has_its_numbers():
    section = (ROOT / "README.md").read_text().split("\n## Measured\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    found = {row[0].strip(" `"): [cell.strip() for cell in row[1:] if cell.strip()] for row in rows}
    assert found == {layout: cells(layout) for layout in LAYOUTS}


def test_host_layouts_have_their_numbers():
    section = " ".join((ROOT / "README.md").read_text().split("\n## Measured\n")[1].split())
    for result in results("host_layout")[1:3]:
        change = result["difference"]
        text = f"{100 * change['perplexity_change']:+.3f} % ({100 * change['standard_error']:.3f})"
        assert f"`{result['host_layout']}` {text}" in section
