"""Prefill and decode servers with decode context parallelism: bytes of rows, and servers that differ."""

import numpy as np
import pytest
from codec_oracle import LAYOUTS
from dcp_pairs import check_relayout, rank_of, rows_of, transferred
from managers import pool_of
from pools import GUARD, LAYERS
from sglang.srt.disaggregation.utils import kv_layout_signature


# Layout, page, ranks of the prefill and of the decode server, --dcp-size, tokens of the prefix.
@pytest.mark.parametrize(
    "sizes",
    [
        *((layout, 1, 1, 3, 3, 6) for layout in LAYOUTS),
        ("fp4", 64, 1, 2, 2, 128),
        ("fp8_block_scale", 64, 2, 4, 2, 0),
        ("bf16", 4, 4, 2, 2, 8),
    ],
    ids=str,
)
def test_rows_of_one_rank_reach_the_ranks_that_own_their_slots(manager_of, bootstrap, monkeypatch, sizes):
    check_relayout(manager_of, bootstrap, monkeypatch, "cpu", *sizes)


@pytest.mark.parametrize("page", [1, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_several_ranks_reach_the_same_ranks(manager_of, bootstrap, monkeypatch, layout, page):
    """A page of SGLang's allocator has `page` rows of each rank."""
    ranks, sources, targets = 2, np.array([2, 5, 1], np.int32), np.array([3, 4, 1], np.int32)
    sizes, sides = {"tp_size": ranks, "dcp_size": ranks}, {}
    for mode in ("prefill", "decode"):
        common = (manager_of, monkeypatch, mode, layout, page, 6, "cpu")
        sides[mode] = [rank_of(*common, rank=rank, **sizes) for rank in range(ranks)]
    managers = ([manager for manager, _ in sides[mode]] for mode in ("prefill", "decode"))
    tokens, first = 3 * page * ranks - 1, 2 * page * ranks
    transferred(bootstrap, *managers, 7, [(sources[:2], first), (sources[2:], tokens - first)], targets, 0)
    for (_, source), (_, target) in zip(sides["prefill"], sides["decode"], strict=True):
        for n, (there, here) in enumerate(zip(rows_of(source), rows_of(target), strict=True)):
            size, wanted = page if n < LAYERS else page * ranks, np.full_like(here, GUARD)
            for number, other in zip(sources, targets, strict=True):
                wanted[other * size : (other + 1) * size] = there[number * size : (number + 1) * size]
            assert np.array_equal(here, wanted), n


@pytest.mark.parametrize("ranks", [(2, 2, 2, 1), (4, 2, 4, 4), (4, 2, 2, 2), (2, 2, 4, 2)], ids=str)
@pytest.mark.parametrize("layout", ["bf16", "fp4"])
def test_other_ranks_are_refused_and_named(manager_of, bootstrap, layout, ranks):
    tp, dcp, our_tp, our_dcp = ranks
    for rank in range(tp):
        manager_of("prefill", pool_of(layout), rank=rank, tp_size=tp, dcp_size=dcp)
    peer = manager_of("decode", pool_of(layout), tp_size=our_tp, dcp_size=our_dcp)
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            peer.try_ensure_parallel_info(bootstrap)
        assert str(error.value) == (
            f"the prefill server at {bootstrap} shares rows over --dcp-size {dcp} of {tp} attention ranks, "
            f"and this decode server over --dcp-size {our_dcp} of {our_tp} attention ranks: SGLang sends to "
            "other ranks only what one rank has. Start the prefill server without --dcp-size, or both with "
            "the same ranks and draft."
        )


def test_a_draft_of_the_prefill_server_alone_is_refused(manager_of, bootstrap):
    """`bf16` has no mark that would tell; SGLang would write the draft's rows over the last layer's."""
    sizes = {"tp_size": 2, "dcp_size": 2}
    for rank in range(2):
        manager_of("prefill", pool_of("bf16"), draft=pool_of("bf16", layers=1), rank=rank, **sizes)
    with pytest.raises(RuntimeError, match="of 2 attention ranks with a draft, .* of 2 attention ranks: "):
        manager_of("decode", pool_of("bf16"), **sizes).try_ensure_parallel_info(bootstrap)


@pytest.mark.parametrize(
    ("layout", "page", "text"), [("fp8", 4, "KV cache layout mismatch: "), ("fp4", 2, "Page size")]
)
def test_other_differences_are_named_first(manager_of, bootstrap, layout, page, text):
    for rank in range(2):
        manager_of("prefill", pool_of(layout, page_size=page), rank=rank, tp_size=2, dcp_size=2)
    with pytest.raises(RuntimeError, match=text):
        manager_of("decode", pool_of("fp4"), tp_size=2, dcp_size=1).try_ensure_parallel_info(bootstrap)


def test_checksums_of_a_rank_are_not_compared_with_those_of_all_rows(manager_of):
    """A rank of the decode server has some rows of each page, and SGLang would abort the request."""

    def signature(mode, **sizes):
        return kv_layout_signature(manager_of(mode, pool_of("fp4"), **sizes).kv_args)

    one, shared = {"tp_size": 2}, {"tp_size": 2, "dcp_size": 2}
    assert signature("prefill", **one) == signature("decode", **one)
    assert signature("prefill", **shared) == signature("decode", **shared) != signature("decode", **one)
