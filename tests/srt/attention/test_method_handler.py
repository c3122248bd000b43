"""How SGLang's DeepSeek attention calls a backend named kvpool_mla: which method, and which tensors.

The CUDA backend is written against these calls; deepseek_layer.py says which parts are real.
"""

import codec_oracle as oracle
import pytest
import torch
from deepseek_layer import BACKEND, HEADS, NOPE, Q_RANK, RANK, ROPE, V_DIM, Server

pytestmark = pytest.mark.usefixtures("published")

LAYOUTS = oracle.LAYOUTS
MODES = [
    *("EXTEND", "MIXED", "SPLIT_PREFILL", "DLLM_EXTEND"),
    *("DECODE", "TARGET_VERIFY", "DRAFT_EXTEND_V2", "PREBUILT"),
]
#: Sequence lengths and prefix lengths of two requests.
BATCHES = {
    "no prefix": ([5, 9], [0, 0]),
    "short prefix": ([5, 9], [3, 4]),
    "long prefix": ([16, 9], [11, 6]),
}
#: Values for these tests; SGLang's defaults are 8192 prefix tokens and 131072 tokens per chunk.
THRESHOLD, CAPACITY = 10, 25


@pytest.fixture(autouse=True)
def named(monkeypatch):
    """Our name in SGLang's lists as in a scheduler, and multi-head prefill as on CUDA."""
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mha

    from sgl_kvpool.sglang_plugin.hooks import attention

    monkeypatch.setenv("SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD", str(THRESHOLD))
    monkeypatch.setenv("SGLANG_MAX_KV_CHUNK_CAPACITY", str(CAPACITY))
    monkeypatch.setattr(forward_mha, "_is_cuda", True)
    monkeypatch.setattr(
        handler.AttentionBackendRegistry, "_handlers", dict(handler.AttentionBackendRegistry._handlers)
    )
    lists = attention.name_lists()
    before = [list(names) for names in lists]
    attention.register_names()
    attention.register_names()
    yield lists
    for names, old in zip(lists, before, strict=True):
        assert names.count(BACKEND) == 1
        names[:] = old


