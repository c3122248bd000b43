"""The table of DSA's top-k transform beside SGLang 0.5.23's own rule, and models with pooled index keys.

SGLang's answers are computed by its own methods, on an object that has the attributes they read and no more.
"""

import argparse
import inspect
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
from codec_oracle import LAYOUTS
from topk_cells import MODES, REFUSED, answer, cells

from sgl_kvpool.srt.facts import topk_transform as topk

pytestmark = pytest.mark.usefixtures("published")

#: Layouts that SGLang has.
STOCK = ("bf16", "fp8", "fp8_block_scale")


def lines(text):
    """Words of every line."""
    return [line.split() for line in text.splitlines() if line.strip()]


def sglang(layout, prefill, **attributes):
    """SGLang's backend over such a pool; `dsa_kv_cache_store_fp8` is true of 656-byte rows alone."""
    from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend

    # Without the hooks that another test of this process may have put there.
    names = ("get_topk_transform_method", "set_dsa_prefill_impl")
    own = {name: inspect.unwrap(getattr(DeepseekSparseAttnBackend, name)) for name in names}
    assert {Path(method.__code__.co_filename).name for method in own.values()} == {"dsa_backend.py"}
    backend = object.__new__(type("Unhooked", (DeepseekSparseAttnBackend,), own))
    backend.dsa_kv_cache_store_fp8 = layout == "fp8_block_scale"
    backend.dsa_prefill_impl = prefill
    vars(backend).update(attributes)
    return backend


def sglangs_answer(layout, prefill, mode):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return sglang(layout, prefill).get_topk_transform_method(mode and ForwardMode[mode]).name


# -------------------------------------------------------------------- names that SGLang may add to


def test_every_mode_is_in_the_table():
    """Who attends in a new mode, and with what, has to be found out before it is served."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    new = {mode.name for mode in ForwardMode} - set(MODES)
    assert not new, f"SGLang's ForwardMode has {sorted(new)}: add them to topk_transform"
    gone = set(MODES) - {mode.name for mode in ForwardMode}
    assert not gone, f"SGLang's ForwardMode has no {sorted(gone)} any more"
    extends = {mode.name for mode in ForwardMode if mode.is_extend_without_speculative()}
    assert extends == set(topk.EXTEND_MODES)


def test_every_implementation_is_in_the_table():
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    flags = {flag: action.choices for action in parser._actions for flag in action.option_strings}
    other_platforms = {"triton", "aiter", "intel_xpu"}  # ROCm, ROCm and XPU
    ours = {"kvpool_mla"}
    assert set(flags["--dsa-prefill-backend"]) == set(topk.IMPLEMENTATIONS) - ours | other_platforms
    assert set(flags["--dsa-decode-backend"]) <= set(topk.IMPLEMENTATIONS) | other_platforms
    # Named by refusals of flashmla_sparse_q8.
    assert {"--enable-mixed-chunk", "--enable-pdmux", "--dllm-algorithm"} <= set(flags)


# -------------------------------------------------------------------- where SGLang is wrong

#: Layout, prefill, decode, and the modes in which SGLang says PAGED where the kernel needs gathered rows.
SGLANG_IS_WRONG = """
fp8_block_scale  flashmla_sparse    flashmla_kv            MIXED SPLIT_PREFILL DLLM_EXTEND
fp8_block_scale  flashmla_sparse    flashinfer_sparse_mla  MIXED SPLIT_PREFILL DLLM_EXTEND
fp8_block_scale  flashmla_sparse    kvpool_mla             MIXED SPLIT_PREFILL DLLM_EXTEND
fp8_block_scale  triton_sparse_mla  flashmla_kv            MIXED SPLIT_PREFILL DLLM_EXTEND
fp8_block_scale  triton_sparse_mla  flashinfer_sparse_mla  MIXED SPLIT_PREFILL DLLM_EXTEND
fp8_block_scale  triton_sparse_mla  kvpool_mla             MIXED SPLIT_PREFILL DLLM_EXTEND
"""


def test_sglang_is_wrong_in_these_cells_and_in_no_other():
    wrong = {(*pair, mode) for *pair, m, s, d in lines(SGLANG_IS_WRONG) for mode in (m, s, d)}
    differs = {
        (layout, prefill, decode, mode)
        for layout, prefill, decode, mode in cells(STOCK)
        if answer(layout, prefill, decode, mode) not in (REFUSED, sglangs_answer(layout, prefill, mode))
    }
    assert differs == wrong
    for layout, prefill, decode, mode in wrong:
        assert sglangs_answer(layout, prefill, mode) == "PAGED"
        assert topk.select_topk_transform(layout, prefill, decode, mode).name == "RAGGED"


@pytest.mark.parametrize(
    ("layout", "blackwell", "mode", "chosen", "transform"),
    [
        ("bf16", False, "EXTEND", "flashmla_sparse", "PAGED"),
        ("bf16", True, "EXTEND", "flashmla_sparse", "PAGED"),
        ("fp8_block_scale", False, "EXTEND", "flashmla_kv", "PAGED"),
        ("fp8_block_scale", False, "MIXED", "flashmla_kv", "PAGED"),
        ("fp8_block_scale", True, "MIXED", "flashmla_kv", "PAGED"),
        ("fp8_block_scale", True, "EXTEND", "flashmla_sparse", "RAGGED"),
    ],
)
def test_what_flashmla_auto_stands_for(layout, blackwell, mode, chosen, transform):
    """SGLang chooses before it asks for the transform (:1130): both names need the right answer."""
    backend = choose(layout, blackwell=blackwell, mode=mode)
    assert backend.dsa_prefill_impl == chosen
    assert topk.select_topk_transform(layout, chosen, "kvpool_mla", mode).name == transform
    if not blackwell:
        assert topk.select_topk_transform(layout, "flashmla_auto", "kvpool_mla", mode).name == transform


def choose(layout, *, blackwell=False, mode="EXTEND", **attributes):
    """SGLang's backend after its choice for flashmla_auto, made for a short batch in a prefill graph."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    backend = sglang(
        layout, "flashmla_auto", enable_auto_select_prefill_impl=True, _get_device_sm=None,
        _is_blackwell=lambda: blackwell, _is_in_breakable_cuda_graph=lambda: True,
        _is_in_tc_piecewise_cuda_graph=lambda: False, **attributes,
    )  # fmt: skip
    batch = SimpleNamespace(forward_mode=ForwardMode[mode], seq_lens_sum=100, extend_num_tokens=100)
    backend.set_dsa_prefill_impl(batch)
    return backend


