"""Servers of models with sparse attention: SGLang's own resolution with a layout, and what is refused."""

import pytest
from shown import SHOWN_SPARSE as SHOWN

#: Prefill and decode backend on Hopper if neither is named: SGLang's choice, and ours for `fp4`.
CHOSEN = {
    "bf16": ("flashmla_sparse", "fa3"),
    "fp8_block_scale": ("flashmla_kv", "flashmla_kv"),
    "fp4": ("flashmla_sparse", "flashmla_sparse"),
}


def pair(prefill, decode):
    return ("--dsa-prefill-backend", prefill, "--dsa-decode-backend", decode)


@pytest.fixture
def serve(resolve, checkpoints):
    """`serve(layout, argv)`: a resolving view of a server of the DSA checkpoint."""
    from sglang.srt.arg_groups.overrides import resolving_view

    def run(layout, *argv, model="dsa", **gpu):
        asked = ("--kv-cache-layout", layout) if layout else ()
        return resolving_view(resolve(checkpoints[model], *asked, *argv, device="cuda", **gpu))

    return run


@pytest.mark.parametrize(
    ("layout", "argv", "expected"),
    [
        *((layout, (), backends) for layout, backends in CHOSEN.items()),
        ("fp8", pair("tilelang", "tilelang"), ("tilelang", "tilelang")),
    ],
)
def test_choice(serve, layout, argv, expected):
    view = serve(layout, *argv)
    assert view.kv_cache_dtype == SHOWN[layout]
    assert (view.dsa_prefill_backend, view.dsa_decode_backend) == expected
    assert view.attention_backend == "dsa"
    assert view.page_size == 64


@pytest.mark.parametrize(
    ("layout", "named", "argv"),
    [
        ("bf16", ("flashmla_sparse", "flashmla_sparse"), ()),
        ("bf16", ("tilelang", "fa3"), ()),
        ("bf16", ("flashmla_sparse_q8", "fa3"), ()),
        ("bf16", None, ("--kv-cache-dtype", "bfloat16")),
        ("fp8_block_scale", ("flashmla_sparse", "flashmla_kv"), ()),
        ("fp8_block_scale", ("flashmla_sparse", "flashmla_kv"), ("--enable-mixed-chunk",)),
        ("fp8_block_scale", ("triton_sparse_mla", "flashmla_kv"), ()),
        ("fp8_block_scale", ("flashmla_auto", "flashmla_kv"), ()),
        ("fp8_block_scale", None, ("--kv-cache-dtype", "fp8_e4m3")),
        # What SGLang is shown for a dense model: one rule for every model.
        ("fp8_block_scale", None, ("--kv-cache-dtype", "bfloat16")),
        ("fp4", None, ("--enable-mixed-chunk",)),
        ("fp4", ("flashmla_sparse", "flashmla_sparse"), ()),
        ("fp4", None, ("--attention-backend", "dsa")),
    ],
)
def test_accepted_backends_are_used(serve, layout, named, argv):
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


REFUSED = [
    # Pairs that SGLang 0.5.23 accepts for packed rows: three with a kernel over 16-bit keys, which would get
    # packed bytes, and flashmla_auto in decode.
    ("fp8_block_scale", pair("flashmla_sparse", "flashmla_sparse"), "decode flashmla_sparse cannot read"),
    ("fp8_block_scale", pair("flashmla_sparse", "fa3"), "decode fa3 cannot read"),
    ("fp8_block_scale", pair("fa3", "flashmla_kv"), "prefill fa3 cannot read"),
    ("fp8_block_scale", pair("flashmla_kv", "flashmla_auto"), "flashmla_auto is for prefill only"),
    # SGLang's choice on Hopper does not read raw rows; trtllm in one phase makes both phases store raw rows.
    (
        "fp8",
        (),
        "prefill flashmla_kv cannot read rows of KV cache layout fp8; use --kv-cache-layout fp8_block_scale,",
    ),
    ("fp8", pair("flashmla_sparse", "trtllm"), "prefill flashmla_sparse cannot read"),
    ("fp8", pair("trtllm", "flashmla_kv"), "decode flashmla_kv cannot read"),
    ("fp8", pair("fa3", "fa3"), "prefill fa3 cannot read"),
    ("fp8", pair("flashmla_auto", "trtllm"), "prefill flashmla_auto cannot read"),
    ("fp8_block_scale", pair("trtllm", "trtllm"), "prefill trtllm cannot read"),
    ("bf16", pair("flashmla_kv", "fa3"), "would quantise the whole pool"),
    ("bf16", pair("flashmla_sparse", "flashmla_kv"), "would quantise the whole pool"),
    (
        "fp8_block_scale",
        (*pair("flashmla_sparse_q8", "flashmla_kv"), "--enable-mixed-chunk"),
        "in EXTEND batches only, and this one is MIXED; leave out .*--enable-mixed-chunk",
    ),
    ("fp4", pair("flashmla_sparse", "fa3"), "--dsa-decode-backend fa3 cannot read"),
    (
        "fp4",
        pair("flashmla_kv", "flashmla_kv"),
        "--dsa-decode-backend flashmla_kv cannot read .*; leave them",
    ),
    ("fp4", ("--dsa-prefill-backend", "triton_sparse_mla"), "cannot read rows of --kv-cache-layout fp4"),
    ("fp4", ("--enable-torch-compile",), "--enable-torch-compile does not work with --kv-cache-layout fp4"),
    # SGLang's backend for sparse attention is not used.
    (
        "bf16",
        ("--attention-backend", "fa3"),
        "--attention-backend fa3 cannot compute .*; leave it out, and",
    ),
    ("fp4", ("--attention-backend", "kvpool_mla"), "--attention-backend kvpool_mla cannot compute the"),
    ("fp4", ("--decode-attention-backend", "flashinfer"), "--decode-attention-backend flashinfer cannot"),
    ("fp4", ("--kv-cache-arrangement", "token_major"), "--kv-cache-arrangement token_major does not work"),
    (
        "fp4",
        ("--kv-cache-dtype", "fp8_e4m3"),
        "--kv-cache-dtype 'fp8_e4m3' contradicts .*fp4: auto, bf",
    ),
    (
        "fp8_block_scale",
        ("--kv-cache-dtype", "fp8_e5m2"),
        "contradicts .*_scale: auto, bfloat16, bf16, fp",
    ),
    ("fp4", ("--enable-hisparse",), "--enable-hisparse"),
]


