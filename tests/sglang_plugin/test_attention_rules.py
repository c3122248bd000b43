"""The attention backend of a server with a layout, and the arguments that are refused with kvpool_mla.

Most tests go through SGLang's own resolution. It also resolves arguments for CUDA on a machine without a GPU,
if it does not query the device.
"""

import re
from types import SimpleNamespace

import pytest
from codec_oracle import LAYOUTS
from refused import EAGLE as SPECULATIVE
from refused import STEPS
from sglang.srt.arg_groups.overrides import attention_backends_of, resolving_view
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.refusal import Refusal
from sgl_kvpool.sglang_plugin.options import KVPoolConfig
from sgl_kvpool.sglang_plugin.rules import attention as attention_rules
from sgl_kvpool.sglang_plugin.rules.attention import SPECULATIVE_ALGORITHMS, check_ours, check_speculation
from sgl_kvpool.sglang_plugin.rules.features import BACKEND_FEATURES
from sgl_kvpool.sglang_plugin.server import Server

OURS = "kvpool_mla"


@pytest.fixture
def serve(serve):
    """`serve(device, layout, *argv)`: the backends (prefill, decode) of a server."""
    return lambda device, layout, *argv: attention_backends_of(serve("mla", layout, *argv, device=device))


def phases(prefill, decode):
    return ("--prefill-attention-backend", prefill, "--decode-attention-backend", decode)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0)])
@pytest.mark.parametrize(
    ("model", "layout", "argv", "subject"),
    [
        *(("mla", layout, (), "attention backend kvpool_mla") for layout in LAYOUTS[1:]),
        ("mla", "bf16", (), None),
        ("mla", "bf16", phases("triton", OURS), "attention backend kvpool_mla"),
        ("kda", "fp4", (), "attention backend kvpool_mla"),
        ("dsa", "fp4", (), "--kv-cache-layout fp4"),
        ("dsa", "bf16", (), None),
    ],
)
def test_our_kernels_need_hopper(resolve, checkpoints, model, layout, argv, subject, capability):
    """Dense, hybrid and sparse models have one rule, at start; SGLang's own backends read bf16 anywhere."""
    words = (checkpoints[model], "--kv-cache-layout", layout, *argv)
    if subject is None or capability >= (9, 0):
        resolve(*words, device="cuda", capability=capability)
        return
    found = ".".join(map(str, capability))
    needs = f"{subject} needs a Hopper GPU (compute capability 9.0), and this one has {found}; "
    with pytest.raises(Refusal, match=f"^{re.escape(needs)}.*bf16"):
        resolve(*words, device="cuda", capability=capability)


# -------------------------------------------------------------------- choice of the backend

FLASHMLA = ("--attention-backend", "flashmla")


@pytest.mark.parametrize(
    ("device", "layout", "argv", "backends"),
    [
        *(("cpu", layout, (), (OURS, OURS)) for layout in LAYOUTS),
        *(("cuda", layout, (), (OURS, OURS)) for layout in LAYOUTS[1:]),
        # SGLang's backends cannot read page-major rows of any layout.
        ("cuda", "bf16", ("--kv-cache-arrangement", "page_major"), (OURS, OURS)),
        ("cuda", "bf16", ("--attention-backend", OURS), (OURS, OURS)),
        ("cuda", "bf16", ("--attention-backend", "flashinfer"), ("flashinfer", "flashinfer")),
        ("cuda", "bf16", phases("flashinfer", OURS), ("flashinfer", OURS)),
        ("cuda", "fp8", ("--attention-backend", "triton"), ("triton", "triton")),
        # flashmla reads e4m3 rows in decode; its prefill would cast the pool.
        ("cuda", "fp8", ("--decode-attention-backend", "flashmla"), (OURS, "flashmla")),
        ("cuda", "fp8", FLASHMLA, (OURS, "flashmla")),
        ("cuda", "fp8", (*FLASHMLA, "--kv-cache-arrangement", "token_major"), (OURS, "flashmla")),
        ("cuda", "fp8", (*FLASHMLA, *phases(OURS, OURS)), (OURS, OURS)),
        ("cuda", "bf16", ("--attention-backend", "flashinfer", *SPECULATIVE), ("flashinfer", "flashinfer")),
    ],
)
def test_choice(serve, device, layout, argv, backends):
    assert serve(device, layout, *argv) == backends


def test_bf16_on_cuda_is_left_to_sglang(serve, resolve, checkpoints, monkeypatch):
    plain = attention_backends_of(resolving_view(resolve(checkpoints["mla"], device="cuda")))
    assert plain[0] != OURS
    lines = []
    monkeypatch.setattr(attention_rules.logger, "info", lambda text, *values: lines.append(text % values))
    assert serve("cuda", "bf16") == plain
    assert lines == ["sgl-kvpool: SGLang chooses the attention backend; its own read bf16"]
    assert serve("cuda", "bf16", "--kv-cache-arrangement", "token_major") == plain
    monkeypatch.setenv("KVPOOL_PREFILL_READS_ROWS", "1")  # only kvpool_mla's prefill does
    assert serve("cuda", "bf16") == (OURS, OURS)


