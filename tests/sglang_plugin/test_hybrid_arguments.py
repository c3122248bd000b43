"""Servers of models that mix MLA with linear attention: SGLang's resolution with a layout."""

import pytest
from codec_oracle import LAYOUTS

DENSE = ["kda", "k3", "lightning", "bailing-kda", "bailing-kda-norope"]
HICACHE = "--enable-hierarchical-cache"
TILELANG = ("--dsa-prefill-backend", "tilelang", "--dsa-decode-backend", "tilelang")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", DENSE)
def test_dense_hybrids_on_hopper(serve, model, layout):
    view = serve(model, layout)
    assert view.kv_cache_dtype == ("fp8_e4m3" if layout == "fp8" else "bfloat16")
    if layout != "bf16":  # SGLang's own backends read bf16 rows
        assert view.attention_backend == "kvpool_mla"
    assert (view.page_size, view.mamba_radix_cache_strategy) == (1, "extra_buffer")
    assert not view.disable_overlap_schedule


@pytest.mark.parametrize(
    ("argv", "device", "page_size", "strategy"),
    [
        ((), "cuda", 64, "extra_buffer"),
        (("--page-size", "16"), "cuda", 16, "extra_buffer"),
        # SGLang keeps states only at page boundaries.
        (("--mamba-track-interval", "32"), "cuda", 32, "extra_buffer"),
        (("--mamba-track-interval", "100"), "cuda", 4, "extra_buffer"),
        # These need pages of one token, which SGLang selects without a layout too.
        (("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"), "cuda", 1, "no_buffer"),
        (("--disable-overlap-schedule",), "cpu", 1, "no_buffer"),
        # SGLang supports the extra buffer only for the linear-attention backend triton.
        (("--linear-attn-backend", "cutedsl"), "cuda", 1, "no_buffer"),
        (("--linear-attn-backend", "flashkda", "--page-size", "1"), "cuda", 1, "no_buffer"),
    ],
)
@pytest.mark.parametrize("model", DENSE)
def test_pages_with_a_host_tier(serve, model, argv, device, page_size, strategy):
    view = serve(model, "fp4", HICACHE, *argv, device=device)
    assert (view.page_size, view.mamba_radix_cache_strategy) == (page_size, strategy)


@pytest.mark.parametrize(
    ("layout", "argv"), [("bf16", ()), ("bf16", TILELANG), ("fp8", TILELANG), ("fp4", ())]
)
def test_sparse_hybrids_with_pooled_index_keys(serve, layout, argv):
    """SGLang attends tokens after the last pooled key with fa3, tilelang or trtllm, and we do the rest."""
    view = serve("glm5", layout, *argv)
    assert (view.attention_backend, view.page_size) == ("dsa", 256)
    assert view.kv_cache_dtype == ("fp8_e4m3" if layout == "fp8" else "bfloat16")


@pytest.mark.parametrize("ours", [(), ("--kv-host-engine", "staged"), ("--kv-host-layout", "fp4")])
def test_compressed_index_keys_have_a_host_tier(serve, ours):
    """A page ends where a group of pooled keys ends, so a prefix needs no tail of a request."""
    assert serve("glm5-compressed", "bf16", HICACHE, *ours).page_size == 256


@pytest.mark.parametrize("spec", [False, True])
def test_states_that_a_host_tier_cannot_give_back(serve, checkpoints, spec):
    """SGLang resets the cursor of a state's replay when it copies states, but not when it loads them."""
    flag, argv = "--enable-linear-replayssm", ["--mamba-radix-cache-strategy", "no_buffer"]
    if spec:
        flag = f"{flag}-spec"
        argv += ["--speculative-algorithm", "NEXTN", "--speculative-eagle-topk", "1"]
        argv += ["--speculative-num-steps", "1", "--speculative-num-draft-tokens", "2"]
        argv += ["--speculative-draft-model-path", checkpoints["bailing-kda"], "--max-running-requests", "4"]
    argv += [flag, "--disable-overlap-schedule"]
    with pytest.raises(ValueError, match=f"{flag} does not work with {HICACHE} .*layout fp4"):
        serve("bailing-kda", "fp4", HICACHE, *argv)
    serve("bailing-kda", "fp4", *argv)


@pytest.mark.parametrize(("stages", "layers"), [("6", "0 to 0"), ("3", "0 to 1"), ("2", "0 to 2")])
def test_stages_without_rows_or_without_states_have_no_host_tier(serve, monkeypatch, stages, layers):
    with pytest.raises(ValueError, match=f"--pp-size {stages} gives layers {layers} of Kimi.*fewer stages"):
        serve("kda", "fp4", HICACHE, "--pp-size", stages)
    serve("kda", "fp4", "--pp-size", stages)
    monkeypatch.setenv("SGLANG_PP_LAYER_PARTITION", "4,2")
    serve("kda", "fp4", HICACHE, "--pp-size", "2")


@pytest.mark.parametrize("model", DENSE)
def test_without_a_layout_nothing_changes(serve, model):
    view = serve(model, None)
    assert (view.kv_cache_dtype, view.page_size) == ("auto", 1)
    assert view.attention_backend != "kvpool_mla"
    assert serve(model, None, HICACHE).page_size == 1
