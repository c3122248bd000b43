"""Six faults, each planted in a running server (`planted`), are noticed by what answers are compared with.

That is transformers with random weights, within the bounds of test_models.py, or what a checkpoint copies
(`copying_deepseek`), with prompts of the lengths at which a fault changes what is copied.
"""

import copying_deepseek
import pytest
import torch

from emulated_cuda import test_models
from emulated_cuda.conftest import said
from emulated_cuda.copying_engine import DRAFTS
from emulated_cuda.model_engine import tokens
from emulated_cuda.test_models import checkpoint, oracle  # noqa: F401 (fixtures)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

NEW = 6
EAGER = {"cuda_graph_backend_decode": "disabled", "cuda_graph_backend_prefill": "disabled"}


@pytest.fixture(scope="module")
def ask(on_device):
    """`ask(folder, questions, environment, **options)`: answers of one Engine; see `planted.switched`."""

    def get(folder, questions, environment, **options):
        code = "from emulated_cuda import model_engine, planted\nplanted.plant()\n"
        code += f"model_engine.main({folder!r}, planted.switched({questions!r}), **{EAGER | options!r})"
        return said(on_device, code, SGLANG_EXTERNAL_MODEL_PACKAGE="", **environment)[0]

    return get


# ------------------------------------------------------------------------- distances from transformers

RANDOM = test_models.MODELS["v3-fp8"]
CHUNK, SHARED, LENGTH = 128, 192, 200
#: A pool of a prompt and what pushes it out to the host, but for a page.
TIER = {
    "enable_hierarchical_cache": True, "hicache_ratio": 4, "hicache_write_policy": "write_through",
    "kv_cache_arrangement": "page_major", "max_total_tokens": 448, "chunked_prefill_size": CHUNK,
}  # fmt: skip
READS_ROWS = {"KVPOOL_PREFILL_READS_ROWS": "1"}
FIRST_PROMPT, OTHER = tokens(0, LENGTH), tokens(1, LENGTH)
#: Name of an answer -> its fault, and its prompt with the first token whose log-probability is asked for.
ASKED = {
    "computed": (None, FIRST_PROMPT, 0),
    "host hit": (None, FIRST_PROMPT[:SHARED] + tokens(2, 40), SHARED),
    "host row": ("host row", FIRST_PROMPT[:SHARED] + tokens(3, 40), SHARED),
    "k_scale": ("k_scale", OTHER, 0),
}


@pytest.fixture(scope="module")
def distances(ask, oracle, checkpoint):  # noqa: F811
    """By name of an answer: distance of a prompt and its answer from transformers, and that of bfloat16."""
    questions = []
    for seed, (name, (fault, ids, first)) in enumerate(ASKED.items()):
        if first:
            questions.append((None, "", tokens(100 + seed, 320), 1, -1))
        questions.append((fault, name, ids, NEW, first))
    options = {"kv_cache_layout": RANDOM.layout, **RANDOM.options, **TIER}
    answers = ask(checkpoint(RANDOM.shape, **RANDOM.written), questions, READS_ROWS, **options)
    cases = []
    for name, (_, ids, first) in ASKED.items():
        told = answers[name]["meta_info"]
        assert told["cached_tokens"] == bool(first) * SHARED
        assert not first or told["cached_tokens_details"]["host"] > 0
        cases.append(test_models.case_of(ids, answers[name]))
    found, wanted = {}, oracle(RANDOM, cases, CHUNK)
    for name, exact, rounded in zip(ASKED, wanted["float32"], wanted["bfloat16"], strict=True):
        own = torch.cat([test_models.said(answers[name], part) for part in ("input", "output")])
        found[name] = [test_models.mean_distance([x], [exact]) for x in (own, rounded)]
        print(f"{name}: %.4f from transformers, bfloat16 %.4f" % tuple(found[name]))
    return found


@pytest.mark.parametrize(("right", "planted"), [("computed", "k_scale"), ("host hit", "host row")])
def test_distances_from_transformers(right, planted, distances):
    far, arithmetic = distances[right]
    assert far < 1.3 * arithmetic
    far, arithmetic = distances[planted]
    assert far > 2 * 1.3 * arithmetic


# ------------------------------------------------------------------------- what a checkpoint copies

#: Tokens of a chunk; `LAST`: of a prompt whose end looks at the last row of the chunk before, or `FIRST`: at
#: the first row of all as soon as there is a draft.
COPIED_CHUNK = 128
LAST, FIRST = COPIED_CHUNK + copying_deepseek.PERIOD - 1, copying_deepseek.PERIOD - 1
DENSE, SPARSE = "deepseek_v3", "deepseek_v32"
SELECTED = 512
#: Fault -> shape of the checkpoint, and length of the prompt.
COPIES = {
    "rope": (DENSE, LAST), "prefix": (DENSE, LAST), "draft": (DENSE, FIRST),
    "top-k": (SPARSE, SELECTED + 128),
}  # fmt: skip
#: Shape -> environment, changes of the checkpoint, options.
SERVERS = {
    DENSE: (READS_ROWS, {}, {"chunked_prefill_size": COPIED_CHUNK, **DRAFTS}),
    SPARSE: (
        {"SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0"},
        {"index_topk": SELECTED, "lists_differ": True}, {},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def copied(ask, tmp_path_factory):
    """`copied(fault)`: prompts and answers without the fault and with it."""
    found = {}

    def get(fault):
        shape, length = COPIES[fault]
        if shape not in found:
            environment, changes, options = SERVERS[shape]
            folder = copying_deepseek.write(tmp_path_factory.mktemp(shape), shape, noise=0.0, **changes)
            kinds = {(f, n) for name, (s, n) in COPIES.items() if s == shape for f in (None, name)}
            asked = {kind: tokens(seed, kind[1]) for seed, kind in enumerate(sorted(kinds, key=str))}
            questions = [(kind[0], str(kind), ids, NEW, -1) for kind, ids in asked.items()]
            answers = ask(str(folder), questions, environment, kv_cache_layout="fp4", **options)
            found[shape] = {kind: (ids, answers[str(kind)]) for kind, ids in asked.items()}
        return found[shape][None, length], found[shape][fault, length]

    return get


@pytest.mark.parametrize("fault", ["rope", "prefix", "top-k"])
def test_copied_tokens(fault, copied):
    right = [answer["output_ids"] == copying_deepseek.continued(ids, NEW) for ids, answer in copied(fault)]
    assert right == [True, False]


def test_accepted_drafts(copied):
    """Behind its first token the prompt is copied; at a tenth less test_server_gpu.py's test of MTP fails."""
    lengths = []
    for ids, answer in copied("draft"):
        first, *rest = answer["output_ids"]
        assert rest == copying_deepseek.continued([*ids, first], NEW - 1)
        lengths.append(answer["meta_info"]["spec_accept_length"])
    print("accept lengths", lengths)
    assert lengths[1] < (1 - 2 * 0.1) * lengths[0]
