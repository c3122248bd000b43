"""Faults, each planted in a running server (`planted`), are noticed by what a checkpoint copies.

Prompts of `copying_deepseek` have the lengths at which a fault changes what is copied.
"""

import json

import copying_deepseek
import pytest

from emulated_cuda.model_engine import tokens

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

NEW = 6
EAGER = {"cuda_graph_backend_decode": "disabled", "cuda_graph_backend_prefill": "disabled"}


@pytest.fixture(scope="module")
def ask(on_device):
    """`ask(folder, questions, environment, **options)`: answers of one Engine; see `planted.switched`."""

    def get(folder, questions, environment, **options):
        code = "from emulated_cuda import model_engine, planted\nplanted.plant()\n"
        code += f"model_engine.main({folder!r}, planted.switched({questions!r}), **{EAGER | options!r})"
        done = on_device.run(code, limit_s=900, SGLANG_EXTERNAL_MODEL_PACKAGE="", **environment)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        return json.loads(done.stdout.splitlines()[-1])

    return get


READS_ROWS = {"KVPOOL_PREFILL_READS_ROWS": "1"}

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
    DENSE: (READS_ROWS, {}, {
        "chunked_prefill_size": COPIED_CHUNK, "speculative_algorithm": "EAGLE", "speculative_num_steps": 3,
        "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4,
    }),
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