@pytest.mark.parametrize(
    ("layout", "argv", "message"), REFUSED, ids=[f"{r[0]}-{i}" for i, r in enumerate(REFUSED)]
)
def test_refused(serve, layout, argv, message):
    with pytest.raises(ValueError, match=message):
        serve(layout, *argv)


@pytest.mark.parametrize(
    ("model", "message"),
    [("dsa-kpool", "pooled index keys"), ("dsa-sinks", "learnable attention sinks")],
)
def test_models_that_fp4_is_not_for(serve, model, message):
    with pytest.raises(ValueError, match=f"{message}.*use --kv-cache-layout bf16"):
        serve("fp4", model=model)
    serve("bf16", model=model)


@pytest.mark.parametrize(
    ("argv", "more", "message"),
    [
        (
            (),
            {"capability": (8, 9)},
            "needs a Hopper GPU .*, and this one has 8.9; use --kv-cache-layout",
        ),
        (("--dtype", "float16"), {}, "--dtype float16 does not work .* use --dtype bfloat16"),
        ((), {"model": "dsa-rank1024"}, "kv_lora_rank=1024, .* have 704 bytes; .* up to kv_lora_rank 512, "),
        ((), {"model": "dsa-rank384"}, "kv_lora_rank=384, .* have 344 bytes; .* multiples of 16 bytes"),
    ],
)
def test_what_our_kernel_does_not_compute(serve, argv, more, message):
    with pytest.raises(ValueError, match=message):
        serve("fp4", *argv, **more)


def test_draft_backends_that_do_not_read_sparse_rows_of_the_same_checkpoint(serve, checkpoints):
    path, backend = "--speculative-draft-model-path", "--speculative-draft-attention-backend"
    argv = ("--speculative-algorithm", "EAGLE", backend, "fa3")
    for same in ((), (path, checkpoints["dsa"]), (path, checkpoints["dsa"] + "/../dsa/")):
        with pytest.raises(ValueError, match=f"^{backend} fa3 cannot compute the sparse attention"):
            serve("fp4", *argv, *same)
    # Another checkpoint: its attention is known when its pool is built.
    serve("fp4", *argv, path, checkpoints["dsa3"])


def test_names_of_other_hardware(serve, monkeypatch):
    text = "--dsa-decode-backend aiter is not for NVIDIA GPUs; use --dsa-prefill-backend flashmla_sparse "
    with pytest.raises(ValueError, match=text):
        serve("fp8_block_scale", *pair("flashmla_sparse", "aiter"))
    monkeypatch.setenv("KVPOOL_FIX_TOPK", "1")
    with pytest.raises(ValueError, match=text):
        serve(None, *FP8, *pair("flashmla_sparse", "aiter"))


def test_one_phase_named(serve):
    """For the other phase, SGLang selects a backend for dense attention."""
    with pytest.raises(ValueError, match=r"the decode attention backend, \w+, cannot compute .*leave out --"):
        serve("bf16", "--prefill-attention-backend", "dsa")


def test_rows_that_prefill_does_not_read(serve, monkeypatch):
    monkeypatch.setenv("KVPOOL_PREFILL_READS_ROWS", "1")
    with pytest.raises(ValueError, match="PREFILL_READS_ROWS=1 does nothing for .* dsa; leave it out"):
        serve("fp4")


def test_not_on_a_cpu(resolve, checkpoints):
    """Refused before SGLang queries a GPU, which is absent."""
    with pytest.raises(ValueError, match="on NVIDIA GPUs only, and the device is cpu"):
        resolve(checkpoints["dsa"], "--kv-cache-layout", "fp4")


# -------------------------------------------------------------------- the fix alone

FP8 = ("--kv-cache-dtype", "fp8_e4m3")
WRONG = [
    (*FP8, *pair("flashmla_sparse", "flashmla_sparse")),
    (*FP8, *pair("flashmla_kv", "fa3")),
    (*FP8, *pair("flashmla_sparse", "trtllm")),
]


@pytest.mark.parametrize("argv", WRONG)
def test_the_fix_alone_refuses_what_stock_servers_fail_with(serve, argv, monkeypatch):
    serve(None, *argv)  # SGLang as it is finds nothing wrong with it
    monkeypatch.setenv("KVPOOL_FIX_TOPK", "1")
    with pytest.raises(
        ValueError, match="cannot read rows of KV cache layout fp8.*; use --dsa-prefill-backend"
    ):
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


def test_the_fix_does_not_reach_ray_actors(serve, monkeypatch):
    monkeypatch.setenv("KVPOOL_FIX_TOPK", "1")
    with pytest.raises(ValueError, match="--use-ray does not work with KVPOOL_FIX_TOPK=1"):
        serve(None, "--use-ray")


def test_dense_models_do_not_mind_the_fix(serve, monkeypatch):
    monkeypatch.setenv("KVPOOL_FIX_TOPK", "1")
    assert serve(None, model="mla").kv_cache_dtype == "auto"
