"""Sparse attention on several ranks that share a prefix pool (`--dcp-size`): SGLang's DSA backend of each.

A rank has the queries of all and its own rows. Slots lie beyond one rank's pool: raw ones are noticed.
"""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest import mock

import codec_oracle as oracle
import dsa_case
import pools
import pytest
import torch
from cases import crossed
from dsa_case import DRAFTS, HEADS, LAYER, PAGE, RANK, SCALE, TOKENS, TOP_K, Case, SparseKernel, in_forward
from sglang.srt.environ import envs
from sglang.srt.layers.attention.dsa import dsa_dcp, dsa_indexer
from sglang.srt.layers.attention.dsa.dsa_dcp import DcpPageTableCache
from test_dcp_pool import as_rank
from test_dsa_backend import EXTENDS, LENGTHS, PREFIXES, close, hooked  # noqa: F401

from sgl_kvpool.srt.self_check import Difference, check_lists

pytestmark = pytest.mark.usefixtures("published", "hooked")

SPARSE = ("flashmla_sparse", "flashmla_sparse")
#: `fp8` rows are raw, for kernels that do not merge.
SERVED = [layout for layout in oracle.LAYOUTS if layout != "fp8"]
#: Lengths of the requests and of what is stored of them; a first token is attended on one rank alone.
STEPS = {
    **{mode: (LENGTHS, PREFIXES["none" if mode == "EXTEND" else "some"]) for mode in EXTENDS},
    "DECODE": (LENGTHS, [n - 1 for n in LENGTHS]),
    "TARGET_VERIFY": ([n + DRAFTS for n in (1, 37, 20)], [1, 37, 20]),
}


@pytest.fixture(autouse=True)
def no_broadcast(monkeypatch):
    monkeypatch.setenv("SGLANG_DSA_TOPK_BROADCAST", "0")  # restored, because a backend sets it


def cases_of(layout, mode, ranks):
    """The same step on each rank."""
    for rank in range(ranks):
        with as_rank(rank, ranks):
            yield Case(
                layout, *STEPS[mode], *SPARSE, ranks=ranks, num_q_heads=HEADS // ranks, dcp_size=ranks,
                dcp_rank=rank, _dcp_page_table_cache=DcpPageTableCache(),
            )  # fmt: skip


def check(layout, mode, ranks):
    """Compare what SGLang would merge after a step with float64 over all rows; returns the cases."""
    cases, outs = [*cases_of(layout, mode, ranks)], []
    for rank, case in enumerate(cases):
        with as_rank(rank, ranks), in_forward(case.backend):
            outs.append(case.run(mode).double())
    assert max(int(slots.max()) for slots in cases[0].slots) >= TOKENS + PAGE
    lse = torch.stack([case.lse for case in cases]).double()
    weights = torch.exp2(lse - torch.exp2(lse).sum(0).log2()).unsqueeze(-1)
    close((weights * torch.stack(outs)).sum(0), cases[0].wanted())
    return cases


@pytest.mark.parametrize(("layout", "mode", "ranks"), crossed(SERVED, [*STEPS], [2, 4]))
def test_ranks_together_attend_every_list(layout, mode, ranks, monkeypatch):
    """Prefill too attends stored rows; SGLang selects the same slots for all ranks."""
    kernel = SparseKernel(monkeypatch)
    cases = check(layout, mode, ranks)
    assert not kernel.dtypes
    counts = sum(case.backend._dcp_page_table_cache.counts for case in cases)
    assert counts.tolist() == (cases[0].chosen() >= 0).sum(1).tolist()
    assert cases[0].backend.forward_metadata.topk_indices_offset is None
    if mode == "EXTEND":
        assert any(bool(case.lse.isneginf().any()) for case in cases)


def gathered(outs, lses):
    """The merge `ag_rs` of SGLang: each rank weighs its results, and their sum is what the heads get."""
    from sglang.kernels.ops.attention.dcp_kernels import correct_attn_out

    parts = [torch.empty(out.transpose(0, 1).shape) for out in outs]
    for rank, (out, part) in enumerate(zip(outs, parts, strict=True)):
        correct_attn_out(out, torch.stack(lses), rank, None, part)
    return sum(parts).transpose(0, 1)


