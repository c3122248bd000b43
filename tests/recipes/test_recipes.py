"""Published launch commands with every layout: what is refused and why, and the table of the page.

The configurations in models.json have the fields of the released checkpoints that SGLang reads here.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import resolve_recipes as recipes

from scripts.kit.outputs import updated
from sgl_kvpool.layout import MLAKVCacheLayout

#: SGLang's own reason against a published command on a Hopper GPU.
STOCK = {"k3-dcp4": "CuteDSL MLA backend is only supported on Blackwell GPUs"}
#: Commands that no layout serves, whatever is left out.
NEVER = {
    "k3-dcp4": "--dcp-size 4",
    "v32-hisparse-decode": "--enable-hisparse",
    "glm51-pd-decode-hisparse": "--enable-hisparse",
    "minicpm3": "qk_rope_head_dim=32",
}
WAYS_OUT = ("leave", "use ", "serve ")


@pytest.fixture(scope="module")
def answers():
    """What `resolve_recipes.py` prints, in a process of its own: it describes a GPU to SGLang."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVPOOL")}
    done = subprocess.run(
        [sys.executable, Path(recipes.__file__)],
        env={**environment, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def refused(answers, column, which=0):
    return {each["id"]: why for each in answers if (why := each["refused"][column][which]) is not None}


def test_every_command_has_a_source_and_a_date():
    found = recipes.published()
    assert len({each["id"] for each in found}) == len(found) >= 84
    assert all(each["source"] and each["date"] for each in found)
    named = {model for models in recipes.FAMILIES.values() for model in models}
    assert named == {each["model"] for each in found}


def test_sglang_alone_accepts_them(answers):
    found = refused(answers, "stock")
    assert list(found) == list(STOCK)
    assert all(STOCK[name] in why for name, why in found.items())


@pytest.mark.parametrize("layout", MLAKVCacheLayout)
def test_every_reason_names_a_way_out(answers, layout):
    for which in (0, 1):
        for name, why in refused(answers, layout, which).items():
            assert name in STOCK or any(word in why for word in WAYS_OUT), (name, why)


def test_the_commands_that_no_layout_serves(answers):
    found = [refused(answers, layout, 1) for layout in MLAKVCacheLayout]
    never = set.intersection(*map(set, found))
    assert never == set(NEVER)
    assert all(
        NEVER[name] in why or name in STOCK for one in found for name, why in one.items() if name in never
    )


def test_drafts_of_ranks_that_share_a_prefix_pool(answers):
    said = refused(answers, recipes.SPREAD)
    assert not {"v3-mtp-defaults", "k25-eagle3", "k26-h20-3e-eagle"} & set(said)
    assert "fp4 and --speculative-adaptive: " in said["v3-adaptive-spec"]


def test_a_sparse_model_over_ranks(answers):
    """Its command names a dtype, and kernels that do not merge ranks; without them only `fp8` is refused."""
    (found,) = (each["refused"] for each in answers if each["id"] == "glm52-dcp8")
    for layout in MLAKVCacheLayout:
        ours = f"--kv-cache-layout {layout}"
        as_published, without = found[layout]
        if layout is MLAKVCacheLayout.FP8_NOPE_FP8_ROPE:
            assert without.startswith(f"--dcp-size 8 does not work with {ours} and Glm")
            continue
        assert without is None
        kernels = " and ".join(f"--dsa-{phase}-backend flashmla_kv" for phase in ("prefill", "decode"))
        said = f"{kernels} cannot read rows of {ours} with --dcp-size 8; leave them out, and both phases use "
        dtype = f"--kv-cache-dtype 'fp8_e4m3' contradicts {ours}; leave it out, "
        assert as_published.startswith((said, dtype))


def test_the_page_has_the_table(answers):
    text = recipes.PAGE.read_text()
    tables = {"published": lambda: recipes.table(answers)}
    assert updated(text, tables) == text, "run python tests/recipes/resolve_recipes.py --write"
