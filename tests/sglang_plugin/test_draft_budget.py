"""Memory of draft models on a server: SGLang's own pools, and hand arithmetic."""

import json

import pytest
from refused import STEPS
from test_planned_sizes import CONFIGS, MACHINE, TIER

from sgl_kvpool.commands.plan import ask

# The planner's process imports SGLang, for 15 s, and forks for each server.
pytestmark = pytest.mark.slow

DRAFT_GIB = 8
HEADS = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 7168,
    "num_hidden_layers": 1, "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 128,
    "intermediate_size": 18432, "vocab_size": 163840, "draft_vocab_size": 32000, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "hidden_act": "silu",
}  # fmt: skip
#: Bytes of a draft token on one of 8 ranks: 8 heads of keys and of values.
HEADS_BYTES = 8 * (128 + 128) * 2
CHAIN = [*STEPS, "--speculative-eagle-topk", "1"]
NEXTN = ["--tp-size", "8", "--speculative-algorithm", "NEXTN", *CHAIN, *TIER]


def drafting(draft, algorithm="EAGLE3", backend="flashinfer"):
    named = ["--speculative-draft-attention-backend", backend] if backend else []
    words = ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", draft]
    return ["--tp-size", "8", *words, *CHAIN, *named]


#: Target, layout and arguments; names of `folders` in the arguments are replaced by their folders.
SERVERS = {
    "heads": ("kimi_k2", "fp4", drafting("heads")),
    "tier": ("kimi_k2", "fp4", [*drafting("heads"), *TIER]),
    "fp8": ("kimi_k2", "fp8", drafting("heads")),
    "fp8 beside bf16": ("kimi_k2", "fp8", [*drafting("heads"), "--speculative-draft-kv-cache-dtype", "bf16"]),
    "three layers": ("kimi_k2", "bf16", drafting("three layers")),
    "as it is": ("kimi_k2", None, drafting("heads")),
    "sparse": ("deepseek_v32", "fp4", drafting("heads")),
    "attention ranks": ("kimi_k2", "fp4", [*drafting("heads"), "--enable-dp-attention", "--dp-size", "4"]),
    "standalone": ("deepseek_v32", "fp4", drafting("heads", "STANDALONE")),
    "sparse by itself": ("deepseek_v32", "fp4", drafting("heads", backend=None)),
    "packed": ("kimi_k2", "fp4", [*drafting("mtp", "EAGLE", None), *TIER]),
    "its own MTP layer": ("mtp", "fp4", NEXTN),
    "its own, a copy each": ("mtp", "fp4", [*NEXTN, "--kv-host-sharing", "rank"]),
    "heads, parts": ("kimi_k2", "fp4", [*drafting("heads"), "--dcp-size", "8"]),
    "mla, parts": ("kimi_k2", "fp4", [*drafting("mla", backend=None), "--dcp-size", "8"]),
    "its own MTP layer, parts": ("mtp", "fp4", [*NEXTN, "--dcp-size", "8"]),
    "unpacked": ("kimi_k2", "bf16", [*drafting("mla", backend=None), *TIER, "--kv-host-layout", "fp4"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Configurations of targets and drafts; one draft has a weight file of the right size."""
    root = tmp_path_factory.mktemp("drafts")
    k2 = json.loads((CONFIGS / "kimi_k2.json").read_text())
    configs = {
        "kimi_k2": k2,
        "deepseek_v32": json.loads((CONFIGS / "deepseek_v32.json").read_text()),
        "heads": HEADS,
        "three layers": HEADS | {"num_hidden_layers": 3},
        "mtp": k2 | {"num_nextn_predict_layers": 1},
        "mla": k2 | {"num_hidden_layers": 2, "architectures": ["Eagle3DeepseekV2ForCausalLM"]},
    }
    for name, config in configs.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
    with (root / "mtp" / "model.safetensors").open("wb") as file:
        file.truncate(DRAFT_GIB << 30)
    return {name: str(root / name) for name in configs}


@pytest.fixture(scope="module")
def request_of(folders):
    def build(target, layout, words):
        asked = ["--kv-cache-layout", layout] if layout else []
        words = [folders.get(word, word) for word in words]
        return {"model_path": folders[target], "layout": layout, "arguments": [*asked, *words]}

    return build


@pytest.fixture(scope="module")
def sized(request_of):
    answers = ask(MACHINE, [request_of(*server) for server in SERVERS.values()])
    return dict(zip(SERVERS, answers, strict=True))


@pytest.mark.parametrize(
    ("name", "token_bytes"),
    [
        ("heads", 61 * 416 + HEADS_BYTES),
        ("tier", 61 * 416 + HEADS_BYTES),
        ("fp8", 61 * 576 + HEADS_BYTES // 2),
        ("fp8 beside bf16", 61 * 576 + HEADS_BYTES),
        ("three layers", 61 * 1152 + 3 * HEADS_BYTES),
        ("sparse", 61 * (416 + 132) + HEADS_BYTES),
        ("attention ranks", 61 * 416 + 4 * HEADS_BYTES),  # 2 ranks hold the 64 heads, 32 each
        ("standalone", 61 * (416 + 132) + HEADS_BYTES),
        ("packed", 62 * 416),
        ("its own MTP layer", 62 * 416),
        ("unpacked", 63 * 1152),
        # Each of 8 ranks holds its part of the target's rows, and all of the draft's.
        ("heads, parts", 61 * 416 + 8 * HEADS_BYTES),
        ("mla, parts", (61 + 8 * 2) * 416),
        ("its own MTP layer, parts", (61 + 8) * 416),
    ],
)
def test_bytes_of_a_token(sized, name, token_bytes):
    found = sized[name]
    assert found["cell_bytes"] == token_bytes
    rows = (found["available_bytes"] - found["workspace_bytes"]) // token_bytes
    ranks = 8 if "parts" in name else 1
    assert found["tokens"] == rows // found["page_size"] * found["page_size"] * ranks


def test_a_refused_draft_of_a_sparse_target(sized):
    message = "LlamaForCausalLMEagle3, the draft model, does not use multi-head latent"
    assert message in sized["sparse by itself"]["refused"]


def test_sglang_as_it_is_keeps_its_number(sized):
    """SGLang counts the draft as one more layer of the target."""
    assert sized["as it is"]["cell_bytes"] == 62 * 1152
    assert sized["three layers"]["draft_pool_bytes"] == 3 * HEADS_BYTES
    assert sized["as it is"]["draft_pool_bytes"] == sized["packed"]["draft_pool_bytes"] == 0


@pytest.mark.parametrize(
    ("name", "token_bytes", "draft_bytes", "sharing_ranks"),
    # Pages of 64 tokens, with padding and checksum: docs/transfer.md.
    [
        ("tier", 25408, HEADS_BYTES, 1),
        ("packed", 25856, 0, 1),
        ("its own MTP layer", 25856, 0, 8),
        ("its own, a copy each", 25856, 0, 1),
        ("unpacked", 25408, 2 * 416, 1),
    ],
)
def test_bytes_on_the_host(sized, name, token_bytes, draft_bytes, sharing_ranks):
    """SGLang gives unpacked drafts as many tokens as the target, whatever the tier's size.

    Ranks share pages only beside a draft that is certainly packed; drafts of other checkpoints may not be.
    """
    kept = {"token_bytes": token_bytes, "index_bytes": 0, "draft_bytes": draft_bytes, "slot_bytes": 0}
    assert sized[name]["host"] == kept | {"sharing_ranks": sharing_ranks, "spread_ranks": 1}


def test_weights_of_a_draft(sized, request_of):
    """Weights in the draft's folder, unless the user's number includes them."""
    found = sized["packed"]
    assert found["draft_weights_gib"] == DRAFT_GIB
    assert sized["heads"]["draft_weights_gib"] == 0  # not known
    [counted] = ask(MACHINE | {"drafts_included": True}, [request_of(*SERVERS["packed"])])
    assert counted["draft_weights_gib"] is None
    more = counted["available_bytes"] - found["available_bytes"]
    assert more == pytest.approx(2**30 * DRAFT_GIB / 8, abs=64)  # on one of 8 ranks
