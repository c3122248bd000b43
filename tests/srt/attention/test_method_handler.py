"""Which form of attention SGLang's DeepSeek layers choose for a backend named kvpool_mla.

deepseek_layer.py says which parts are real. The results of each form: tests/gpu/test_deepseek_layer_gpu.py.
"""

import pytest
from deepseek_layer import Q_RANK, Server

pytestmark = pytest.mark.usefixtures("published", "named")

EXTENDS = ["EXTEND", "MIXED", "SPLIT_PREFILL", "DLLM_EXTEND"]
MODES = [*EXTENDS, "DECODE", "TARGET_VERIFY", "DRAFT_EXTEND_V2", "PREBUILT"]
#: Sequence lengths and prefix lengths of two requests.
BATCHES = {
    "no prefix": ([5, 9], [0, 0]),
    "short prefix": ([5, 9], [3, 4]),
    "long prefix": ([16, 9], [11, 6]),
}


@pytest.fixture(scope="module")
def layers(published):
    """Layers of DeepSeek-V3 and of a model that does not compress queries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD", "10")
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


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("mode", MODES)
def test_method(layers, mode, batch):
    whole = mode in EXTENDS and batch != "short prefix"
    for server in layers.values():
        run(server, mode, batch)
        assert server.method == ("MHA_ONE_SHOT" if whole else "MLA")
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


def test_padded_graphs_show_the_backend_real_tokens_alone(layers):
    server = layers[Q_RANK]
    padded = run(server, "EXTEND", "short prefix", graph="breakable", padding=4)
    assert server.backend.calls == [(server.attention.attn_mqa, 7)]
    assert len(padded) == 11
