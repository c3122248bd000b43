"""The attention backend of a server with a layout, and the arguments that are refused with kvpool_mla.

Most tests go through SGLang's own resolution. It also resolves arguments for CUDA on a machine without a GPU,
if it does not query the device.
"""

from types import SimpleNamespace

import pytest
from codec_oracle import LAYOUTS

from sgl_kvpool.attention.readers import KVPOOL_DEVICES
from sgl_kvpool.sglang_plugin.hooks import server_args
from sgl_kvpool.sglang_plugin.rules.attention import SPECULATIVE_ALGORITHMS
from sgl_kvpool.sglang_plugin.rules.features import BACKEND_FEATURES

OURS = "kvpool_mla"
SPECULATIVE = ("--speculative-algorithm", "EAGLE")


@pytest.fixture
def serve(serve):
    """`serve(device, layout, *argv)`: the backends (prefill, decode) of a server."""
    from sglang.srt.arg_groups.overrides import attention_backends_of

    return lambda device, layout, *argv: attention_backends_of(serve("mla", layout, *argv, device=device))


def phases(prefill, decode):
    return ("--prefill-attention-backend", prefill, "--decode-attention-backend", decode)


# -------------------------------------------------------------------- choice of the backend


@pytest.mark.parametrize(
    ("device", "layout", "argv", "backends"),
    [
        *(("cpu", layout, (), (OURS, OURS)) for layout in LAYOUTS),
        *(("cuda", layout, (), (OURS, OURS)) for layout in LAYOUTS[1:]),
        # SGLang's backends cannot read page-major rows of any layout.
        ("cuda", "bf16", ("--kv-cache-arrangement", "page_major"), (OURS, OURS)),
        ("cuda", "bf16", ("--attention-backend", OURS), (OURS, OURS)),
        ("cuda", "bf16", ("--attention-backend", "flashinfer"), ("flashinfer", "flashinfer")),
        ("cuda", "bf16", ("--attention-backend", "fa3"), ("fa3", "fa3")),
        ("cuda", "bf16", phases("flashinfer", OURS), ("flashinfer", OURS)),
        ("cuda", "fp8", ("--attention-backend", "triton"), ("triton", "triton")),
        # flashmla reads e4m3 rows in decode; its prefill would cast the pool.
        ("cuda", "fp8", ("--decode-attention-backend", "flashmla"), (OURS, "flashmla")),
        ("cuda", "fp8", ("--attention-backend", "flashmla"), (OURS, "flashmla")),
        (
            *("cuda", "fp8", ("--attention-backend", "flashmla", "--kv-cache-arrangement", "token_major")),
            (OURS, "flashmla"),
        ),
        (
            *("cuda", "fp8", ("--attention-backend", "flashmla", "--prefill-attention-backend", "triton")),
            ("triton", "flashmla"),
        ),
        ("cuda", "bf16", ("--attention-backend", "flashmla"), ("flashmla", "flashmla")),
        ("cuda", "fp8", phases("triton", "flashmla"), ("triton", "flashmla")),
        ("cuda", "fp8", ("--attention-backend", "flashmla", *phases(OURS, OURS)), (OURS, OURS)),
        ("cuda", "fp4", ("--prefill-attention-backend", OURS), (OURS, OURS)),
        ("cuda", "bf16", ("--attention-backend", "flashinfer", *SPECULATIVE), ("flashinfer", "flashinfer")),
    ],
)
def test_choice(serve, device, layout, argv, backends):
    assert serve(device, layout, *argv) == backends


def test_bf16_on_cuda_is_left_to_sglang(serve, resolve, checkpoints, monkeypatch):
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolving_view

    plain = attention_backends_of(resolving_view(resolve(checkpoints["mla"], device="cuda")))
    assert plain[0] != OURS
    lines = []
    monkeypatch.setattr(server_args.logger, "info", lambda text, *values: lines.append(text % values))
    assert serve("cuda", "bf16") == plain
    assert lines == ["sgl-kvpool: SGLang chooses the attention backend; its own read bf16"]
    assert serve("cuda", "bf16", "--kv-cache-arrangement", "token_major") == plain
    monkeypatch.setenv("KVPOOL_PREFILL_READS_ROWS", "1")  # only kvpool_mla's prefill does
    assert serve("cuda", "bf16") == (OURS, OURS)


