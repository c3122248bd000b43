"""`--kv-host-sharing`: the choice of `auto`, and the arguments with which `node` is refused."""

from types import SimpleNamespace

import pytest
from sglang.srt.speculative.base_spec_worker import _can_pack_hicache_mtp
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sgl_kvpool.sglang_plugin.options import config_of
from sgl_kvpool.sglang_plugin.rules.host_sharing import _has_packed_draft
from sgl_kvpool.sglang_plugin.server import Server

HICACHE = "--enable-hierarchical-cache"
TWO_RANKS = ("--tp-size", "2")
MOONCAKE = ("--hicache-storage-backend", "mooncake", "--hicache-storage-backend-extra-config")
ALLOCATES = "a store that allocates the tier's memory"
FLASHINFER = ("--attention-backend", "flashinfer")
#: Obstacle to sharing -> its arguments beside a host tier on two ranks, and its name in the message.
PREVENTS = {
    "stages": (["--pp-size", "2"], "--pp-size 2"),
    "write_back": (["--hicache-write-policy", "write_back"], "--hicache-write-policy write_back"),
    "buffer_only": (
        ["--hicache-host-memory-mode", "buffer_only", "--hicache-storage-backend", "file"],
        "--hicache-host-memory-mode buffer_only",
    ),
    "standalone": ([*MOONCAKE, '{"standalone_storage": true}'], ALLOCATES),
    "standalone-file": ([*MOONCAKE, "@standalone.yaml"], ALLOCATES),
    "shm": (["--hicache-storage-backend", "shm"], ALLOCATES),
}


