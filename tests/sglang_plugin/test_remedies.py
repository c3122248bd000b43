"""What refusals say, and that the ways out that they name work."""

import pytest
from refused import EAGLE, cases, pair

from sgl_kvpool.refusal import Refusal, Way
from sgl_kvpool.sglang_plugin.rules.features import (
    ARRANGEMENT_FEATURES,
    DCP_FEATURES,
    DENSE_DCP_FEATURES,
    DRAFT_FEATURES,
    LAYOUT_FEATURES,
    SPARSE_DCP_FEATURES,
)

CASES = [*cases()]
#: Features that SGLang does not accept alone: serving without a layout is no way out.
MESSAGE_ONLY = [
    *("--enable-page-major-kv-layout", "--enable-linker-mla-dedup"),
    *("--enable-kv-cache-sharding", "--enable-dsa-cache-layer-split"),
    "--enable-hisparse",  # with sparse attention alone
]


def taking(way, words):
    """A command line that goes this way; the words that it adds replace those with the same flags."""
    kept, dropping = [], False
    for word in words:
        if word.startswith("--"):
            dropping = word.partition("=")[0] in way.flags
        kept += [] if dropping else [word]
    return [*kept, *way.add]


@pytest.mark.parametrize(
    ("model", "device", "layout", "argv", "text"), CASES, ids=[" ".join([*c[:3], *c[3]]) for c in CASES]
)
def test_refusals_and_their_ways_out(resolve, checkpoints, model, device, layout, argv, text):
    """A server with the arguments that a refusal proposes is accepted."""
    start = ["--kv-cache-layout", layout, *argv]
    with pytest.raises(Refusal, match=f"^{text}") as refused:
        resolve(checkpoints[model], *start, device=device)
    assert refused.value.ways, refused.value
    for way in refused.value.ways:
        assert isinstance(way, Way), way
        assert all(part in str(refused.value) for word in way.add for part in word.split("=")), way
        changed = taking(way, start)
        assert changed != start
        resolve(checkpoints[model], *changed, device=device)


@pytest.mark.parametrize("flag", MESSAGE_ONLY)
def test_features_that_sglang_refuses_alone(resolve, checkpoints, flag):
    with pytest.raises(Refusal, match=f"^{flag} does not work with --kv-cache-layout fp8_block_scale: "):
        resolve(checkpoints["mla"], "--kv-cache-layout", "fp8_block_scale", flag)


@pytest.mark.parametrize(
    ("features", "beside"),
    [
        ((*LAYOUT_FEATURES, *ARRANGEMENT_FEATURES), "--"),
        ((*DCP_FEATURES, *DENSE_DCP_FEATURES, *SPARSE_DCP_FEATURES), "--dcp-size"),
        (DRAFT_FEATURES, "--speculative-algorithm"),
    ],
)
def test_every_feature_has_a_case(features, beside):
    lines = [*MESSAGE_ONLY, *(" ".join(argv) for _, _, _, argv, _ in CASES)]
    for feature in features:
        assert any(f"{feature.flag} " in f"{line} " and beside in line for line in lines), feature.flag


def test_what_gives_the_user_most_is_named_first(resolve, checkpoints):

    def advice(model, layout, *argv, **gpu):
        with pytest.raises(Refusal) as refused:
            resolve(checkpoints[model], "--kv-cache-layout", layout, *argv, device="cuda", **gpu)
        return str(refused.value).rpartition("; ")[2]

    assert advice("dsa", "fp8").startswith("use --kv-cache-layout fp8_block_scale, or ")
    block_scale = "use --kv-cache-layout fp8_block_scale, "
    assert advice("dsa", "fp4", "--enable-torch-compile").startswith(block_scale)
    assert advice("dsa", "bf16", *pair("flashmla_kv", "flashmla_kv")).startswith(block_scale)
    # Half of the bytes of bf16.
    assert advice("dsa-kpool", "fp8").startswith("use --kv-cache-layout fp8 --dsa-prefill-backend til")
    # What needs Blackwell is not proposed on Hopper.
    assert advice("mla", "fp8", "--attention-backend", "fa3") == (
        "leave it out, or use one of: kvpool_mla, flashmla, triton"
    )
    assert "flashmla" not in advice("mla", "fp8", "--attention-backend", "fa3", *EAGLE)
    assert advice("dsa", "fp8_block_scale", capability=(10, 0)).startswith("use --kv-cache-layout fp8, or ")