def test_cuda_graphs_stay_on_a_gpu(resolve, checkpoints):
    from sglang.srt.arg_groups.overrides import resolving_view

    for device, backends in (("cpu", ["disabled"] * 2), ("cuda", ["breakable", "full"])):
        breakable = ("--cuda-graph-backend-prefill", "breakable")
        args = resolve(checkpoints["mla"], "--kv-cache-layout", "fp4", *breakable, device=device)
        config = resolving_view(args).cuda_graph_config
        assert [config.prefill.backend, config.decode.backend] == backends


def test_devices():
    """CPUs and CUDA only; calls the check directly, because SGLang refuses most devices before it."""
    from sgl_kvpool.layout import MLAKVCacheLayout
    from sgl_kvpool.memory.arrangement import KVArrangement
    from sgl_kvpool.sglang_plugin.rules import attention as attention_rules

    assert KVPOOL_DEVICES == ("cpu", "cuda")
    view = SimpleNamespace(
        dcp_size=1,
        enable_deterministic_inference=False,
        attention_backend=OURS,
        prefill_attention_backend=None,
        decode_attention_backend=None,
        device="xpu",
    )
    check = attention_rules.check_backends
    with pytest.raises(ValueError, match="device is xpu; leave out --kv-cache-layout$"):
        check(MLAKVCacheLayout.BF16, KVArrangement.TOKEN_MAJOR, view)


def test_rocm_calls_its_device_cuda(serve, monkeypatch):
    from sgl_kvpool.sglang_plugin import models

    monkeypatch.setattr(models, "is_rocm", lambda: True)
    with pytest.raises(ValueError, match="runs on NVIDIA GPUs and on CPUs only, and the device is ROCm"):
        serve("cuda", "fp4")


# -------------------------------------------------------------------- arguments beside kvpool_mla

#: Field of each of `BACKEND_FEATURES` -> a value with which the feature is in use.
IN_USE = {
    "enable_pdmux": True,
    "enable_prefill_cp": True,
    "attn_cp_size": 2,
    "dllm_algorithm": "LowConfidence",
    "enable_mis": True,
    "enable_torch_compile": True,
    "cuda_graph_config": SimpleNamespace(prefill=SimpleNamespace(backend="full")),
}


def test_the_list_of_features_is_complete():
    assert [*IN_USE] == [feature.field for feature in BACKEND_FEATURES]


@pytest.mark.parametrize(("field", "value"), IN_USE.items(), ids=IN_USE)
def test_every_feature(field, value):
    """Calls the check directly, because SGLang refuses some of these combinations first, in its own words."""
    from sgl_kvpool.layout import MLAKVCacheLayout
    from sgl_kvpool.memory.arrangement import KVArrangement
    from sgl_kvpool.sglang_plugin.rules.attention import check_backends

    off = {feature.field: None for feature in BACKEND_FEATURES}
    view = SimpleNamespace(
        dcp_size=1,
        enable_deterministic_inference=False,
        attention_backend=OURS,
        prefill_attention_backend=None,
        decode_attention_backend=None,
        device="cuda",
        speculative_algorithm=None,
        speculative_draft_attention_backend=None,
        **{**off, field: value},
    )
    (feature,) = (feature for feature in BACKEND_FEATURES if feature.field == field)
    text = f"^{feature.flag}( {value})? does not work with attention backend kvpool_mla: .*; leave it out, or"
    with pytest.raises(ValueError, match=text):
        check_backends(MLAKVCacheLayout.FP4, KVArrangement.LAYER_MAJOR, view)
    setattr(view, field, None)
    check_backends(MLAKVCacheLayout.FP4, KVArrangement.LAYER_MAJOR, view)


DETERMINISTIC = "--enable-deterministic-inference"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_deterministic_server(serve, device):
    """Ours is taken before SGLang chooses a backend of its own; with it SGLang keeps the prefix cache."""
    assert serve(device, "fp4", DETERMINISTIC) == (OURS, OURS)
    with pytest.raises(ValueError, match="^--kv-host-layout fp4 rounds rows that come back .*leave out one$"):
        serve(
            device,
            "bf16",
            DETERMINISTIC,
            "--enable-hierarchical-cache",
            "--kv-host-layout",
            "fp4",
            "--attention-backend",
            OURS,
        )