@pytest.fixture(autouse=True)
def configuration_files(tmp_path, monkeypatch):
    """The folder in which "@name" of an argument is looked up."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "standalone.yaml").write_text("standalone_storage: true\n")


def sharing(args):
    tier = config_of(args).host_tier
    return tier.sharing + " if the system lets it" * tier.may_unshare


def test_auto_shares_where_ranks_hold_the_same_rows(arranged):
    assert sharing(arranged(None, HICACHE)) == "rank"
    assert sharing(arranged(None, HICACHE, *TWO_RANKS)) == "node if the system lets it"
    assert sharing(arranged(None, HICACHE, *TWO_RANKS, "--kv-host-sharing", "rank")) == "rank"
    assert sharing(arranged(None, HICACHE, *TWO_RANKS, "--kv-host-sharing", "node")) == "node"


def test_ranks_of_attention_data_parallelism_hold_other_rows(arranged):
    assert sharing(arranged(None, HICACHE, *TWO_RANKS, "--attn-dp-size", "2")) == "rank"
    four = ("--tp-size", "4", "--attn-dp-size", "2")
    assert sharing(arranged(None, HICACHE, *four)) == "node if the system lets it"
    # Replicas of the server.
    assert sharing(arranged(None, HICACHE, "--dp-size", "2")) == "rank"


@pytest.mark.parametrize("name", PREVENTS)
def test_what_prevents_it_is_named(arranged, capfd, name):
    argv, named = PREVENTS[name]
    assert sharing(arranged(None, HICACHE, *TWO_RANKS, *argv)) == "rank"
    (line,) = [text for text in capfd.readouterr().err.splitlines() if "--kv-host-sharing" in text]
    assert f"sgl-kvpool: --kv-host-sharing rank ({named}: " in line
    with pytest.raises(ValueError, match="^--kv-host-sharing node does not work with ") as refused:
        arranged(None, HICACHE, *TWO_RANKS, *argv, "--kv-host-sharing", "node")
    assert f" {named}: " in str(refused.value)
    assert str(refused.value).endswith("; leave out --kv-host-sharing, or give rank")


def test_models_whose_ranks_keep_more_than_rows(resolve, checkpoints):
    """Index keys lie in the pages of rows; states have a tier of their own."""
    argv = ["--kv-cache-layout", "bf16", HICACHE, *TWO_RANKS]
    assert sharing(resolve(checkpoints["dsa"], *argv, device="cuda")) == "node if the system lets it"
    assert sharing(resolve(checkpoints["kda"], *argv, device="cuda")) == "rank"


def drafting(steps=3, topk=1, tokens=4):
    names = ("num-steps", "eagle-topk", "num-draft-tokens")
    values = zip(names, (steps, topk, tokens), strict=True)
    return [word for name, value in values for word in (f"--speculative-{name}", str(value))]


#: Drafts -> layout, checkpoint, arguments; a checkpoint's name in the arguments is replaced by its folder.
PACKED = {
    "NEXTN": ("fp4", "mtp1", ["NEXTN", *drafting()]),
    "EAGLE": ("fp8", "mtp1", ["EAGLE", *drafting(1, 1, 2)]),
    "SGLang's reader": ("bf16", "mtp1", ["NEXTN", *drafting(), *FLASHINFER]),
    "SGLang's steps": ("fp4_fp8_rope", "mtp1", ["NEXTN"]),
    "the target by name": ("fp4", "mtp1", ["EAGLE", "--speculative-draft-model-path", "mtp1", *drafting()]),
}
NOT_PACKED = {
    "no MTP layer": ("fp4", "mtp0", ["EAGLE", *drafting()]),
    "nothing said of MTP layers": ("fp4", "mla", ["EAGLE", *drafting()]),
    "several MTP layers": ("fp4", "mtp2", ["NEXTN", *drafting()]),
    "another checkpoint": ("fp4", "mtp1", ["EAGLE", "--speculative-draft-model-path", "mtp2", *drafting()]),
    "EAGLE3": ("fp4", "mtp1", ["EAGLE3", "--speculative-draft-model-path", "mla3", *drafting()]),
    "a tree": ("bf16", "mtp1", ["NEXTN", *drafting(3, 4, 8), *FLASHINFER]),
    "several models": ("bf16", "mtp1", ["NEXTN", *drafting(), "--enable-multi-layer-eagle", *FLASHINFER]),
    "no draft model": ("bf16", "mtp1", ["NGRAM", "--speculative-num-draft-tokens", "4", *FLASHINFER]),
}


@pytest.fixture
def drafted(resolve, checkpoints):
    """`drafted(case, ...)`: a resolved record of a server with two ranks, a host tier and drafts."""

    def run(case, *argv):
        layout, model, words = case
        words = [checkpoints.get(word, word) for word in ("--speculative-algorithm", *words)]
        named = [checkpoints[model], "--kv-cache-layout", layout, HICACHE, *TWO_RANKS]
        return resolve(*named, *words, *argv, device="cuda")

    return run


@pytest.mark.parametrize("name", PACKED)
def test_ranks_share_pages_with_the_rows_of_packed_drafts(drafted, name):
    for asked, how in ([], " if the system lets it"), (["--kv-host-sharing", "node"], ""):
        args = drafted(PACKED[name], *asked)
        assert sharing(args) == f"node{how}"
    assert sharing(drafted(PACKED[name], "--kv-host-sharing", "rank")) == "rank"
    assert Server(args).has_our_tier


@pytest.mark.parametrize("name", NOT_PACKED)
def test_ranks_do_not_share_pages_beside_other_drafts(drafted, capfd, name):
    algorithm = {"NEXTN": "EAGLE"}.get(NOT_PACKED[name][2][0], NOT_PACKED[name][2][0])
    assert sharing(drafted(NOT_PACKED[name])) == "rank"
    why = "ranks share the rows only of drafts "
    (line,) = [text for text in capfd.readouterr().err.splitlines() if "--kv-host-sharing" in text]
    assert f"sgl-kvpool: --kv-host-sharing rank (--speculative-algorithm {algorithm}: {why}" in line
    said = f"^--kv-host-sharing node does not work with --speculative-algorithm {algorithm}: {why}"
    with pytest.raises(ValueError, match=said) as refused:
        drafted(NOT_PACKED[name], "--kv-host-sharing", "node")
    assert str(refused.value).endswith("; leave out --kv-host-sharing, or give rank")


@pytest.mark.parametrize("layers", [0, 1, 2, 3])
@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "STANDALONE", "DFLASH", "NGRAM"])
def test_sglang_packs_the_drafts_that_ranks_share(layers, algorithm):
    """The rule accepts no draft to which SGLang would give its own host pool."""
    model_config = SimpleNamespace(
        num_nextn_predict_layers=layers, hf_config=SimpleNamespace(architectures=["DeepseekV3ForCausalLM"])
    )
    view = SimpleNamespace(
        speculative_algorithm=algorithm, speculative_eagle_topk=1, enable_multi_layer_eagle=False,
        speculative_draft_model_path=None, model_path="target",
    )  # fmt: skip
    runners = (SimpleNamespace(model_config=model_config),)
    packs = _can_pack_hicache_mtp(SpeculativeAlgorithm.from_string(algorithm), runners)
    server = Server(None, view=view, model_config=model_config)
    assert packs or not _has_packed_draft(server)
    assert _has_packed_draft(server) == (algorithm == "EAGLE" and layers == 1)
