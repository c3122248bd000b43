"""Dense models and their drafts on two ranks that share a prefix pool, against one rank.

A copying checkpoint (`copying_deepseek`) has its drafts accepted only while the draft finds its own rows.
"""

import json
import os

import copying_deepseek
import pytest

from emulated_cuda import copying_engine
from emulated_cuda.copying_engine import NEW, OWN, PROMPTS
from emulated_cuda.test_models import CHUNK, OPTIONS
from emulated_cuda.test_sparse_mtp import accept_length, tokens_and_drafts

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

#: Tokens that the prompts share, some chunks; odd, so that they end within a group of ranks.
SHARED = 2 * CHUNK + 1
ONE_STEP = {"speculative_num_steps": 1, "speculative_num_draft_tokens": 2}
RANKS = {"tp_size": 2, "dcp_size": 2, "cuda_graph_bs_decode": [PROMPTS]}
TIER = {"enable_hierarchical_cache": True, "hicache_ratio": 2}
COMPUTED = [("computed", "", "", NEW)]
DEVICE, HOST = ("device hit", "", "", NEW), ("host hit", "evict", "", NEW)
WITHOUT = ("without rows", "", "zero rows of drafts", NEW)
#: By name, options of an Engine with drafts and its phases (`copying_engine`).
ENGINES = {
    "one": ({}, COMPUTED),
    "one, one step": (ONE_STEP, COMPUTED),
    "two": (RANKS | TIER, [*COMPUTED, DEVICE, HOST, WITHOUT]),
    "two, one step": (RANKS | ONE_STEP, [*COMPUTED, DEVICE]),
    "two, GLM": (RANKS, COMPUTED),
    "one, EAGLE3": ({"speculative_algorithm": "EAGLE3"}, COMPUTED),
    "two, EAGLE3": (RANKS | {"speculative_algorithm": "EAGLE3"}, [*COMPUTED, WITHOUT]),
}
WANTED = [copying_deepseek.continued(ids, NEW) for ids in copying_engine.prompts(SHARED, OWN)]
HITS = {"device hit": "device", "host hit": "host"}


def ids_of(answers):
    return [answer["output_ids"] for answer in answers]


@pytest.fixture(scope="module")
def run(on_device):
    """`run(code)`: the JSON that a process on the device prints last, and its log."""

    def of(code):
        done = on_device.run(
            code, limit_s=900, SGLANG_EXTERNAL_MODEL_PACKAGE="", SGLANG_NCCL_SO_PATH=os.devnull,
            SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS="1",
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        return {**json.loads(done.stdout.splitlines()[-1]), "log": done.stdout + done.stderr}

    return of


@pytest.fixture(scope="module")
def answers(run, tmp_path_factory):
    """`answers(name)`: by phase, what an Engine of ENGINES said to all prompts, and its log."""
    folder, found = tmp_path_factory.mktemp("dense"), {}
    models = {name: copying_deepseek.write(folder / name, "deepseek_v3") for name in ("V3", "GLM")}
    eagle3 = copying_deepseek.write_eagle3(folder / "EAGLE3", models["V3"])
    config = json.loads((models["GLM"] / "config.json").read_text())
    glm = config | {"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "deepseek_v3"}
    (models["GLM"] / "config.json").write_text(json.dumps(glm))

    def get(name):
        if name not in found:
            more, phases = ENGINES[name]
            options = {"kv_cache_layout": "fp4", **OPTIONS, **more}
            model = str(models["GLM" if "GLM" in name else "V3"])
            if "EAGLE3" in name:
                options |= {"speculative_draft_model_path": str(eagle3)}
            arguments = f"{model!r}, {str(folder / 'flag')!r}, {phases!r}, {(SHARED, OWN)}"
            code = "from emulated_cuda import copying_engine\n"
            found[name] = run(f"{code}copying_engine.main({arguments}, **{options!r})")
        return found[name]

    return get


@pytest.mark.parametrize(
    "name", ["two", pytest.param("two, one step", marks=pytest.mark.quick), "two, EAGLE3"]
)
def test_tokens_and_accepted_drafts_are_those_of_one_rank(answers, name):
    found, alone = answers(name), answers(name.replace("two", "one"))["computed"]
    steps = 1 if "step" in name else 3
    assert 1.3 < accept_length(alone) < 1 + steps
    assert ids_of(alone) == WANTED
    for phase in ("computed", *HITS):
        if phase in found:
            assert tokens_and_drafts(found[phase]) == tokens_and_drafts(alone), phase
    assert "Decode batch" in found["log"]
    assert "cuda graph: True" in found["log"]


@pytest.mark.parametrize("hit", HITS)
def test_hits_are_of_the_rows_of_all_ranks(answers, hit):
    found = [answer["meta_info"]["cached_tokens_details"] for answer in answers("two")[hit]]
    assert max(details.get(HITS[hit], 0) for details in found) >= SHARED - 1, found


@pytest.mark.parametrize("name", ["two", "two, EAGLE3"])
def test_drafts_depend_on_their_rows(answers, name):
    """Of a draft's own checkpoint too, whose chains are right in their first step."""
    found = answers(name)
    assert ids_of(found["computed"]) == WANTED
    print("accept length", name, accept_length(found["computed"]), accept_length(found["without rows"]))
    assert accept_length(found["without rows"]) < accept_length(found["computed"]) - 0.3


def test_rows_of_glm_are_gathered(answers):
    """SGLang's class of GLM-4.7-Flash has DeepSeek's attention, and nothing that plans the gathering."""
    found = answers("two, GLM")["computed"]
    assert ids_of(found) == WANTED
    assert tokens_and_drafts(found) == tokens_and_drafts(answers("one")["computed"])
