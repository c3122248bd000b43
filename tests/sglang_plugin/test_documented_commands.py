"""Commands and numbers of the pages: SGLang accepts the server commands, byte counts are those of the rows.

Every `python -m sglang.launch_server` of a fenced block is resolved with a small model's configuration, with
this machine's answers changed to those of a Hopper GPU. This shows only that the arguments exist and are
compatible.
"""

import shlex
from pathlib import Path

import pytest
from fences import blocks

from sgl_kvpool.layout import MLAKVCacheLayout

ROOT = Path(__file__).resolve().parents[2]

PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
#: The checkpoint used for MODEL, for pages of models other than dense MLA.
MODELS = {"sparse.md": "dsa", "hybrid.md": "kda"}
SCALING = (ROOT / "docs" / "scaling.md").read_text()


def commands():
    """Server commands of all pages as (page, environment, arguments), except commands with an ellipsis."""
    for page in PAGES:
        for _, block in blocks(page.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                if "sglang.launch_server" not in line or " ... " in line:
                    continue
                words = shlex.split(line, comments=True)
                assignments = [word for word in words[: words.index("python")] if "=" in word]
                environment = dict(word.split("=", 1) for word in assignments)
                yield page.name, environment, words[words.index("sglang.launch_server") + 1 :]


COMMANDS = list(commands())


@pytest.mark.parametrize(
    ("page", "environment", "argv"), COMMANDS, ids=[f"{c[0]}-{i}" for i, c in enumerate(COMMANDS)]
)
def test_servers_take_their_arguments(resolve, checkpoints, monkeypatch, page, environment, argv):
    import torch
    from sglang.srt.arg_groups import mamba_hook

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(mamba_hook, "_platform_supports_mamba_cache_extra_buffer", lambda: True)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    at = argv.index("--model-path")
    assert argv[at + 1] == "MODEL"
    rest = argv[:at] + argv[at + 2 :]
    resolve(checkpoints[MODELS.get(page, "mla")], *rest, device="cuda")


def test_there_are_commands():
    pages = [page for page, _, _ in COMMANDS]
    assert pages.count("scaling.md") >= 8
    assert {"README.md", "sparse.md", "hybrid.md"} <= set(pages)


def test_mooncakes_environment_and_argument_agree(monkeypatch):
    """SGLang reads equal configurations from the page's environment and from its argument."""
    import json

    from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStoreConfig

    flag = "--hicache-storage-backend"
    stores = [command for command in COMMANDS if command[0] == "scaling.md" and flag in command[2]]
    from_environment, from_argument = stores
    for name, value in from_environment[1].items():
        monkeypatch.setenv(name, value)
    extra = json.loads(from_argument[2][from_argument[2].index(f"{flag}-extra-config") + 1])
    assert MooncakeStoreConfig.load_from_env() == MooncakeStoreConfig.load_from_extra_config(extra)


# -------------------------------------------------------------------- bytes


def lines_of(name):
    """Cells of the table between the two comments of this name, by layout."""
    table = SCALING.split(f"<!-- {name} -->")[1].split(f"<!-- end of {name} -->")[0]
    rows = [line.strip("|").split("|") for line in table.split("\n") if line.startswith("| `")]
    return {cells[0].strip().strip("`"): [cell.strip() for cell in cells[1:]] for cells in rows}


def row_bytes(layout, *, is_dsa=False):
    return MLAKVCacheLayout(layout).pool_row_format(512, 64, is_dsa=is_dsa).row_bytes


#: SGLang's index keys: 128 e4m3 values and a float32 scale.
INDEX_KEY_BYTES = 128 + 4


@pytest.mark.parametrize("layout", MLAKVCacheLayout)
def test_bytes_per_token(layout):
    row = row_bytes(layout)
    sparse = 61 * (row_bytes(layout, is_dsa=True) + INDEX_KEY_BYTES)
    expected = [61 * row, 62 * row, sparse, 7 * row, f"{row / row_bytes('bf16'):.2f}"]
    assert lines_of("bytes per token")[layout.value] == [str(cell) for cell in expected]


@pytest.mark.parametrize("layout", MLAKVCacheLayout)
def test_bytes_per_prompt(layout):
    token = 61 * row_bytes(layout)
    expected = [
        f"{64 * token / 1e6:.2f}",
        f"{32768 * token / 1e9:.2f}",
        f"{131072 * token / 1e9:.2f}",
        f"{1e12 / token / 1e6:.1f}",
    ]
    assert lines_of("bytes per prompt")[layout.value] == expected


def test_index_keys_are_of_sglangs_size():
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

    quantized = DSATokenToKVPool.quant_block_size
    assert 128 + 128 // quantized * 4 == INDEX_KEY_BYTES
