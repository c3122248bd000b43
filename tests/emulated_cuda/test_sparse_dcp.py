"""A sparse model with drafts on ranks that share a prefix pool (`--dcp-size`), over hits of all kinds.

The checkpoint and its Engines are those of test_sparse_mtp.py. Slots lie beyond one rank's pool: used as a
rank's rows, they would be others'.
"""

import pytest

from emulated_cuda import test_sparse_mtp as over_hits
from emulated_cuda.copying_engine import NEW
from emulated_cuda.test_models import OPTIONS, SPARSE_OPTIONS
from emulated_cuda.test_sparse_mtp import HITS, SERVERS, TIER, accept_length, tokens_and_drafts

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

#: Tokens of the prefix pool: as many as the prompts need that share their beginning, and no more.
TOKENS = 1024
#: Tokens that prompts share, and that each has for itself, of which an indexer selects `TOP_K`: with 2048, a
#: prefill over stored rows would take ten minutes here. Prompts end within a group of ranks.
LENGTHS, TOP_K = (256, 127), 192
#: Tokens per step of each prompt in `fp4` without `--dcp-size`, as measured with the same checkpoint.
ACCEPTED = [4 / 3, 2.0, 8 / 3]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("fp4", 2, "ag_rs"), id="fp4", marks=pytest.mark.quick),
        pytest.param(("bf16", 2, "a2a"), id="bf16"),
        pytest.param(("fp8_block_scale", 4, "a2a"), id="four"),
    ],
)
def ran(request, on_device, tmp_path_factory):
    """The layout, the number of ranks, what Engines said by phase, and the folder of what they left."""
    layout, ranks, merge = request.param
    folder = tmp_path_factory.mktemp("ranks")
    alone = {"kv_cache_layout": layout, "tp_size": ranks, "lengths": LENGTHS}
    alone |= {**OPTIONS, **SPARSE_OPTIONS, **TIER}
    spread = {**alone, "dcp_size": ranks, "dcp_comm_backend": merge, "max_total_tokens": TOKENS // ranks}
    computed, *later = SERVERS[0]
    if layout != "bf16":  # `fp4` runs in `make test`, and four ranks take as long
        later = [phase for phase in later if phase[0] == "host hit"]
    servers = [([computed, ("aborted", "", "abort", NEW), *later], spread)]
    if layout == "bf16":
        # FlashAttention 3, which SGLang takes for decoding these rows, is not replaced there.
        one = alone | {"dsa_decode_backend": "flashmla_sparse"}
        servers += [(SERVERS[1], spread), ([("one", "", "", NEW)], one)]
    return layout, ranks, over_hits.serve(on_device, folder, servers, index_topk=TOP_K), folder


def test_tokens_are_copied_and_drafts_accepted(ran):
    """As without `--dcp-size`: drafts depend on the draft's own rows, which every rank has."""
    layout, _, answers, _ = ran
    said = answers["computed"]
    over_hits.check_computed(said, *LENGTHS)
    if layout == "fp4":
        assert [answer["meta_info"]["spec_accept_length"] for answer in said] == pytest.approx(ACCEPTED)
    if layout == "bf16":
        assert tokens_and_drafts(said) == tokens_and_drafts(answers["one"])


def test_requests_are_aborted(ran):
    """What follows uses their slots again."""
    for answer in ran[2]["aborted"]:
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize("hit", HITS)
def test_hits_say_what_was_computed(ran, hit):
    answers = ran[2]
    if hit not in answers:
        pytest.skip("run with `bf16`")
    over_hits.check_hit(answers, hit, LENGTHS[0])


def test_drafts_depend_on_rows_and_tokens_on_index_keys(ran):
    answers = ran[2]
    if "without rows" not in answers:
        pytest.skip("run with `bf16`")
    assert accept_length(answers["without rows"]) < accept_length(answers["device hit"]) - 0.3
    pairs = zip(answers["without keys"], answers["device hit"], strict=True)
    # A short prompt's token may be selected by chance.
    assert sum(one["output_ids"] != other["output_ids"][: NEW // 2] for one, other in pairs) >= 2


def test_ranks_have_the_same_index_keys_and_slots_beyond_their_pools(ran):
    _, ranks, _, folder = ran
    texts = {(folder / f"keys{rank}").read_text() for rank in range(ranks)}
    assert len(texts) == 1
    assert len({*texts.pop().splitlines()}) > 10
    for rank in range(ranks):
        used = [tuple(map(int, line.split())) for line in (folder / f"slots{rank}").read_text().splitlines()]
        assert any(slot >= rows for slot, rows in used)


def test_what_the_log_says(ran):
    _, ranks, _, folder = ran
    log = (folder / "log").read_text()
    assert f"--kv-host-sharing rank (--dcp-size {ranks}: ranks of decode context parallelism hold " in log
    assert f"with the heads of {ranks} ranks" in log
    assert "cuda graph: True" in log