def exchanged(outs, lses):
    """The merge `a2a` of SGLang: each rank gets the results of all ranks for its own heads."""
    from sglang.kernels.ops.attention.dcp_kernels import dcp_lse_combine_triton, dcp_pack_a2a_send

    ranks, (queries, heads, rank) = len(outs), outs[0].shape
    sent = [
        (torch.empty(ranks, queries, heads // ranks, rank, dtype=out.dtype), torch.empty(ranks, queries, 1))
        for out in outs
    ]
    assert heads == ranks
    for out, lse, (to, lse_to) in zip(outs, lses, sent, strict=True):
        dcp_pack_a2a_send(out, lse, to, lse_to)
    parts = (torch.stack(tensors, dim=1) for tensors in zip(*sent, strict=True))  # by receiving rank
    merged = (dcp_lse_combine_triton(*own, is_lse_base_on_e=False) for own in zip(*parts, strict=True))
    return torch.cat([out for out, _ in merged], dim=1)


@pytest.mark.parametrize("merge", [gathered, exchanged])
def test_sglangs_merges_take_queries_without_entries(merge):
    """A first token is attended on one rank; queries that pad a batch, on none, and they get zeros."""
    from sgl_kvpool.srt.attention import dsa_backend as dsa

    outs, lses = [], []
    for rank, case in enumerate(cases_of("fp4", "DECODE", HEADS)):
        with as_rank(rank, HEADS), in_forward(case.backend):
            out = case.run("DECODE")
            rows = case.pool.get_key_buffer(LAYER)
            nothing = torch.full((2, TOP_K), -1, dtype=torch.int32)
            padded = dsa.attend(case.backend, case.q[:2], rows, nothing, None, SCALE)
        outs.append(torch.cat([out, padded[0]]))
        lses.append(torch.cat([case.lse, padded[1]]))
    assert bool(torch.stack(lses)[:, -2:].isneginf().all())
    found = merge(outs, lses)
    close(found[:-2].double(), case.wanted())
    assert not found[-2:].any()


def _all_entries(cache, *, page_table, dcp_size, **_):
    return page_table // dcp_size, torch.full((len(page_table),), page_table.shape[1], dtype=torch.int32)


def _raw_slots(cache, *, page_table, dcp_size, dcp_rank, **_):
    own = torch.where(page_table % dcp_size == dcp_rank, page_table, -1)
    return own, torch.full((len(own),), own.shape[1], dtype=torch.int32)


@pytest.mark.parametrize("wrong", [None, _all_entries, _raw_slots])
def test_a_rank_checks_its_lists_when_it_starts(wrong, monkeypatch):
    from sgl_kvpool.sglang_plugin.hooks import dsa

    if wrong is not None:
        monkeypatch.setattr(dsa_dcp, "localize_dcp_page_table", wrong)
    for rank, case in enumerate(cases_of("fp4", "DECODE", 2)):
        expected = nullcontext() if wrong is None else pytest.raises((Difference, IndexError))
        with as_rank(rank, 2), expected:
            check_lists(case.pool, LAYER, HEADS, SCALE, partial(dsa.attend, case.backend))


def _any_layer(cache, *, layer_id, original, **rest):
    cache.layer_id = layer_id - 1
    return original(cache, layer_id=layer_id, **rest)


def _sharded(*args, dcp_replicated, **rest):
    return pools.dsa_pool(*args, **rest)


@pytest.mark.parametrize("fault", ["no owner", "no division", "natural lse", "no layer", "a sharded draft"])
def test_planted_faults_are_noticed(fault, monkeypatch):
    from sgl_kvpool.srt.attention import dsa_backend as dsa

    localize, notices = "localize_dcp_page_table", partial(check, "bf16", "DECODE", 2)
    if fault == "natural lse":
        monkeypatch.setattr(dsa, "math", SimpleNamespace(log2=lambda _: 1.0, e=0))
    elif fault == "no layer":
        monkeypatch.setattr(dsa_dcp, localize, partial(_any_layer, original=getattr(dsa_dcp, localize)))
        notices = partial(test_layers_that_share_a_selection_share_a_ranks_part, monkeypatch)
    elif fault == "a sharded draft":
        monkeypatch.setattr(dsa_case, "dsa_pool", _sharded)
        notices = partial(test_a_draft_attends_all_slots_in_its_own_pool, "bf16", "DECODE")
    else:
        wrong = {"no owner": _all_entries, "no division": _raw_slots}[fault]
        monkeypatch.setattr(dsa_dcp, localize, wrong)
    with pytest.raises((AssertionError, IndexError)):
        notices()


def test_layers_that_share_a_selection_share_a_ranks_part(monkeypatch):
    """SGLang passes the same tensor, and refills it for a layer with a selection of its own."""
    localised = mock.Mock(wraps=dsa_dcp.transform_index_page_table_dcp)
    monkeypatch.setattr(dsa_dcp, "transform_index_page_table_dcp", localised)
    (case, *_) = cases_of("fp4", "DECODE", 2)
    selection, q = case.chosen(), torch.randn(3, HEADS, RANK + 64).bfloat16()
    found = {}
    with as_rank(0, 2), in_forward(case.backend):
        case.backend.init_forward_metadata(case.batch("DECODE"))
        for step, (layer_id, changed) in enumerate([(LAYER - 1, False), (LAYER, False), (LAYER - 1, True)]):
            if changed:
                selection.copy_(torch.where(selection >= 0, 0, selection))
            case.layer.layer_id = layer_id
            keys = torch.stack([keys[-1] for keys in case.keys])
            case.backend.forward_decode(
                q[..., :RANK].reshape(3, -1), keys[..., :RANK], keys[..., :RANK], case.layer,
                case.batch("DECODE"), q_rope=q[..., RANK:], k_rope=keys[..., RANK:], topk_indices=selection,
            )  # fmt: skip
            cache = case.backend._dcp_page_table_cache
            found[step] = cache.page_table
            if changed:  # all entries of a list are the request's first token
                of_rank = [int(own[0] % 2 == 0) for own in case.slots]
                assert (cache.counts > 0).int().tolist() == of_rank
    assert found[0] is found[1]
    assert localised.call_count == 2


@pytest.mark.parametrize("mode", ["DECODE", "TARGET_VERIFY"])
@pytest.mark.parametrize("layout", SERVED)
def test_a_draft_attends_all_slots_in_its_own_pool(layout, mode):
    """SGLang replicates a draft: each rank has all of its rows, and no log-sum-exp is merged."""
    with as_rank(1, 2):
        case = Case(layout, *STEPS[mode], *SPARSE, ranks=2, spans=2)
        with in_forward(case.backend):
            close(case.run(mode), case.wanted())
        assert case.lse is None


def test_lists_are_the_same_on_all_ranks():
    """Scores tie, and chunks of prompts depend on a rank's free memory."""
    Case("fp4", *STEPS["DECODE"], *SPARSE)
    assert not envs.SGLANG_DSA_TOPK_BROADCAST.get()
    next(cases_of("fp4", "DECODE", 2))
    assert envs.SGLANG_DSA_TOPK_BROADCAST.get()


@pytest.mark.parametrize("broadcast", [True, False])
def test_ranks_that_choose_other_tokens_among_equal_scores(broadcast, monkeypatch):
    """Rank 1 counts positions from the end; if asked to, SGLang's indexer sends it the lists of rank 0."""
    chosen, sent = Case.chosen, {}

    def on_rank(case):
        lists, rank = chosen(case), case.backend.dcp_rank
        if rank:
            last = torch.tensor(case.lengths, dtype=torch.int32)[:, None] - 1
            lists = torch.where(lists < 0, lists, last - lists)
            assert not torch.equal(lists.sort().values, chosen(case).sort().values)
        group = SimpleNamespace(world_size=2, broadcast=lambda own, src: own.copy_(sent.setdefault(src, own)))
        parallel = SimpleNamespace(attn_tp_group=group)
        with mock.patch.object(dsa_indexer, "get_parallel", return_value=parallel):
            return dsa_indexer._broadcast_indexer_topk_from_rank0(lists)

    monkeypatch.setattr(Case, "chosen", on_rank)
    if not broadcast:
        monkeypatch.setattr(type(envs.SGLANG_DSA_TOPK_BROADCAST), "set", lambda *_: None)
    with nullcontext() if broadcast else pytest.raises(AssertionError):
        check("fp4", "DECODE", 2)