def test_rocm_calls_its_device_cuda(serve, monkeypatch):
    from sgl_kvpool.sglang_plugin import server

    monkeypatch.setattr(server, "is_rocm", lambda: True)
    with pytest.raises(ValueError, match="runs on NVIDIA GPUs and on CPUs only, and the device is ROCm"):
        serve("cuda", "fp4")


# -------------------------------------------------------------------- arguments beside kvpool_mla

#: Values with which features that are no flags are in use.
IN_USE = {
    "attn_cp_size": 2,
    "dllm_algorithm": "LowConfidence",
    "cuda_graph_config": SimpleNamespace(prefill=SimpleNamespace(backend="full")),
}


@pytest.mark.parametrize("feature", BACKEND_FEATURES, ids=lambda feature: feature.field)
def test_every_feature(feature):
    """Calls the check directly, because SGLang refuses some of these combinations first, in its own words."""
    backends = (f"{kind}_attention_backend" for kind in ("prefill", "decode", "speculative_draft"))
    off = (*backends, "speculative_algorithm", "enable_deterministic_inference")
    off += tuple(other.field for other in BACKEND_FEATURES)
    view = SimpleNamespace(**dict.fromkeys(off), dcp_size=1, attention_backend=OURS, device="cuda")
    value = IN_USE.get(feature.field, True)
    text = f"^{feature.flag}( {value})? does not work with attention backend kvpool_mla: .*; leave it out, or"
    server = Server(None, view=view, config=KVPoolConfig(layout=MLAKVCacheLayout.FP4))
    check_ours(server)
    check_speculation(server)
    setattr(view, feature.field, value)
    with pytest.raises(ValueError, match=text):
        check_ours(server)


DETERMINISTIC = "--enable-deterministic-inference"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_deterministic_server(serve, device):
    """Ours is taken before SGLang chooses a backend of its own; with it SGLang keeps the prefix cache."""
    assert serve(device, "fp4", DETERMINISTIC) == (OURS, OURS)
    narrow = ("--enable-hierarchical-cache", "--kv-host-layout", "fp4", "--attention-backend", OURS)
    with pytest.raises(ValueError, match="^--kv-host-layout fp4 rounds rows that come back .*leave out one$"):
        serve(device, "bf16", DETERMINISTIC, *narrow)


def test_models_beyond_the_kernels(serve):
    assert serve("cpu", "fp4", "--dtype", "float32") == (OURS, OURS)
    assert serve("cuda", "fp4", "--dtype", "float16") == (OURS, OURS)

    def check(rank):
        config = SimpleNamespace(kv_lora_rank=rank, dtype="torch.bfloat16")
        view = SimpleNamespace(device="cuda")
        attention_rules.check_model(Server(None, view=view, backends=(OURS, OURS), model_config=config))

    check(512)
    with pytest.raises(ValueError, match="kv_lora_rank=640, .* up to 512 on CUDA"):
        check(640)


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
        (*SPECULATIVE, *STEPS, "--speculative-eagle-topk", "1"),
        (*SPECULATIVE, "--speculative-adaptive", "--speculative-num-steps", "3"),
        ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "draft"),
    ],
    ids=" ".join,
)
def test_chains_are_served(serve, checkpoints, layout, argv):
    draft = {"draft": checkpoints["mla3"]}
    argv = [draft.get(word, word) for word in argv]
    assert serve("cuda", layout, "--attention-backend", OURS, *argv) == (OURS, OURS)


def test_what_dspark_does_not_work_with(serve, monkeypatch):
    dspark = ("--speculative-algorithm", "DSPARK", "--speculative-num-draft-tokens", "4")
    with pytest.raises(ValueError, match="^--speculative-algorithm DSPARK .* leave out --enable-hie"):
        serve("cuda", "fp4", *dspark, "--enable-hierarchical-cache")
    text = "^--speculative-algorithm DSPARK .*does not split its verif.*of them$"
    with pytest.raises(ValueError, match=text):
        serve("cuda", "fp4", *dspark, "--enable-two-batch-overlap", "--moe-a2a-backend", "deepep")
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")
    with pytest.raises(ValueError, match="^SGLANG_RAGGED_VERIFY_MODE=compact does not work.*or use static$"):
        serve("cuda", "fp4", *dspark)


def test_every_algorithm_of_sglang_is_decided():
    known = {*SPECULATIVE_ALGORITHMS, *attention_rules.UNSHOWN_ALGORITHMS, "DSPARK", "NONE"}
    assert {algorithm.name for algorithm in SpeculativeAlgorithm} == known
