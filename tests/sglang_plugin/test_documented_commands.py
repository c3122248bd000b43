"""Commands of the pages: SGLang accepts the server commands.

Every `sglang serve` of a fenced block is resolved with a small model's configuration, with
this machine's answers changed to those of a Hopper GPU. This shows only that the arguments exist and are
compatible.
"""

import re
import shlex
from pathlib import Path

import pytest
from fences import blocks
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStoreConfig

ROOT = Path(__file__).resolve().parents[2]

PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
#: The checkpoint used for MODEL, for sections of models other than dense MLA.
MODELS = {"Sparse attention": "dsa", "Hybrid models": "kda"}


def commands():
    """Server commands as (page, section, environment, arguments), except commands with an ellipsis."""
    for page in PAGES:
        parts = re.split(r"^## ", page.read_text(), flags=re.MULTILINE)
        for section, block in ((part.partition("\n")[0], text) for part in parts for _, text in blocks(part)):
            for line in block.replace("\\\n", " ").splitlines():
                if "sglang serve " not in line or " ... " in line:
                    continue
                words = shlex.split(line, comments=True)
                assignments = [word for word in words[: words.index("sglang")] if "=" in word]
                environment = dict(word.split("=", 1) for word in assignments)
                yield page.name, section, environment, words[words.index("sglang") + 2 :]


COMMANDS = list(commands())


@pytest.mark.parametrize(
    ("_", "section", "environment", "argv"), COMMANDS, ids=[f"{c[0]}-{i}" for i, c in enumerate(COMMANDS)]
)
def test_servers_take_their_arguments(resolve, checkpoints, monkeypatch, _, section, environment, argv):

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    at = argv.index("--model-path")
    assert argv[at + 1] == "MODEL"
    rest = argv[:at] + argv[at + 2 :]
    resolve(checkpoints[MODELS.get(section, "mla")], *rest, device="cuda")


def test_there_are_commands():
    pages = [command[0] for command in COMMANDS]
    assert pages.count("transfer.md") >= 3
    assert {"README.md", "operating.md"} <= set(pages)
    assert MODELS.keys() <= {command[1] for command in COMMANDS}


def test_mooncakes_environment(monkeypatch):
    """SGLang reads from the page's environment what the steps before it have set up."""
    flag = "--hicache-storage-backend"
    (store,) = [command for command in COMMANDS if command[0] == "transfer.md" and flag in command[3]]
    for name, value in store[2].items():
        monkeypatch.setenv(name, value)
    wanted = {"master_server_address": "10.0.0.9:50051", "protocol": "rdma", "device_name": ""}
    wanted |= {"global_segment_size": 0, "metadata_server": "P2PHANDSHAKE", "local_hostname": "10.0.0.1"}
    assert MooncakeStoreConfig.load_from_env() == MooncakeStoreConfig.load_from_extra_config(wanted)
