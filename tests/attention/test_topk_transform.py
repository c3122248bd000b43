"""The table of DSA's top-k transform against the one written by hand in `topk_table`, without SGLang."""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from codec_oracle import OURS_ALONE
from topk_table import (
    EXTENDS,
    IMPLEMENTATIONS,
    LAYOUTS,
    MODES,
    PAGED,
    RAGGED,
    REFUSED,
    cells,
    expected,
    works_as,
)

from sgl_kvpool import MLAKVCacheLayout
from sgl_kvpool.attention.topk_transform import (
    TopkTransform,
    UnsupportedCombination,
    check_combination,
    select_topk_transform,
    working_pairs,
)


def answer(*cell, **keywords):
    """What the code says of a cell, in the words of the table."""
    try:
        return select_topk_transform(*cell, **keywords).name
    except UnsupportedCombination:
        return REFUSED


def nameable_pairs(layout):
    """Pairs that a user can name by SGLang's two flags, that work in every mode, and that refusals may name.

    Left out: flashinfer_sparse_mla on one side only (flash_mla_sm120.py:706), and flashmla_kv over `bf16`
    rows, because it would quantise a layer's pool in every call.
    """
    return [
        (prefill, decode)
        for prefill in IMPLEMENTATIONS
        for decode in IMPLEMENTATIONS
        if decode != "kvpool_mla"
        and (prefill, decode).count("flashinfer_sparse_mla") != 1
        and not (layout == "bf16" and "flashmla_kv" in (prefill, decode))
        and all(expected(layout, prefill, decode, mode) != REFUSED for mode in MODES)
    ]


# -------------------------------------------------------------------- the table


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_cell(layout):
    wrong = {cell: said for cell in cells([layout]) if (said := answer(*cell)) != expected(*cell)}
    assert not wrong


def test_the_table_by_hand_says_what_it_is_meant_to_say():
    """A few cells in words, so that the expansion of the text is not believed blindly."""
    assert expected("fp8_block_scale", "flashmla_sparse", "flashmla_kv", "MIXED") == RAGGED
    assert expected("fp8_block_scale", "flashmla_sparse", "flashmla_kv", "TARGET_VERIFY") == PAGED
    assert expected("fp8_block_scale", "flashmla_sparse", "flashmla_sparse", "EXTEND") == REFUSED
    assert expected("fp8_block_scale", "flashmla_sparse_q8", "flashmla_kv", "DECODE") == PAGED
    assert expected("bf16", "flashmla_sparse_q8", "fa3", "SPLIT_PREFILL") == REFUSED
    assert expected("bf16", "flashmla_sparse", "trtllm", "EXTEND") == PAGED
    assert expected("fp8", "tilelang", "trtllm", "DECODE") == REFUSED
    assert expected("fp8_block_scale", "flashmla_kv", "kvpool_mla", None) == PAGED
    assert expected("fp4", "flashmla_sparse", "kvpool_mla", "DLLM_EXTEND") == RAGGED
    assert expected("fp4", "flashmla_sparse", "flashmla_sparse", "DECODE") == REFUSED
    pairs = {
        (layout, *pair) for layout, *pair, mode in cells(["fp4"]) if expected(layout, *pair, mode) != REFUSED
    }
    assert pairs == {("fp4", "flashmla_sparse", "kvpool_mla")}


def test_members_of_the_enums_are_names_too(published):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    for member in MLAKVCacheLayout:
        for layout, prefill, decode, mode in cells([member.value], [m.name for m in ForwardMode]):
            said = answer(member, prefill, decode, ForwardMode[mode])
            assert said == expected(layout, prefill, decode, mode), (layout, prefill, decode, mode)


def test_repeated_questions_have_one_answer():
    """Answers are cached; a refusal has to be raised the second time too."""
    for cell in (("fp4", "fa3", "fa3", "EXTEND"), ("bf16", "flashmla_sparse_q8", "fa3", "MIXED")):
        assert [answer(*cell), answer(*cell)] == [REFUSED, REFUSED]
    assert answer("bf16", "flashmla_sparse_q8", "fa3", "EXTEND") == RAGGED


