"""`--kv-host-sharing`: what `auto` takes, and with what `node` is refused."""

import pytest

HICACHE = "--enable-hierarchical-cache"
TWO_RANKS = ("--tp-size", "2")
#: What prevents sharing -> its arguments beside a host tier on two ranks, and what names it.
PREVENTS = {
    "stages": (["--pp-size", "2"], "--pp-size above 1"),
    "write_back": (["--hicache-write-policy", "write_back"], "--hicache-write-policy write_back"),
    "buffer_only": (
        ["--hicache-host-memory-mode", "buffer_only", "--hicache-storage-backend", "file"],
        "--hicache-host-memory-mode buffer_only",
    ),
    "standalone": (
        [
            *("--hicache-storage-backend", "mooncake"),
            *("--hicache-storage-backend-extra-config", '{"standalone_storage": true}'),
        ],
        "a store that allocates the tier's memory",
    ),
    "standalone-file": (
        [
            *("--hicache-storage-backend", "mooncake"),
            *("--hicache-storage-backend-extra-config", "@standalone.yaml"),
        ],
        "a store that allocates the tier's memory",
    ),
    "shm": (["--hicache-storage-backend", "shm"], "a store that allocates the tier's memory"),
}


@pytest.fixture(autouse=True)
def configuration_files(tmp_path, monkeypatch):
    """Where "@name" of an argument is looked up."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "standalone.yaml").write_text("standalone_storage: true\n")


def sharing(args):
    from sgl_kvpool.sglang_plugin.options import host_tier_of

    return host_tier_of(args).sharing


def test_auto_shares_where_ranks_hold_the_same_rows(arranged):
    assert sharing(arranged(None, HICACHE)) == "rank"
    assert sharing(arranged(None, HICACHE, *TWO_RANKS)) == "node"
    assert sharing(arranged(None, HICACHE, *TWO_RANKS, "--kv-host-sharing", "rank")) == "rank"
    assert sharing(arranged(None, HICACHE, *TWO_RANKS, "--kv-host-sharing", "node")) == "node"


def test_ranks_of_attention_data_parallelism_hold_other_rows(arranged):
    assert sharing(arranged(None, HICACHE, *TWO_RANKS, "--attn-dp-size", "2")) == "rank"
    four = ("--tp-size", "4", "--attn-dp-size", "2")
    assert sharing(arranged(None, HICACHE, *four)) == "node"
    # Servers beside each other.
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


@pytest.mark.parametrize(
    ("model", "named"),
    [("dsa", "a model with sparse attention"), ("kda", "a model with linear attention")],
)
def test_models_whose_ranks_keep_more_than_rows(resolve, checkpoints, monkeypatch, model, named):
    import torch
    from sglang.srt.arg_groups import mamba_hook

    # What SGLang's resolution asks of a GPU.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(mamba_hook, "_platform_supports_mamba_cache_extra_buffer", lambda: True)
    argv = [checkpoints[model], "--kv-cache-layout", "bf16", HICACHE, *TWO_RANKS]
    assert sharing(resolve(*argv, device="cuda")) == "rank"
    with pytest.raises(ValueError, match=f"--kv-host-sharing node does not work with {named}"):
        resolve(*argv, "--kv-host-sharing", "node", device="cuda")


def test_the_log_says_what_was_taken(arranged, capfd):
    arranged(None, HICACHE, *TWO_RANKS)
    assert "sgl-kvpool: --kv-host-sharing node (2 ranks hold the same rows)" in capfd.readouterr().err


def test_one_rank_that_was_to_share_is_told_that_it_does_not(arranged, capfd):
    assert sharing(arranged(None, HICACHE, "--kv-host-sharing", "node")) == "rank"
    said = "sgl-kvpool: --kv-host-sharing rank (no two ranks hold the same rows)"
    assert said in capfd.readouterr().err
    arranged(None, HICACHE)
    assert "--kv-host-sharing" not in capfd.readouterr().err


@pytest.mark.parametrize("text", ["{", "[1]", '"mooncake"', "@nothing.json"])
def test_what_is_no_configuration_of_a_store_is_left_to_the_scheduler(arranged, text):
    store = ("--hicache-storage-backend", "mooncake", "--hicache-storage-backend-extra-config", text)
    assert sharing(arranged(None, HICACHE, *TWO_RANKS, *store)) == "node"


def test_environment_and_configuration_file(arranged, monkeypatch, tmp_path):
    monkeypatch.setenv("KVPOOL_KV_HOST_SHARING", "rank")
    assert sharing(arranged(None, HICACHE, *TWO_RANKS)) == "rank"
    monkeypatch.setenv("KVPOOL_KV_HOST_SHARING", "numa")
    with pytest.raises(ValueError, match="'numa' is not a KV host sharing; choose one of: auto, node, rank"):
        arranged(None, HICACHE, *TWO_RANKS)
    monkeypatch.delenv("KVPOOL_KV_HOST_SHARING")
    config = tmp_path / "server.yaml"
    config.write_text("kv-host-sharing: rank\n")
    assert sharing(arranged(None, HICACHE, *TWO_RANKS, "--config", str(config))) == "rank"


def test_it_needs_a_host_tier(arranged):
    with pytest.raises(ValueError, match="--kv-host-sharing node .* does nothing without --enable-hier"):
        arranged(None, *TWO_RANKS, "--kv-host-sharing", "node")


def test_on_a_gpu_sharing_takes_our_host_pool(arranged):
    """SGLang's own keeps serving 16-bit rows of one rank."""
    from sgl_kvpool.layout import MLAKVCacheLayout
    from sgl_kvpool.memory.arrangement import KVArrangement
    from sgl_kvpool.transfer.host_options import HostTierOptions

    asked = MLAKVCacheLayout.BF16, KVArrangement.LAYER_MAJOR, "cuda"
    assert not HostTierOptions().takes(*asked)
    assert HostTierOptions(sharing="node").takes(*asked)
