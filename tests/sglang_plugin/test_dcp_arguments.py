"""`--dcp-size` beside a layout, through SGLang's own argument parsing and resolution."""

import json

import pytest
from codec_oracle import LAYOUTS

#: Arguments with each feature of `DCP_FEATURES`.
REFUSED = {
    "--speculative-algorithm": ("EAGLE",),
    "--enable-deterministic-inference": (),
    "--enable-hierarchical-cache": (),
    "--disaggregation-mode": ("decode",),
    "--attn-dp-size": ("2",),
    "--pp-size": ("2",),
}


#: Arguments with which another model of the configurations has its queries scaled by position.
SCALED = {"original_max_position_embeddings": 8192, "beta": 0.1}


@pytest.fixture
def resolved(resolve, checkpoints, monkeypatch):
    """`resolved(layout, *argv)`: the resolving view of a server on Hopper: four ranks, two for a sequence."""
    import torch

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))

    def run(layout, *argv, model="mla", device="cuda"):
        from sglang.srt.arg_groups.overrides import resolving_view

        ours = ("--kv-cache-layout", layout, "--tp-size", "4", "--dcp-size", "2")
        return resolving_view(resolve(checkpoints[model], *ours, *argv, device=device))

    return run


@pytest.mark.parametrize("merge", ["ag_rs", "a2a"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read_by_our_backend(resolved, layout, merge):
    from sgl_kvpool.sglang_plugin.rules.attention import backends_in_use

    assert backends_in_use(resolved(layout, "--dcp-comm-backend", merge)) == ("kvpool_mla", "kvpool_mla")


@pytest.mark.parametrize("arrangement", ["token_major", "page_major"])
def test_arrangements(resolved, arrangement):
    assert resolved("fp4", "--kv-cache-arrangement", arrangement).dcp_size == 2


@pytest.mark.parametrize("flag", REFUSED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_features_that_do_not_go_with_it(resolved, layout, flag):
    start = f"^--dcp-size 2 does not work with --kv-cache-layout {layout} and {flag}.*: .*; leave out one of"
    with pytest.raises(ValueError, match=start):
        resolved(layout, flag, *REFUSED[flag])


def test_every_refused_feature_is_tested():
    from sgl_kvpool.sglang_plugin.rules.features import DCP_FEATURES

    assert [feature.flag for feature in DCP_FEATURES] == [*REFUSED]


@pytest.mark.parametrize(
    ("model", "device", "reason"),
    [
        ("mla", "cpu", "on a CPU: SGLang allocates slots for it on GPUs only; leave it out"),
        ("dsa", "cuda", "and DeepseekV32ForCausalLM: .* kernel for Blackwell, .*; leave it out"),
        ("kda", "cuda", "and KimiLinearForCausalLM: with layers that keep states .*; leave it out"),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_devices_and_models_that_do_not_go_with_it(resolved, layout, model, device, reason):
    start = f"^--dcp-size 2 does not work with --kv-cache-layout {layout} {reason}"
    with pytest.raises(ValueError, match=start):
        resolved(layout, model=model, device=device)


def test_queries_that_are_scaled_by_position_are_refused(resolved):
    override = json.dumps({"llama_4_scaling": SCALED})
    with pytest.raises(ValueError, match="it does not merge results of ranks; leave it out"):
        resolved("fp4", "--json-model-override-args", override)


def test_prefill_from_stored_rows_is_refused(resolved, monkeypatch):
    monkeypatch.setenv("KVPOOL_PREFILL_READS_ROWS", "1")
    with pytest.raises(ValueError, match="and KVPOOL_PREFILL_READS_ROWS=1: .* on several ranks; leave out"):
        resolved("bf16")


@pytest.mark.parametrize("flag", ["--attention-backend", "--decode-attention-backend"])
def test_sglangs_own_readers_are_refused(resolved, flag):
    with pytest.raises(ValueError, match="^--dcp-size 2 with --kv-cache-layout bf16 needs .* and fa3 has"):
        resolved("bf16", flag, "fa3")