@pytest.mark.parametrize("layout", LAYOUTS)
def test_working_pairs(layout):
    pairs = list(working_pairs(MLAKVCacheLayout(layout)))
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == {
        (prefill, decode)
        for prefill in IMPLEMENTATIONS
        for decode in IMPLEMENTATIONS
        if expected(layout, prefill, decode, "EXTEND") != REFUSED
    }


# -------------------------------------------------------------------- names


UNKNOWN = [
    (("fp5", "fa3", "fa3", "EXTEND"), LAYOUTS),
    ((None, "fa3", "fa3", "EXTEND"), LAYOUTS),
    (("bf16", "flashmla", "fa3", "EXTEND"), IMPLEMENTATIONS),
    (("bf16", "fa3", "FA3", "EXTEND"), IMPLEMENTATIONS),
    (("bf16", "", "fa3", "EXTEND"), IMPLEMENTATIONS),
    (("bf16", None, "fa3", "EXTEND"), IMPLEMENTATIONS),  # SGLang resolves both sides on every server
    (("bf16", "fa3", "triton", "EXTEND"), IMPLEMENTATIONS),  # ROCm's
    (("fp4", "fa3", "aiter", "EXTEND"), IMPLEMENTATIONS),  # unknown names are reported before refusals
    (("bf16", "fa3", "fa3", "DRAFT_EXTEND"), MODES),  # gone since 0.5.12
    (("bf16", "fa3", "fa3", "extend"), MODES),
    (("bf16", "fa3", "fa3", SimpleNamespace(name="DREAM")), MODES),
    (("bf16", "fa3", "fa3", 1), MODES),  # ForwardMode.EXTEND's value, not its name
]


def check_server(layout, prefill, decode, mode, **keywords):
    check_combination(layout, prefill, decode, ("IDLE", mode), **keywords)


@pytest.mark.parametrize(("cell", "names"), UNKNOWN)
@pytest.mark.parametrize("index_kpool", [1, 4])
@pytest.mark.parametrize("function", ["select", "check"])
def test_unknown_names_are_listed(function, index_kpool, cell, names):
    ask = select_topk_transform if function == "select" else check_server
    with pytest.raises(ValueError) as error:
        ask(*cell, index_kpool=index_kpool)
    # Caused by a bug of ours or by another SGLang, not by a combination that a user can change.
    assert type(error.value) is ValueError
    (unknown,) = (word for word in cell if word not in (*LAYOUTS, *IMPLEMENTATIONS, *MODES))
    assert repr(getattr(unknown, "name", unknown)) in str(error.value)
    listed = re.findall(r"\w+", str(error.value).partition(":")[2])
    assert set(listed) == set(names)


@pytest.mark.parametrize("index_kpool", [0, -1])
def test_index_kpool_below_1_is_refused(index_kpool):
    for cell in (("bf16", "fa3", "fa3", "EXTEND"), ("fp4", "fa3", "fa3", "EXTEND")):
        with pytest.raises(ValueError, match=f"index_kpool={index_kpool} ") as error:
            select_topk_transform(*cell, index_kpool=index_kpool)
        assert type(error.value) is ValueError
        with pytest.raises(ValueError, match=f"index_kpool={index_kpool} "):
            check_combination(*cell[:3], index_kpool=index_kpool)


# -------------------------------------------------------------------- messages


def refusals(layout):
    for cell in cells([layout]):
        if expected(*cell) == REFUSED:
            with pytest.raises(UnsupportedCombination) as error:
                select_topk_transform(*cell)
            yield cell, str(error.value)


_FLAGS = re.compile(r"--dsa-prefill-backend (\w+) --dsa-decode-backend (\w+)")


