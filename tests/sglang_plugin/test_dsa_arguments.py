"""Servers of models with sparse attention: SGLang's own resolution with a layout, and what is refused."""

import pytest
from refused import pair
from shown import SHOWN_SPARSE as SHOWN

#: Prefill and decode backend on Hopper if neither is named: SGLang's choice, and ours for `fp4`.
CHOSEN = {
    "bf16": ("flashmla_sparse", "fa3"),
    "fp8_block_scale": ("flashmla_kv", "flashmla_kv"),
    "fp4": ("flashmla_sparse", "flashmla_sparse"),
}


@pytest.fixture
def serve(serve):
    """`serve(layout, *argv)`: a resolving view of a server of the DSA checkpoint."""
    return lambda layout, *argv, model="dsa", **gpu: serve(model, layout, *argv, **gpu)


@pytest.mark.parametrize(
    ("layout", "named", "argv"),
    [
        *((layout, None, ()) for layout in CHOSEN),
        ("fp8", ("tilelang", "tilelang"), ()),
        ("bf16", ("flashmla_sparse", "flashmla_sparse"), ()),
        ("bf16", ("flashmla_sparse_q8", "fa3"), ()),
        ("fp8_block_scale", ("flashmla_sparse", "flashmla_kv"), ()),
        ("fp8_block_scale", ("flashmla_sparse", "flashmla_kv"), ("--enable-mixed-chunk",)),
        ("fp8_block_scale", ("flashmla_auto", "flashmla_kv"), ()),
        ("fp8_block_scale", None, ("--kv-cache-dtype", "fp8_e4m3")),
        # What SGLang is shown for a dense model: one rule for every model.
        ("fp8_block_scale", None, ("--kv-cache-dtype", "bfloat16")),
        ("fp4", ("flashmla_sparse", "flashmla_sparse"), ()),
        ("fp4", None, ("--attention-backend", "dsa")),
    ],
)
def test_backends_that_are_chosen_or_accepted(serve, layout, named, argv):
    view = serve(layout, *(pair(*named) if named else ()), *argv)
    assert (view.dsa_prefill_backend, view.dsa_decode_backend) == (named or CHOSEN[layout])
    assert (view.attention_backend, view.kv_cache_dtype, view.page_size) == ("dsa", SHOWN[layout], 64)
    assert view.enable_mixed_chunk == ("--enable-mixed-chunk" in argv)


def test_blackwell_would_store_other_rows(serve):
    """On Blackwell, SGLang selects trtllm for fp8_e4m3, which reads raw rows."""
    view = serve("fp8", capability=(10, 0))
    assert (view.dsa_prefill_backend, view.dsa_decode_backend) == ("trtllm", "trtllm")
    with pytest.raises(ValueError, match="trtllm cannot read rows of KV cache layout fp8_block_scale; use"):
        serve("fp8_block_scale", capability=(10, 0))


def test_rows_that_prefill_does_not_read(serve, monkeypatch):
    monkeypatch.setenv("KVPOOL_PREFILL_READS_ROWS", "1")
    with pytest.raises(ValueError, match="PREFILL_READS_ROWS=1 does nothing for .* dsa; leave it out"):
        serve("fp4")


# -------------------------------------------------------------------- the fix alone

FP8 = ("--kv-cache-dtype", "fp8_e4m3")


@pytest.mark.parametrize(
    "names", [("flashmla_sparse", "flashmla_sparse"), ("flashmla_kv", "fa3"), ("flashmla_sparse", "trtllm")]
)
def test_the_fix_alone_refuses_what_stock_servers_fail_with(serve, names, monkeypatch):
    argv = (*FP8, *pair(*names))
    serve(None, *argv)  # SGLang as it is finds nothing wrong with it
    monkeypatch.setenv("KVPOOL_FIX_TOPK", "1")
    text = "cannot read rows of KV cache layout fp8.*; use --dsa-prefill-backend"
    with pytest.raises(ValueError, match=text):
        serve(None, *argv)


@pytest.mark.parametrize(
    "argv",
    [
        (),
        FP8,
        (*FP8, *pair("flashmla_sparse", "flashmla_kv"), "--enable-mixed-chunk"),
        (*FP8, *pair("tilelang", "tilelang")),
        ("--kv-cache-dtype", "bfloat16", *pair("flashmla_sparse", "flashmla_kv")),  # slow, not wrong
    ],
)
def test_the_fix_alone_changes_no_argument(serve, argv, monkeypatch):
    fields = ("kv_cache_dtype", "dsa_prefill_backend", "dsa_decode_backend", "attention_backend", "page_size")
    before = [getattr(serve(None, *argv), field) for field in fields]
    monkeypatch.setenv("KVPOOL_FIX_TOPK", "1")
    assert [getattr(serve(None, *argv), field) for field in fields] == before


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_disaggregated_server_is_checked_for_both_sides(serve, monkeypatch, role):
    """With trtllm in either phase, SGLang's model leaves RoPE to a kernel that is not called."""
    argv = (*FP8, *pair("flashmla_sparse", "trtllm"), "--disaggregation-mode", role)
    serve(None, *argv)
    monkeypatch.setenv("KVPOOL_FIX_TOPK", "1")
    for layout in (None, "fp8_block_scale"):
        with pytest.raises(ValueError, match="cannot read rows of KV cache layout"):
            serve(layout, *argv)
    serve("fp8_block_scale", *pair("flashmla_sparse", "flashmla_kv"), "--disaggregation-mode", role)


def test_the_fix_does_not_reach_ray_actors_and_dense_models_do_not_mind_it(serve, monkeypatch):
    monkeypatch.setenv("KVPOOL_FIX_TOPK", "1")
    assert serve(None, model="mla").kv_cache_dtype == "auto"
    with pytest.raises(ValueError, match="--use-ray does not work with KVPOOL_FIX_TOPK=1"):
        serve(None, "--use-ray")
