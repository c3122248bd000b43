"""Refusals of the table of DSA's top-k transform; `test_topk_sglang` has its answers beside SGLang's."""

import contextlib
import re
from types import SimpleNamespace

import pytest
from codec_oracle import LAYOUTS, OURS_ALONE
from topk_cells import MODES, REFUSED, answer, cells

from sgl_kvpool.srt.facts import topk_transform as topk


def nameable_pairs(layout):
    """Pairs that a user can name by SGLang's two flags, that work in every mode, and that refusals may name.

    Left out: flashinfer_sparse_mla on one side only (flash_mla_sm120.py:706), and flashmla_kv over `bf16`
    rows, because it would quantise a layer's pool in every call.
    """
    return [
        (prefill, decode)
        for prefill in topk.IMPLEMENTATIONS
        for decode in topk.IMPLEMENTATIONS
        if decode != "kvpool_mla"
        and (prefill, decode).count("flashinfer_sparse_mla") != 1
        and not (layout == "bf16" and "flashmla_kv" in (prefill, decode))
        and all(answer(layout, prefill, decode, mode) != REFUSED for mode in MODES)
    ]


UNKNOWN = [
    (("fp5", "fa3", "fa3", "EXTEND"), LAYOUTS),
    (("bf16", None, "fa3", "EXTEND"), topk.IMPLEMENTATIONS),  # SGLang resolves both sides on every server
    (("fp4", "fa3", "aiter", "EXTEND"), topk.IMPLEMENTATIONS),  # ROCm's: unknown before it is refused
    (("bf16", "fa3", "fa3", SimpleNamespace(name="DREAM")), MODES),
]


@pytest.mark.parametrize(("cell", "names"), UNKNOWN)
@pytest.mark.parametrize("index_kpool", [1, 4])
def test_unknown_names_are_listed(index_kpool, cell, names):
    with pytest.raises(ValueError) as error:
        topk.select_topk_transform(*cell, index_kpool=index_kpool)
    # Caused by a bug of ours or by another SGLang, not by a combination that a user can change.
    assert type(error.value) is ValueError
    (unknown,) = (word for word in cell if word not in (*LAYOUTS, *topk.IMPLEMENTATIONS, *MODES))
    assert repr(getattr(unknown, "name", unknown)) in str(error.value)
    listed = re.findall(r"\w+", str(error.value).partition(":")[2])
    assert set(listed) == set(names)


def refusals(layout):
    for cell in cells([layout]):
        if answer(*cell) == REFUSED:
            with pytest.raises(topk.UnsupportedCombination) as error:
                topk.select_topk_transform(*cell)
            yield cell, str(error.value)


_FLAGS = re.compile(r"--dsa-prefill-backend (\w+) --dsa-decode-backend (\w+)")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_refusals_name_a_side_at_fault_and_a_pair_that_works_in_every_mode(layout):
    """The named pair keeps as many of the requested implementations as possible, or stands for ours."""
    works = nameable_pairs(layout)
    for (_, prefill, decode, mode), message in refusals(layout):
        why, _, way = message.partition("--dsa-prefill-backend")
        sides = (("prefill", prefill), ("decode", decode))
        assert any(re.search(rf"\b{name}\b", why) for _, name in sides), message
        named = _FLAGS.findall(message)
        if layout in OURS_ALONE:
            assert set(named) == {("flashmla_sparse", "flashmla_sparse")}, message
            assert "kvpool_mla" in way
            continue
        assert set(named) <= set(works), message
        kept = [(pair[0] == prefill) + (pair[1] == decode) for pair in works]
        assert kept[works.index(named[0])] == max(kept), (message, mode)


def test_refused_modes_name_the_flag_that_makes_them():
    flags = "--enable-mixed-chunk", "--enable-pdmux", "--dllm-algorithm"
    for mode, flag in zip(topk.EXTEND_MODES[1:], flags, strict=True):
        with pytest.raises(topk.UnsupportedCombination, match=rf"\b{mode}\b.*{flag}\b"):
            topk.select_topk_transform("fp8_block_scale", "flashmla_sparse_q8", "flashmla_kv", mode)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_server_is_refused_if_one_of_its_modes_is(layout):
    default = ("EXTEND", "DECODE", "TARGET_VERIFY", "DRAFT_EXTEND_V2")
    for _, prefill, decode, _ in cells([layout], [None]):
        for modes in (default, topk.EXTEND_MODES, ("DECODE", "EXTEND", "MIXED"), ("DECODE",), MODES):
            bad = any(answer(layout, prefill, decode, mode) == REFUSED for mode in modes)
            with pytest.raises(topk.UnsupportedCombination) if bad else contextlib.nullcontext():
                topk.check_combination(layout, prefill, decode, *([] if modes is default else [modes]))
