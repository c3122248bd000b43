"""README.md: its length, and the numbers of its table of layouts against the plan, the rows and the demo."""

import json
import re
import shlex

import pytest
from fences import blocks

from scripts import ROOT
from sgl_kvpool.cli import main
from sgl_kvpool.commands import plan as command
from sgl_kvpool.layout import MLAKVCacheLayout

README = (ROOT / "README.md").read_text()
#: First cells of the lines without the plugin, and the arguments of the second one.
STOCK, STOCK_FP8 = "SGLang, bf16", "SGLang, fp8 with flashmla"
FP8 = ["--tp-size", "8", "--kv-cache-dtype", "fp8_e4m3", "--attention-backend", "flashmla"]


def lines_of(section):
    """Cells of the first table of a section by their first one."""
    _, _, text = README.partition(f"\n## {section}\n")
    table = text[text.index("| ") :].split("\n\n")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]
    return {row[0].strip("`"): row[1:] for row in rows}


LAYOUTS = lines_of("Which layout")


def test_readme_is_short():
    assert len(README.split()) <= 800


def test_every_layout_has_its_row_and_its_perplexity():
    assert sorted(LAYOUTS) == sorted([STOCK, STOCK_FP8, *(layout.value for layout in MLAKVCacheLayout)])
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
        (found,) = (one["difference"]["perplexity_change"] for one in results if one["job"]["name"] == name)
        assert f"{100 * found:+.1f} %" in README


def test_the_range_of_each_family_follows_from_its_configuration():
    """Bytes of a token's rows and index keys, 132 per layer that selects, as in the plan of these models."""
    configs = json.loads((ROOT / "tests" / "recipes" / "models.json").read_text())
    folder = ROOT / "tests" / "commands" / "plan" / "configs"
    configs |= {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}
    for family, names in (
        ("DeepSeek-V3, R1 or Kimi-K2", ("deepseek_v3", "kimi_k2")),
        ("DeepSeek-V3.2 or GLM-5,", ("deepseek_v32", "glm5")),
        ("GLM-5.2", ("glm52",)),
    ):
        shown = re.search(rf"([\d.]+) to ([\d.]+)( times bf16's tokens)?\swith {family}", README)
        for config in map(configs.get, names):
            layers = config["num_hidden_layers"]
            selecting = config.get("indexer_types", ["full"] * layers).count("full")
            keys_bytes = 132 * selecting / layers if "index_topk" in config else 0
            bf16, *narrow = (row.row_format(512, 64).row_bytes + keys_bytes for row in MLAKVCacheLayout)
            found = bf16 / max(narrow), bf16 / min(narrow)
            # Buffers of kvpool_mla are in the plan only.
            assert tuple(map(float, shown.groups()[:2])) == pytest.approx(found, abs=0.007)


@pytest.mark.slow
def test_tokens_are_those_of_the_plan(monkeypatch, capsys):
    """The command of the page, which here also plans a server without the plugin that stores fp8."""
    monkeypatch.chdir(ROOT)
    # As from a shell: the interpreted kernel has a workspace of another size.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    ask, fp8 = command.ask, {}

    def ask_one_more(machine, servers):
        *answers, last = ask(machine, [*servers, {**servers[0], "arguments": FP8}])
        fp8.update(last)
        return answers

    monkeypatch.setattr(command, "ask", ask_one_more)
    lines = [line for _, text in blocks(README) for line in text.splitlines()]
    (command_line,) = (line for line in lines if line.startswith("sgl-kvpool plan "))
    assert main([*shlex.split(command_line)[1:], "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    planned = {each["layout"] or STOCK: (each["tokens"], each["requests"]) for each in plan["servers"]}
    planned[STOCK_FP8] = fp8["tokens"], fp8["tokens"] // plan["context_tokens"]
    shown = {name: tuple(map(int, cells[1:3])) for name, cells in LAYOUTS.items()}
    assert shown == planned
