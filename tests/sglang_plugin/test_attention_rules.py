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
def serve(resolve, checkpoints):
    """`serve(device, layout, argv)`: the backends (prefill, decode) of a server."""
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolving_view

    def run(device, layout, *argv):
        args = resolve(checkpoints["mla"], "--kv-cache-layout", layout, *argv, device=device)
        return attention_backends_of(resolving_view(args))

    return run


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


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("argv", "flag", "phase"),
    [
        (("--attention-backend", "flashinfer"), "--attention-backend flashinfer", "prefill"),
        (("--attention-backend", "fa3"), "--attention-backend fa3", "prefill"),
        (("--prefill-attention-backend", "flashmla"), "--prefill-attention-backend flashmla", "prefill"),
        (("--decode-attention-backend", "fa3"), "--decode-attention-backend fa3", "decode"),
        (phases(OURS, "flashinfer"), "--decode-attention-backend flashinfer", "decode"),
        (
            ("--attention-backend", "flashinfer", "--prefill-attention-backend", OURS),
            "--attention-backend flashinfer",
            "decode",
        ),
    ],
)
def test_backends_that_cast_the_pool(serve, device, argv, flag, phase):
    text = rf"^{flag} would cast the whole pool.*call of {phase} with --kv-cache-layout fp8,.*leave it out"
    with pytest.raises(ValueError, match=text) as error:
        serve(device, "fp8", *argv)
    able = str(error.value).partition("one of: ")[2].split(", ")
    # SGLang's backends of this device. With `--attention-backend flashmla` ours computes prefill.
    both = argv[0] == "--attention-backend"
    here = ["flashmla", "triton"] if both or phase == "decode" else ["triton"]
    assert able == [OURS, *(["torch_native"] if device == "cpu" else here)]
    serve("cuda", "bf16", *argv)  # bf16 rows are not cast


def test_devices():
    """CPUs and CUDA only; calls the check directly, because SGLang refuses most devices before it."""
    from sgl_kvpool.layout import MLAKVCacheLayout
    from sgl_kvpool.memory.arrangement import KVArrangement
    from sgl_kvpool.sglang_plugin.rules import attention as attention_rules

    assert KVPOOL_DEVICES == ("cpu", "cuda")
    view = SimpleNamespace(
        dcp_size=1,
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

#: Arguments -> the message of our check, or of SGLang's earlier check.
REFUSED = {
    ("--enable-two-batch-overlap",): "^--enable-two-batch-overlap does not work.*kvpool_mla: the backends",
    ("--enable-mis",): "^--enable-mis does not work.*masks between the items",
    ("--cuda-graph-backend-prefill", "full"): "^--cuda-graph-backend-prefill full does not.*use breakable",
    ("--enable-torch-compile",): "^--enable-torch-compile does not work",
}


@pytest.mark.parametrize("argv", REFUSED, ids=" ".join)
@pytest.mark.parametrize("layout", ["bf16", "fp4"])
def test_what_is_refused_beside_ours(serve, argv, layout):
    with pytest.raises(ValueError, match=REFUSED[argv]):
        serve("cuda", layout, "--attention-backend", OURS, *argv)


#: Field of each of `BACKEND_FEATURES` -> a value with which the feature is in use.
IN_USE = {
    "enable_two_batch_overlap": True,
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
    with pytest.raises(ValueError, match=f"^{DETERMINISTIC} does not work with .*: the queries of a verif"):
        serve("cuda", "fp4", DETERMINISTIC, *SPECULATIVE)
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
    with pytest.raises(ValueError, match="--dtype float32 does not work .* on CUDA.*use --dtype bfloat16 or"):
        serve("cuda", "fp4", "--dtype", "float32")
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
        ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "draft"),
    ],
    ids=" ".join,
)
def test_chains_are_served(serve, checkpoints, layout, argv):
    draft = {"draft": checkpoints["mla3"]}
    argv = [draft.get(word, word) for word in argv]
    assert serve("cuda", layout, "--attention-backend", OURS, *argv) == (OURS, OURS)


