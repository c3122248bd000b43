"""README.md: its length, and the numbers of its table of layouts against the plan, the rows and the demo."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from fences import blocks

from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.sglang_plugin.options import OPTIONS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
#: First cell of the line without the plugin.
STOCK = "SGLang alone"


def lines_of(section):
    """Cells of the first table of a section by their first one."""
    _, _, text = README.partition(f"\n## {section}\n")
    table = text[text.index("| ") :].split("\n\n")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]
    return {row[0].strip("`"): row[1:] for row in rows}


LAYOUTS = lines_of("Which layout")


def test_readme_is_short():
    assert len(README.split()) <= 900


def test_every_layout_has_its_row_and_its_perplexity():
    assert sorted(LAYOUTS) == sorted([STOCK, *(layout.value for layout in MLAKVCacheLayout)])
    for layout in MLAKVCacheLayout:
        assert int(LAYOUTS[layout.value][0]) == layout.row_format(512, 64).row_bytes
    file = ROOT / "docs" / "benchmarks" / "demo_smollm2_cpu.json"
    for served in json.loads(file.read_text())["results"]:
        change = served["difference"]
        text = "0" if change is None else f"{100 * change['perplexity_change']:+.2f} %"
        assert LAYOUTS[served["layout"]][3] == text


def test_perplexities_of_fp4_and_of_sglangs_fp4_are_the_measured_ones():
    results = json.loads((ROOT / "docs" / "benchmarks" / "llm_cpu.json").read_text())["results"]
    for name in ("`fp4`", "SGLang's `fp4_mx_block16`"):
        (found,) = (one["difference"]["perplexity_change"] for one in results if one["name"] == name)
        assert f"{100 * found:+.1f} %" in README


@pytest.mark.slow
def test_tokens_are_those_of_the_plan():
    """The command of the page, and what it says of each layout."""
    (line,) = (text for _, text in blocks(README) if text.startswith("sgl-kvpool plan "))
    program = Path(sys.executable).with_name("sgl-kvpool")
    command = [program, *shlex.split(line)[1:], "--json"]
    # As from a shell: other tests set TRITON_INTERPRET, and the interpreted kernel has a workspace of another
    # size.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    planned = {server["layout"] or STOCK: server for server in json.loads(done.stdout)["servers"]}
    assert planned.keys() == LAYOUTS.keys()
    for name, (_, tokens, requests, *_) in LAYOUTS.items():
        assert (int(tokens), int(requests)) == (planned[name]["tokens"], planned[name]["requests"]), name


def test_every_argument_is_listed_with_its_values():
    listed = lines_of("Arguments")
    assert list(listed) == [option.flag for option in OPTIONS]
    for option in OPTIONS[1:]:
        values = re.findall(r"`(\w+)`", listed[option.flag][0])
        assert sorted(values) == sorted({option.default, *option.values})