@pytest.mark.parametrize("layout", [one for one in LAYOUTS if one not in OURS_ALONE])
def test_refusals_name_a_pair_that_works_in_every_mode(layout):
    """The named pair also keeps as many of the requested implementations as possible."""
    works = nameable_pairs(layout)
    for (_, prefill, decode, mode), message in refusals(layout):
        named = _FLAGS.findall(message)
        assert named, message
        assert set(named) <= set(works), message
        kept = [(pair[0] == prefill) + (pair[1] == decode) for pair in works]
        assert kept[works.index(named[0])] == max(kept), (message, mode)


@pytest.mark.parametrize("layout", OURS_ALONE)
def test_refusals_of_rows_that_only_ours_reads_name_the_pair_that_stands_for_ours(layout):
    for _, message in refusals(layout):
        assert set(_FLAGS.findall(message)) == {("flashmla_sparse", "flashmla_sparse")}, message
        assert "kvpool_mla" in message.partition("--dsa-decode-backend")[2]


def test_refusals_name_a_side_that_is_at_fault():
    for layout in LAYOUTS:
        for (_, prefill, decode, _), message in refusals(layout):
            before = message.partition("--dsa-prefill-backend")[0]
            faulty = [
                name
                for side, name in (("prefill", prefill), ("decode", decode))
                if not works_as(side, layout, name)
            ]
            named = [name for name in faulty or [prefill, decode] if re.search(rf"\b{name}\b", before)]
            assert named, message


def test_refusals_say_that_a_name_is_on_the_wrong_side():
    for name in ("flashmla_sparse_q8", "flashmla_auto", "triton_sparse_mla"):
        with pytest.raises(UnsupportedCombination, match=f"{name} is for prefill only"):
            select_topk_transform("bf16", "fa3", name, "EXTEND")
    with pytest.raises(UnsupportedCombination, match="kvpool_mla is for decode only"):
        select_topk_transform("bf16", "kvpool_mla", "kvpool_mla", "EXTEND")


@pytest.mark.parametrize(
    ("mode", "flag"),
    [
        ("MIXED", "--enable-mixed-chunk"),
        ("SPLIT_PREFILL", "--enable-pdmux"),
        ("DLLM_EXTEND", "--dllm-algorithm"),
    ],
)
def test_refused_modes_name_the_flag_that_makes_them(mode, flag):
    with pytest.raises(UnsupportedCombination, match=rf"\b{mode}\b.*{flag}\b"):
        select_topk_transform("fp8_block_scale", "flashmla_sparse_q8", "flashmla_kv", mode)


# -------------------------------------------------------------------- whole servers


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_server_is_refused_if_one_of_its_modes_is(layout):
    def refused(prefill, decode, *modes):
        try:
            check_combination(layout, prefill, decode, *modes)
        except UnsupportedCombination:
            return True
        return False

    default = ("EXTEND", "DECODE", "TARGET_VERIFY", "DRAFT_EXTEND_V2")
    for _, prefill, decode, _ in cells([layout], [None]):
        pair = layout, prefill, decode
        for modes in (EXTENDS, ("DECODE", "EXTEND", "MIXED"), ("MIXED", "EXTEND"), ("DECODE",), MODES):
            bad = any(expected(*pair, mode) == REFUSED for mode in modes)
            assert refused(prefill, decode, modes) == bad, (pair, modes)
        assert refused(prefill, decode) == any(expected(*pair, mode) == REFUSED for mode in default), pair


def test_the_table_needs_neither_torch_nor_sglang():
    code = (
        "import sys; from sgl_kvpool.attention import topk_transform as table\n"
        "table.select_topk_transform('fp4', 'flashmla_sparse', 'kvpool_mla', 'MIXED')\n"
        "table.check_combination('bf16', 'fa3', 'fa3', index_kpool=4)\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'sglang', 'triton'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_transforms_are_paged_and_ragged():
    assert [member.name for member in TopkTransform] == [PAGED, RAGGED]
    assert issubclass(UnsupportedCombination, ValueError)
