"""`--dcp-size` beside a layout, through SGLang's own argument parsing and resolution."""

import pytest
from codec_oracle import LAYOUTS
from refused import EAGLE, STEPS, TIER
from sglang.srt.arg_groups.overrides import attention_backends_of


@pytest.fixture
def resolved(serve):
    """`resolved(layout, *argv)`: the resolving view of a server: four ranks, two for a sequence."""
    return lambda layout, *argv: serve("mla", layout, "--tp-size", "4", "--dcp-size", "2", *argv)


@pytest.mark.parametrize("merge", ["ag_rs", "a2a"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read_by_our_backend(resolved, layout, merge):
    view = resolved(layout, "--dcp-comm-backend", merge)
    assert attention_backends_of(view) == ("kvpool_mla", "kvpool_mla")


@pytest.mark.parametrize("store", [None, "file", "mooncake"])
def test_host_tiers(resolved, capfd, store):
    argv = ["--enable-hierarchical-cache", *(("--hicache-storage-backend", store) if store else ())]
    assert resolved("fp4", *argv).page_size == 64
    said = "sgl-kvpool: --kv-host-sharing rank (--dcp-size 2: ranks of decode context parallelism hold "
    assert said in capfd.readouterr().err


@pytest.fixture
def sparse(serve):
    """`sparse(layout, *argv)`: the same of a model with sparse attention."""
    return lambda layout, *argv: serve("dsa", layout, "--tp-size", "4", "--dcp-size", "2", *argv)


BUFFER_ONLY = ("--hicache-host-memory-mode", "buffer_only")
#: A model's own layer for multi-token prediction as its draft.
DRAFT = (*EAGLE, "--json-model-override-args", '{"num_nextn_predict_layers": 1}')


@pytest.mark.parametrize("merge", ["ag_rs", "a2a"])
@pytest.mark.parametrize("argv", [(), DRAFT, ("--enable-mixed-chunk",)])
@pytest.mark.parametrize("layout", ["bf16", "fp8_block_scale", "fp4"])
def test_our_decode_attends_lists_in_all_phases(sparse, layout, argv, merge):
    """SGLang uses trtllm, and with a2a, its default for merging on Hopper, weights of all heads."""
    view = sparse(layout, *argv, "--dcp-comm-backend", merge)
    assert (view.dsa_prefill_backend, view.dsa_decode_backend) == ("flashmla_sparse", "flashmla_sparse")
    assert view.dcp_replicate_q_proj is False
    assert (view.attention_backend, view.page_size) == ("dsa", 64)


@pytest.mark.parametrize("store", [(), ("--hicache-storage-backend", "file")])
@pytest.mark.parametrize("argv", [(), DRAFT])
@pytest.mark.parametrize("layout", ["bf16", "fp4"])
def test_host_tiers_of_sparse_models(sparse, layout, argv, store):
    """SGLang refuses a host tier, and drafts beside one."""
    assert sparse(layout, "--enable-hierarchical-cache", *store, *argv).enable_hierarchical_cache
    with pytest.raises(NotImplementedError, match="L3 with DCP does not support buffer_only"):
        sparse(layout, TIER, "--hicache-storage-backend", "file", *argv, *BUFFER_ONLY)


def test_without_a_layout_sglangs_rules_apply(sparse):
    """In a process whose SGLang is hooked."""
    sparse("fp4")
    assert sparse(None).dsa_decode_backend == "trtllm"
    with pytest.raises(ValueError, match="DSA DCP does not support HiSparse or HiCache"):
        sparse(None, "--enable-hierarchical-cache")


def test_drafts_of_other_checkpoints_are_refused(sparse, checkpoints):
    text = "--dcp-size 2 .*: a draft of another checkpoint has not been tested"
    with pytest.raises(ValueError, match=text):
        sparse("fp4", *EAGLE, "--speculative-draft-model-path", checkpoints["dsa3"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rl-on-policy-target", "fsdp"], "--dcp-size 2 .* fp4 and --enable-deterministic-inference: "),
        (["--dcp-size", "3"], "--dcp-size 3 does not divide 4 attention ranks; give a divisor of 4"),
        (["--attn-dp-size", "4"], "--dcp-size 2 does not divide 1 attention ranks; give a divisor of 1"),
    ],
)
def test_servers_that_do_not_fit_are_refused(resolved, argv, message):
    with pytest.raises(ValueError, match=message):
        resolved("fp4", *argv)


@pytest.mark.parametrize(
    "argv", [["--attn-dp-size", "3"], ["--dp-size", "3", "--enable-dp-attention"], ["--attn-dp-size", "8"]]
)
@pytest.mark.parametrize("model", ["mla", "dsa", "kda"])
def test_unequal_groups_of_ranks_are_refused(serve, model, argv):
    """SGLang asserts it without a text."""
    count = argv[1]
    text = f"^--attn-dp-size {count} does not divide 4 tensor-parallel ranks; give a divisor of 4$"
    with pytest.raises(ValueError, match=text):
        serve(model, "bf16", "--tp-size", "4", *argv)


def test_prefill_from_stored_rows_is_refused(resolved, monkeypatch):
    monkeypatch.setenv("KVPOOL_PREFILL_READS_ROWS", "1")
    with pytest.raises(ValueError, match="and KVPOOL_PREFILL_READS_ROWS=1: .* on several ranks; leave out"):
        resolved("bf16")


DRAFTS = (*STEPS, "--speculative-eagle-topk", "1")
DECODE = ("--disaggregation-mode", "decode")
EAGLE3 = ("EAGLE3", *DRAFTS, "--speculative-draft-model-path", "mla3")


@pytest.mark.parametrize(
    ("model", "argv", "refused"),
    [
        ("kda", ["--enable-hierarchical-cache"], None),
        ("glm-lite", [], None),
        ("mtp1", ["NEXTN", *DRAFTS], None),
        ("mtp1", ["EAGLE", *DRAFTS, "--enable-hierarchical-cache"], None),
        ("mtp1", ["EAGLE", *DRAFTS, "--disaggregation-mode", "prefill"], None),
        ("mtp1", [*EAGLE3, TIER], None),
        ("mtp1", [*EAGLE3, *DECODE], "stores and transfers of its draft are untested"),
        ("mtp1", ["EAGLE", *DRAFTS, "--speculative-adaptive"], "and --speculative-adaptive: SGLang captures"),
        ("mla", ["DSPARK", *STEPS[-2:]], "and --speculative-algorithm DSPARK: pools of other drafts"),
        ("kda", ["EAGLE", *DRAFTS], "KimiLinearForCausalLM: drafts beside its states"),
        ("k3", [], "KimiK3ForConditionalGeneration: .*CuteDSL's kernel for Blackwell alone"),
    ],
)
def test_models_and_drafts(serve, checkpoints, model, argv, refused):
    """Also a draft's own checkpoint; `EAGLE` and `EAGLE3` alone are tested as drafts."""
    drafts = bool(argv) and not argv[0].startswith("--")
    words = [checkpoints.get(word, word) for word in (["--speculative-algorithm"] * drafts + argv)]
    ranks = ("--tp-size", "4", "--dcp-size", "2")
    if refused is None:
        assert serve(model, "fp4", *ranks, *words).dcp_size == 2
        return
    with pytest.raises(ValueError, match=refused):
        serve(model, "fp4", *ranks, *words)
