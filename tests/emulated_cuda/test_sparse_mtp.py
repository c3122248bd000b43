"""A sparse model whose drafts are accepted only while rows and index keys are right, over hits of all kinds.

The checkpoint copies (`copying_deepseek`); its Engines have MTP, graphs and a host tier with a file store.
"""

import json
import os

import copying_deepseek
import pytest

from emulated_cuda import copying_engine
from emulated_cuda.copying_engine import NEW
from emulated_cuda.test_models import OPTIONS, SPARSE_OPTIONS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

TIER = {
    "enable_hierarchical_cache": True, "hicache_ratio": 2, "hicache_storage_backend": "file",
    "hicache_storage_prefetch_policy": "wait_complete", "cuda_graph_bs_decode": [copying_engine.PROMPTS],
}  # fmt: skip
#: Phases of two servers over one store: a name, what is done to the caches before and while it decodes, and
#: the number of new tokens. Changed caches are loaded again.
SERVERS = [
    [
        ("computed", "", "", NEW), ("device hit", "", "", NEW), ("host hit", "evict", "", NEW),
        # The first drafts were made in the prefill; fewer tokens would hardly show those that follow.
        ("without rows", "", "zero rows of drafts", NEW),
        ("without keys", "evict", "zero index keys", NEW // 2),
    ],
    [("file hit", "", "", NEW)],
]  # fmt: skip
HITS = {"device hit": "device", "host hit": "host", "file hit": "storage"}


@pytest.fixture(scope="module")
def ran(on_device, tmp_path_factory):
    """By phase, what Engines of two ranks said to all prompts, and the folder of what they left."""
    folder = tmp_path_factory.mktemp("sparse")
    options = {"kv_cache_layout": "fp4", "tp_size": 2, **OPTIONS, **SPARSE_OPTIONS, **TIER}
    return serve(on_device, folder, [(phases, options) for phases in SERVERS]), folder


def serve(on_device, folder, servers, **written):
    """What Engines of one checkpoint said, by phase; one after another, over one store below `folder`."""
    model = str(copying_deepseek.write(folder / "model", "deepseek_v32", **written))
    (folder / "store").mkdir()
    said, later = {}, {}
    for phases, given in servers:
        options = given | later
        code = "from emulated_cuda import copying_engine\n"
        code += f"copying_engine.main({model!r}, {str(folder / 'flag')!r}, {phases!r}, **{options!r})"
        done = on_device.run(
            code, limit_s=1500,
            SGLANG_EXTERNAL_MODEL_PACKAGE="", SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD="0",
            SGLANG_NCCL_SO_PATH=os.devnull, SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS="1",
            SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR=str(folder / "store"),
        )  # fmt: skip
        with (folder / "log").open("a") as log:
            log.write(done.stdout + done.stderr)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        said |= json.loads(done.stdout.splitlines()[-1])
        later["cuda_graph_backend_prefill"] = "disabled"  # the next server starts 20 s earlier
    return said


@pytest.fixture
def answers(ran):
    return ran[0]


def test_ranks_that_share_the_tier_have_the_same_index_keys(ran):
    """Byte for byte before each batch of prefill and verification, of the target and of the draft."""
    text, other = ((ran[1] / f"keys{rank}").read_text() for rank in range(2))
    assert text == other
    assert {"EXTEND", "DECODE"} <= {line.split()[0] for line in text.splitlines()}
    assert len({*text.splitlines()}) > 10
    assert "--kv-host-sharing node (2 ranks hold the same rows)" in (ran[1] / "log").read_text()


def accept_length(said):
    return sum(answer["meta_info"]["spec_accept_length"] for answer in said) / len(said)


def tokens_and_drafts(said):
    return [(answer["output_ids"], answer["meta_info"]["spec_accept_length"]) for answer in said]


def check_computed(said, *lengths):
    """Prompts of these lengths are continued by copying, with drafts accepted at rates of .5 to .9."""
    for ids, answer in zip(copying_engine.prompts(*lengths), said, strict=True):
        assert answer["output_ids"] == copying_deepseek.continued(ids, NEW)
    print("accept length", accept_length(said))
    assert 1 + 0.5 + 0.5**2 + 0.5**3 < accept_length(said) < 1 + 0.9 + 0.9**2 + 0.9**3


def check_hit(answers, hit, shared):
    """The first of the prompts that share their beginning loads it for all."""
    found = [answer["meta_info"] for answer in answers[hit]]
    assert all(answer["cached_tokens"] >= shared for answer in found)
    loaded = [answer["cached_tokens_details"].get(HITS[hit], 0) for answer in found]
    assert max(loaded) >= shared, loaded
    assert tokens_and_drafts(answers[hit]) == tokens_and_drafts(answers["computed"])


def test_tokens_are_copied_and_drafts_accepted(answers):
    check_computed(answers["computed"])


@pytest.mark.parametrize("hit", HITS)
def test_hits_say_what_was_computed(answers, hit):
    check_hit(answers, hit, copying_engine.SHARED)


def test_drafts_depend_on_rows_and_tokens_on_index_keys(answers):
    assert accept_length(answers["without rows"]) < accept_length(answers["device hit"]) - 0.3
    for one, other in zip(answers["without keys"], answers["device hit"], strict=True):
        assert one["output_ids"] != other["output_ids"][: NEW // 2]