@pytest.fixture(scope="module")
def layers(published):
    """Layers of DeepSeek-V3 and of a model that does not compress queries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD", str(THRESHOLD))
        return {rank: Server("bf16", q_lora_rank=rank) for rank in (Q_RANK, None)}


def run(server, mode, batch, **graph):
    """One forward, after another forward that stored the prefixes."""
    lengths, prefixes = BATCHES[batch]
    if mode == "DECODE":
        prefixes = [length - 1 for length in lengths]
    if mode == "TARGET_VERIFY":
        prefixes = [length - 3 for length in lengths]
    if any(prefixes):
        server.run("EXTEND", prefixes, [0, 0])
    return server.run(mode, lengths, prefixes, **graph)


# -------------------------------------------------------------------- which method

_EXTEND = {"no prefix": "MHA_ONE_SHOT", "short prefix": "MLA", "long prefix": "MHA_ONE_SHOT"}
_ABSORBED = {"no prefix": "MLA", "short prefix": "MLA", "long prefix": "MLA"}
#: The method outside of prefill graphs, by mode and batch.
METHODS = {
    "EXTEND": _EXTEND,
    "MIXED": _EXTEND,
    "SPLIT_PREFILL": _EXTEND,
    "DLLM_EXTEND": _EXTEND,
    "DECODE": _ABSORBED,
    "TARGET_VERIFY": _ABSORBED,
    "DRAFT_EXTEND_V2": _ABSORBED,
    "PREBUILT": _ABSORBED,
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("mode", MODES)
def test_method(layers, mode, batch):
    for server in layers.values():
        run(server, mode, batch)
        assert server.method == METHODS[mode][batch]
        for graph in ("breakable", "tc_piecewise"):
            run(server, mode, batch, graph=graph)
            assert server.method == "MLA"


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("mode", MODES)
def test_prefill_that_reads_rows_is_absorbed(layers, monkeypatch, mode, batch):
    """The MHA form would attend keys of the chunk before they are encoded."""
    from sgl_kvpool.sglang_plugin.hooks import attention

    monkeypatch.setenv("KVPOOL_PREFILL_READS_ROWS", "1")
    attention.register_names()
    for server in layers.values():
        for graph in ({}, {"graph": "breakable"}):
            run(server, mode, batch, **graph)
            assert server.method == "MLA"


def test_every_mode_is_tried():
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    assert {mode.name for mode in ForwardMode} == {*MODES, "IDLE"}


def test_an_idle_rank_does_not_reach_the_backend(layers):
    server = layers[Q_RANK]
    out = server.run("IDLE", [], [])
    assert (out.shape[0], server.method, server.backend.calls) == (0, None, [])


@pytest.mark.parametrize("batch", ["no prefix", "long prefix"])
def test_prefills_beyond_the_chunk_capacity_are_chunked(layers, monkeypatch, batch):
    monkeypatch.setenv("SGLANG_MAX_KV_CHUNK_CAPACITY", "8")
    server = layers[Q_RANK]
    run(server, "EXTEND", batch)
    assert server.method == "MHA_CHUNKED_KV"


@pytest.mark.parametrize(
    ("field", "batches"),
    [
        ("disable_chunked_prefix_cache", ["long prefix"]),
        ("flashinfer_mla_disable_ragged", ["no prefix", "long prefix"]),  # as for a model without rope
    ],
)
def test_arguments_that_leave_the_absorbed_method_alone(layers, monkeypatch, field, batches):
    server = layers[Q_RANK]
    monkeypatch.setattr(server.attention, field, True)
    for batch in batches:
        run(server, "EXTEND", batch)
        assert server.method == "MLA"


# -------------------------------------------------------------------- which tensors


def absorbed_shapes(tokens):
    return {
        "q": (tokens, HEADS, RANK),
        "k": (tokens, 1, RANK),
        "v": (tokens, 1, RANK),
        "q_rope": (tokens, HEADS, ROPE),
        "k_rope": (tokens, 1, ROPE),
    }


@pytest.mark.parametrize("graph", [None, "breakable", "tc_piecewise"])
@pytest.mark.parametrize(
    ("mode", "batch", "tokens"),
    [
        ("EXTEND", "short prefix", 7),
        ("MIXED", "short prefix", 7),
        ("DECODE", "no prefix", 2),
        ("TARGET_VERIFY", "no prefix", 6),
        ("DRAFT_EXTEND_V2", "short prefix", 7),
    ],
)
def test_absorbed_calls(layers, mode, batch, tokens, graph):
    for server in layers.values():
        run(server, mode, batch, graph=graph)
        (call,) = server.backend.calls
        assert call.shapes == absorbed_shapes(tokens)
        assert (call.layer, call.save_kv_cache) == ("attn_mqa", True)
        assert call.method == ("decode" if mode == "DECODE" else "extend")
        assert call.dtypes == {torch.bfloat16}
        assert (call.attend_prefix_cache, call.return_lse) == (None, None)
        # q is one batched product with the heads outermost, so it cannot be viewed as [T, H * R].
        assert call.tensors["q"].stride() == (RANK, tokens * RANK, 1)


@pytest.mark.parametrize("mode", ["EXTEND", "DECODE"])
def test_absorbed_calls_of_models_that_do_not_know_our_name(layers, named, mode):
    """SGLang then concatenates nope and rope for every layer, as Sarvam's model always does."""
    server = layers[Q_RANK]
    separate = run(server, mode, "short prefix")
    absorbed = named[1]
    absorbed.remove(BACKEND)
    joined = run(server, mode, "short prefix")
    absorbed.append(BACKEND)
    (call,) = server.backend.calls
    tokens = 7 if mode == "EXTEND" else 2
    assert call.shapes == {
        "q": (tokens, HEADS, RANK + ROPE),
        "k": (tokens, 1, RANK + ROPE),
        "v": (tokens, 1, RANK),
    }
    assert call.save_kv_cache
    assert torch.equal(joined, separate)


@pytest.mark.parametrize(("batch", "tokens", "rows"), [("no prefix", 14, 14), ("long prefix", 8, 25)])
def test_one_shot_mha_calls(layers, batch, tokens, rows):
    server = layers[Q_RANK]
    before = server.backend.chunk_metadata
    run(server, "EXTEND", batch)
    (call,) = server.backend.calls
    assert call.shapes == {
        "q": (tokens, HEADS, NOPE + ROPE),
        "k": (rows, HEADS, NOPE + ROPE),  # with a prefix, whole sequences back to back
        "v": (rows, HEADS, V_DIM),
    }
    assert (call.method, call.layer, call.save_kv_cache) == ("extend", "attn_mha", False)
    assert (call.attend_prefix_cache, call.return_lse) == (False, False)
    assert server.backend.chunk_metadata - before == (batch == "long prefix")
    assert not call.tensors["v"].is_contiguous()  # a slice of kv_b_proj's result