@pytest.mark.parametrize("layout", ["bf16", "fp4"])
@pytest.mark.parametrize("topk", ["2", "4"])
def test_trees_are_refused(serve, layout, topk):
    tree = ("--speculative-num-steps", "3", "--speculative-eagle-topk", topk)
    bf16 = "$" if layout == "bf16" else ", or use --kv-cache-layout bf16 and leave out --attention-backend"
    text = f"^--speculative-eagle-topk {topk} does not.*trees need a mask.*--speculative-eagle-topk 1{bf16}"
    with pytest.raises(ValueError, match=text):
        serve(
            "cuda",
            layout,
            *("--attention-backend", OURS, *SPECULATIVE, *tree),
            *("--speculative-num-draft-tokens", "8"),
        )


def test_a_topk_of_0_is_refused(serve):
    """0 is a value like 2, and is not taken for an argument that was left out."""
    with pytest.raises(ValueError, match="^--speculative-eagle-topk 0 does not work.*-topk 1, or use"):
        serve(
            "cuda", "fp4", *SPECULATIVE, "--speculative-eagle-topk", "0",
            *("--speculative-num-steps", "3", "--speculative-num-draft-tokens", "4"),
        )  # fmt: skip


@pytest.mark.parametrize("algorithm", ["NGRAM", "STANDALONE", "DFLASH", "DSPARK", "UNO", "frozen_kv_mtp"])
def test_other_algorithms_are_refused(serve, algorithm):
    text = f"^--speculative-algorithm {algorithm} does not work.*one of: EAGLE, EAGLE3, NEXTN, or use"
    with pytest.raises(ValueError, match=text) as error:
        serve("cuda", "fp4", "--speculative-algorithm", algorithm)
    assert "it is not known" not in str(error.value)


def test_every_algorithm_of_sglang_is_decided():
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sgl_kvpool.sglang_plugin.rules import attention as attention_rules

    known = {*SPECULATIVE_ALGORITHMS, *attention_rules.UNSHOWN_ALGORITHMS, "NONE"}
    assert {algorithm.name for algorithm in SpeculativeAlgorithm} == known


@pytest.mark.parametrize("algorithm", ["EAGLE", "NEXTN", "NGRAM"])
@pytest.mark.parametrize("layout", ["bf16", "fp4"])
def test_nothing_is_drafted_on_a_cpu(serve, layout, algorithm):
    text = f"^--speculative-algorithm {algorithm} does not work.*on a CPU.*serve on a GPU"
    with pytest.raises(ValueError, match=text):
        serve("cpu", layout, "--speculative-algorithm", algorithm)


@pytest.mark.parametrize("pair", [("triton", OURS), (OURS, "triton")])
def test_one_backend_for_all_phases(serve, pair):
    with pytest.raises(ValueError, match=f"prefill uses {pair[0]} and decode uses {pair[1]}; use --at"):
        serve("cuda", "bf16", *phases(*pair), *SPECULATIVE)


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (("--speculative-draft-window-size", "512"), "--speculative-draft-window-size 512"),
        (("--enable-multi-layer-eagle",), "--enable-multi-layer-eagle"),
        (
            (
                *("--speculative-adaptive", "--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
                *("--speculative-num-draft-tokens", "4"),
            ),
            "--speculative-adaptive",
        ),
    ],
)
def test_drafts_that_are_refused(serve, argv, flag):
    with pytest.raises(ValueError, match=f"^{flag} does not work with attention backend kvpool_mla: "):
        serve("cuda", "fp4", *SPECULATIVE, *argv)


def test_drafts_of_a_stock_target(serve):
    stock = ("--attention-backend", "flashinfer", *SPECULATIVE)
    assert serve("cuda", "bf16", *stock) == ("flashinfer", "flashinfer")
    with pytest.raises(ValueError, match="draft-attention-backend kvpool_mla is not used beside.*flashinfer"):
        serve("cuda", "bf16", *stock, "--speculative-draft-attention-backend", OURS)