# -------------------------------------------------------------------- pooled index keys


def test_pooled_index_keys_keep_sglangs_rule():
    seen = set()
    for layout, prefill, decode, mode in cells(STOCK):
        if "kvpool_mla" not in (prefill, decode):
            said = topk.select_topk_transform(layout, prefill, decode, mode, index_kpool=4).name
            assert said == sglangs_answer(layout, prefill, mode), (layout, prefill, decode, mode)
            seen |= {(layout, prefill)} if said == "RAGGED" else set()
    assert len(seen) == 5


def test_rows_that_only_ours_reads_are_attended_in_the_pool_with_pooled_index_keys():
    for layout, prefill, decode, mode in cells(LAYOUTS):
        ours = layout.startswith("fp4")
        if ours and (prefill, decode) == ("flashmla_sparse", "kvpool_mla"):
            assert topk.select_topk_transform(layout, prefill, decode, mode, index_kpool=2).name == "PAGED"
            topk.check_combination(layout, prefill, decode, ("EXTEND", "MIXED"), index_kpool=2)
        elif ours or "kvpool_mla" in (prefill, decode):
            with pytest.raises(topk.UnsupportedCombination, match="index_kpool"):
                topk.select_topk_transform(layout, prefill, decode, mode, index_kpool=2)
            with pytest.raises(topk.UnsupportedCombination, match="index_kpool"):
                topk.check_combination(layout, prefill, decode, index_kpool=2)


#: Implementations that attend the tail of such models on Hopper, where flashmla_sparse is replaced by fa3
#: (dsa/dsa_backend_kpool.py:77): "works", or "misreads" rows. SGLang raises for the others.
KPOOL_SIDES = """
bf16             prefill  works     flashmla_sparse flashmla_sparse_q8 flashmla_auto fa3 tilelang trtllm
bf16             decode   works     flashmla_sparse fa3 tilelang trtllm
fp8              prefill  works     tilelang trtllm
fp8              prefill  misreads  flashmla_sparse flashmla_sparse_q8 flashmla_auto fa3
fp8              decode   works     tilelang trtllm
fp8              decode   misreads  flashmla_sparse fa3
fp8_block_scale  prefill  misreads  flashmla_sparse fa3 tilelang trtllm
fp8_block_scale  decode   misreads  flashmla_sparse fa3 tilelang trtllm
"""


def kpool_sides(verdict):
    rows = [row for row in lines(KPOOL_SIDES) if row[2] == verdict]
    return {(layout, side, name) for layout, side, _, *names in rows for name in names}


def sglang_raises(layout, side, name):
    """Whether SGLang's guard raises at the first batch."""
    attributes = {"dsa_index_kpool": 4, "device_sm_major": 9}
    backend = choose(layout, **attributes) if name == "flashmla_auto" else sglang(layout, name, **attributes)
    # The decode implementation is never replaced.
    attending = backend.dsa_prefill_impl if side == "prefill" else name
    topk_indices = object()  # only its presence is checked
    attending = backend._resolve_kpool_tail_backend(topk_indices, attending)
    try:
        backend._check_kpool_tail_backend(topk_indices, attending, side)
    except NotImplementedError:
        return True
    return False


def test_what_sglang_raises_for_with_pooled_index_keys():
    passes = kpool_sides("works") | kpool_sides("misreads")
    for case in itertools.product(STOCK, ("prefill", "decode"), set(topk.IMPLEMENTATIONS) - {"kvpool_mla"}):
        assert sglang_raises(*case) == (case not in passes)


@pytest.mark.parametrize("prefill", [name for name in topk.IMPLEMENTATIONS if name != "kvpool_mla"])
def test_servers_with_pooled_index_keys(prefill):
    works = kpool_sides("works")
    for layout, _, decode, _ in cells(STOCK, [None]):
        if decode == "kvpool_mla":
            continue
        good = all((layout, side, name) in works for side, name in (("prefill", prefill), ("decode", decode)))
        if layout == "fp8":
            good = good and prefill == decode
        if good:
            topk.check_combination(layout, prefill, decode, index_kpool=4)
        else:
            with pytest.raises(topk.UnsupportedCombination):
                topk.check_combination(layout, prefill, decode, index_kpool=4)