def test_chunked_mha_calls(layers, monkeypatch):
    """The new tokens, then the prefixes in chunks of 4 tokens per request; each call returns natural LSE."""
    monkeypatch.setenv("SGLANG_MAX_KV_CHUNK_CAPACITY", "8")
    server = layers[Q_RANK]
    before = server.backend.chunk_metadata
    run(server, "EXTEND", "long prefix")
    calls = server.backend.calls
    assert [call.shapes["k"][0] for call in calls] == [8, 8, 6, 3]
    assert {call.shapes["q"] for call in calls} == {(8, HEADS, NOPE + ROPE)}
    assert [call.attend_prefix_cache for call in calls] == [False, True, True, True]
    assert all(call.return_lse and call.layer == "attn_mha" and not call.save_kv_cache for call in calls)
    assert server.backend.chunk_metadata - before == 1
    run(server, "EXTEND", "no prefix")
    assert [call.return_lse for call in server.backend.calls] == [False]


def test_padded_graphs_show_the_backend_real_tokens_alone(layers):
    server = layers[Q_RANK]
    plain = run(server, "EXTEND", "short prefix", graph="breakable")
    padded = run(server, "EXTEND", "short prefix", graph="breakable", padding=4)
    (call,) = server.backend.calls
    assert call.shapes == absorbed_shapes(7)
    assert torch.equal(padded[:7], plain)
    assert not padded[7:].any()


# -------------------------------------------------------------------- results


@pytest.mark.parametrize("batch", BATCHES)
def test_all_methods_compute_the_same(layers, monkeypatch, batch):
    """The layer's output does not depend on the method, so the tests above read the tensors correctly."""
    for server in layers.values():
        absorbed = run(server, "EXTEND", batch, graph="breakable").float()
        monkeypatch.setattr(server.attention, "chunked_prefix_cache_threshold", 1)
        for capacity in ("1000", "8"):
            monkeypatch.setenv("SGLANG_MAX_KV_CHUNK_CAPACITY", capacity)
            out = run(server, "EXTEND", batch).float()
            assert server.method == ("MHA_ONE_SHOT" if capacity == "1000" else "MHA_CHUNKED_KV")
            assert (out - absorbed).norm() < 0.01 * absorbed.norm()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_methods_store_the_same_rows(layers, monkeypatch, layout):
    """With the pool's k_scale, although multi-head prefill writes with a layer that has another or none."""
    k_scale = 0.5
    run(layers[Q_RANK], "EXTEND", "no prefix", graph="breakable")
    (call,) = layers[Q_RANK].backend.calls
    nope, rope = call.tensors["k"].squeeze(1), call.tensors["k_rope"].squeeze(1)
    server = Server(layout, k_scale=k_scale)
    row_bytes = server.pool.row_format.row_bytes
    expected = oracle.encode(nope, rope, layout, RANK, ROPE, row_bytes, k_scale)
    slots = torch.cat([server.slots[:5], server.slots[21:30]])
    for scale in (None, 3.0):
        server.attention.attn_mha.k_scale_float = scale
        for method in ("MLA", "MHA_ONE_SHOT", "MHA_CHUNKED_KV"):
            server.pool.kv_buffer[0].view(torch.uint8).fill_(0xFF)
            monkeypatch.setenv("SGLANG_MAX_KV_CHUNK_CAPACITY", "8" if method == "MHA_CHUNKED_KV" else "99")
            run(server, "EXTEND", "no prefix", graph="breakable" if method == "MLA" else None)
            assert server.method == method
            stored = server.pool.get_row_buffer(server.attention.layer_id).squeeze(1)
            assert (stored[slots].numpy() == expected).all()
            untouched = torch.ones(len(stored), dtype=torch.bool)
            untouched[slots] = False
            assert (stored[untouched] == 0xFF).all()
    decoded = oracle.decode(expected, layout, RANK, ROPE, k_scale)
    values = torch.cat([nope, rope], -1).float().numpy()
    error = ((decoded - values) ** 2).sum() / (values**2).sum()
    limits = oracle.by_latent({"bf16": 1e-9, "e4m3 / k_scale": 0.03, "e4m3 in tiles": 0.03, "e2m1": 0.1})
    assert error**0.5 < limits[layout]


@pytest.mark.parametrize("layout", oracle.NARROW)
def test_prefixes_are_read_back_decoded(layout, monkeypatch):
    """One-shot MHA and absorbed attend the same stored rows; chunked MHA attends its own tokens unrounded."""
    server = Server(layout, k_scale=0.5)
    absorbed = run(server, "EXTEND", "long prefix", graph="breakable").float()
    one_shot = run(server, "EXTEND", "long prefix").float()
    assert server.method == "MHA_ONE_SHOT"
    assert (one_shot - absorbed).norm() < 0.01 * absorbed.norm()
    monkeypatch.setenv("SGLANG_MAX_KV_CHUNK_CAPACITY", "8")
    pieces = run(server, "EXTEND", "long prefix").float()
    assert server.method == "MHA_CHUNKED_KV"
    assert 0.001 * absorbed.norm() < (pieces - absorbed).norm() < 0.2 * absorbed.norm()