def test_models_beyond_the_kernels(serve):
    assert serve("cpu", "fp4", "--dtype", "float32") == (OURS, OURS)
    assert serve("cuda", "fp4", "--dtype", "float16") == (OURS, OURS)
    from sgl_kvpool.sglang_plugin.rules import attention as attention_rules

    view = SimpleNamespace(device="cuda", attention_backend=OURS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_rules, "backends_in_use", lambda view: (OURS, OURS))
        shape = {"dtype": "torch.bfloat16", "hf_text_config": SimpleNamespace()}
        attention_rules.check_model(SimpleNamespace(kv_lora_rank=512, **shape), view)
        with pytest.raises(ValueError, match="kv_lora_rank=640, .* up to 512 on CUDA"):
            attention_rules.check_model(SimpleNamespace(kv_lora_rank=640, **shape), view)


def test_draft_backends_that_cannot_read_the_rows_of_the_same_checkpoint(serve, checkpoints):
    draft = "--speculative-draft-attention-backend"
    for layout, name, words in (
        ("fp4", "triton", "cannot read rows of --kv-cache-layout fp4"),
        ("fp8", "flashmla", "would cast the whole pool of a layer in every call of prefill"),
    ):
        with pytest.raises(ValueError, match=f"^{draft} {name} {words}"):
            serve("cuda", layout, *SPECULATIVE, draft, name)
        # Another spelling of the target's folder.
        path = ("--speculative-draft-model-path", checkpoints["mla"] + "/../mla/")
        with pytest.raises(ValueError, match=f"^{draft} {name} {words}"):
            serve("cuda", layout, *SPECULATIVE, draft, name, *path)
        # Another checkpoint: its pool is checked when it is built.
        serve("cuda", layout, *SPECULATIVE, draft, name, path[0], checkpoints["mla3"])


# -------------------------------------------------------------------- speculative decoding


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "argv",
    [
        SPECULATIVE,
        ("--speculative-algorithm", "NEXTN"),
        (*SPECULATIVE, "--speculative-attention-mode", "decode"),
        (*SPECULATIVE, "--speculative-draft-attention-backend", OURS),
        (
            *(*SPECULATIVE, "--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
            *("--speculative-num-draft-tokens", "4"),
        ),
        (*SPECULATIVE, "--speculative-adaptive", "--speculative-num-steps", "3"),
        ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "draft"),
    ],
    ids=" ".join,
)
def test_chains_are_served(serve, checkpoints, layout, argv):
    draft = {"draft": checkpoints["mla3"]}
    argv = [draft.get(word, word) for word in argv]
    assert serve("cuda", layout, "--attention-backend", OURS, *argv) == (OURS, OURS)


@pytest.mark.parametrize("algorithm", ["NGRAM", "STANDALONE", "DFLASH", "UNO", "frozen_kv_mtp"])
def test_other_algorithms_are_refused(serve, algorithm):
    text = f"^--speculative-algorithm {algorithm} does not work.*one of: EAGLE, EAGLE3, NEXTN, or use"
    with pytest.raises(ValueError, match=text) as error:
        serve("cuda", "fp4", "--speculative-algorithm", algorithm)
    assert "it is not known" not in str(error.value)


def test_what_dspark_does_not_work_with(serve, monkeypatch):
    dspark = ("--speculative-algorithm", "DSPARK", "--speculative-num-draft-tokens", "4")
    with pytest.raises(ValueError, match="^--speculative-algorithm DSPARK .* leave out --enable-hie"):
        serve("cuda", "fp4", *dspark, "--enable-hierarchical-cache")
    with pytest.raises(
        ValueError, match="^--speculative-algorithm DSPARK .*does not split its verif.*of them$"
    ):
        serve("cuda", "fp4", *dspark, "--enable-two-batch-overlap", "--moe-a2a-backend", "deepep")
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")
    with pytest.raises(ValueError, match="^SGLANG_RAGGED_VERIFY_MODE=compact does not work.*or use static$"):
        serve("cuda", "fp4", *dspark)


def test_every_algorithm_of_sglang_is_decided():
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sgl_kvpool.sglang_plugin.rules import attention as attention_rules

    known = {*SPECULATIVE_ALGORITHMS, *attention_rules.UNSHOWN_ALGORITHMS, "DSPARK", "NONE"}
    assert {algorithm.name for algorithm in SpeculativeAlgorithm} == known


@pytest.mark.parametrize("algorithm", ["EAGLE", "NEXTN", "NGRAM"])
@pytest.mark.parametrize("layout", ["bf16", "fp4"])
def test_nothing_is_drafted_on_a_cpu(serve, layout, algorithm):
    text = f"^--speculative-algorithm {algorithm} does not work.*on a CPU.*serve on a GPU"
    with pytest.raises(ValueError, match=text):
        serve("cpu", layout, "--speculative-algorithm", algorithm)
