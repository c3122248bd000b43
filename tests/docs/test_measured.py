"""Lines of docs/benchmarks.md on CPU attention and on a host layout have the numbers of committed JSON."""

import json
import re
from pathlib import Path

from sgl_kvpool.layout import MLAKVCacheLayout

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "benchmarks.md").read_text()
LAYOUTS = [layout.value for layout in MLAKVCacheLayout]


def results(name, key="results"):
    return json.loads((ROOT / "docs" / "benchmarks" / f"{name}_cpu.json").read_text())[key]


def measured(beginning):
    """Cells of the table line that begins with `beginning`."""
    (line,) = (line for line in PAGE.splitlines() if line.startswith(f"| {beginning}"))
    return line.split(" | ")


def test_every_layout_has_its_numbers():
    of = {result["layout"]: result for result in results("host_attention")}
    title, _, _, large, *_ = measured("one decode layer, the same rows out of a pool 100 times larger")
    assert re.findall(r"`(\w+)`", title) == LAYOUTS
    assert re.findall(r"([\d.]+)x", large) == [f"{of[name]['large_over_small']:.2f}" for name in LAYOUTS]
    _, _, _, whole, *_ = measured("the same layer, 8192 rows out of a pool of 819200")
    assert re.findall(r"1/\d+", whole) == [f"1/{of[name]['whole_over_rows']:.0f}" for name in LAYOUTS]


def test_a_host_tier_of_fp4_has_its_numbers():
    """The line has two of the results; test_accuracy_page.py compares all, in docs/accuracy.md."""
    of = {(result["device_layout"], result["host_layout"]): result for result in results("host_layout")}

    def change(device, host):
        difference = of[device, host]["difference"]
        return f"{100 * difference['perplexity_change']:+.3f} % ({100 * difference['standard_error']:.3f})"

    title, _, found, *_ = measured("text behind a prefix that came back from an `fp4` host tier")
    for pair in (("bf16", "fp4"), ("fp4", "fp4")):
        assert f" {of[pair]['scored_tokens']} bytes:" in title
    assert found == f"{change('bf16', 'fp4')}; `fp4` on the device: {change('fp4', 'fp4')}"
