"""Which attention backends work with a layout, and what our own backend does not work with.

Each refusal is an error at start that names the value, the reason and what to use instead.
"""

import logging
from collections.abc import Container, Iterator
from typing import Any

from sgl_kvpool import env
from sgl_kvpool.attention.decode_config import MAX_LATENT_RANK, gpu_problem
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.memory.arrangement import KVArrangement
from sgl_kvpool.refusal import Refusal, Way, leave_out, leave_out_one, use_values, use_words
from sgl_kvpool.sglang_plugin.options import ARRANGEMENT, LAYOUT
from sgl_kvpool.sglang_plugin.rules.features import (
    BACKEND_FEATURES,
    BACKEND_FIELDS,
    DCP_FEATURES,
    DENSE_DCP_FEATURES,
    DRAFT_FEATURES,
    SPARSE_DCP_FEATURES,
    Feature,
    check_features,
    dense_dcp_obstacles,
    first_in_use,
)
from sgl_kvpool.sglang_plugin.server import Server
from sgl_kvpool.srt.facts.readers import (
    KVPOOL_BACKEND,
    KVPOOL_DEVICES,
    PHASES,
    can_read,
    casts_pool,
    obstacle,
    suggestions,
)

logger = logging.getLogger(__name__)

#: The way with our backend in all phases.
ALONE = Way(
    f"use --attention-backend {KVPOOL_BACKEND} alone",
    without=("--prefill-attention-backend", "--decode-attention-backend"),
    add=(f"--attention-backend={KVPOOL_BACKEND}",),
)

#: Speculative algorithms that `kvpool_mla` verifies and drafts for, as SGLang resolves them (NEXTN is EAGLE).
SPECULATIVE_ALGORITHMS = ("EAGLE", "EAGLE3")
#: It verifies only: SGLang drafts with flashinfer, because these drafts attend later tokens.
_DSPARK = "DSPARK"

#: Reasons against other algorithms. An algorithm that is not listed, such as a plugin's, is unknown.
UNSHOWN_ALGORITHMS = {
    "NGRAM": "it verifies trees of proposals, which need a mask per query in its kernels",
    "STANDALONE": "the pool of a separate draft model has not been examined",
    "DFLASH": "its drafts attend later tokens",
    "FROZEN_KV_MTP": "its drafts read the target's pool",
    "UNO": "SGLang supports it with fa3 only",
}

#: Models of which SGLang gathers the rows of several ranks for a prefill, and models with sparse attention of
#: which it gathers the queries.
_DEEPSEEK = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM")
_GATHERED = (*_DEEPSEEK, "KimiK25ForConditionalGeneration", "KimiLinearForCausalLM")
_SPARSE = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
#: Lengths of top-k lists that sgl_kernel's operator selects for prefills over stored rows.
PAGED_TOP_K: Container[int] = (2048,)


def is_chosen(
    layout: MLAKVCacheLayout, arrangement: KVArrangement, device: str, dcp_size: int | None = None
) -> bool:
    """Whether `kvpool_mla` is the default for phases without an explicit backend.

    On CUDA, rows in SGLang's own format stay with SGLang's kernels, which read these directly and which
    SGLang chooses by GPU, except in page_major, with decode context parallelism and with
    KVPOOL_PREFILL_READS_ROWS=1, which only `kvpool_mla` supports. For fp8, SGLang's default on Hopper, fa3,
    casts the full pool of a layer in every call.
    """
    if device == "cpu" or not layout.is_sglang_native or env.flag(env.PREFILL_READS_ROWS):
        return True
    return arrangement is KVArrangement.PAGE_MAJOR or (dcp_size or 1) > 1


def check_named(server: Server) -> None:
    """Refuse backends named by the user that cannot read the rows; the error names the flag of the backend.

    The fields of ServerArgs hold the user's values; the view has SGLang's defaults for the platform already.
    """
    common, *by_phase = (getattr(server.server_args, field) for field in BACKEND_FIELDS)
    for phase, backend in zip(PHASES, by_phase, strict=True):
        _check_reader(server, f"--{phase}-attention-backend", backend, phase, phase)
    taken_over = _phases_taken_over(server)
    for phase, backend in zip(PHASES, by_phase, strict=True):
        if backend is None and phase not in taken_over:
            # A draft's steps and verification need one backend for all phases.
            proposed = None if server.view.speculative_algorithm is None else phase
            _check_reader(server, "--attention-backend", common, phase, proposed)
    _check_reader(server, "--attention-backend", common, None)


def declare_backends(server: Server) -> dict[str, str] | None:
    """`kvpool_mla` for phases that it takes over, or for both where none is named and it `is_chosen`."""
    common, *by_phase = (getattr(server.server_args, field) for field in BACKEND_FIELDS)
    taken_over = _phases_taken_over(server)
    for phase in taken_over:
        logger.info(
            "sgl-kvpool: --%s-attention-backend %s (that of %s would cast the whole pool of a layer)",
            *(phase, KVPOOL_BACKEND, common),
        )
    if common is None and None in by_phase:
        if is_chosen(server.layout, server.arrangement, server.view.device, server.view.dcp_size):
            return {"attention_backend": KVPOOL_BACKEND}
        logger.info("sgl-kvpool: SGLang chooses the attention backend; its own read %s", server.layout)
    return {f"{phase}_attention_backend": KVPOOL_BACKEND for phase in taken_over}


def disable_cpu_graphs(server: Server) -> dict[str, Any] | None:
    """No CUDA graphs for `kvpool_mla` on a CPU, as SGLang declares for torch_native."""
    if server.view.device != "cpu" or KVPOOL_BACKEND not in server.backends:
        return None
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    config = server.view.cuda_graph_config
    for part in (Phase.DECODE, Phase.PREFILL):
        config = with_phase(config, part, backend=Backend.DISABLED)
    return {"cuda_graph_config": config}


def _phases_taken_over(server: Server) -> tuple[str, ...]:
    """Phases of `--attention-backend` that `kvpool_mla` computes instead.

    The backend would cast full pools in these phases, and reads the rows directly in the other phase:
    flashmla over fp8. Its prefill is FlashInfer's, which casts the pool in absorbed calls: under prefill
    graphs, SGLang's default, and after short prefixes.
    """
    common, *by_phase = (getattr(server.server_args, field) for field in BACKEND_FIELDS)
    if common is None or casts_pool(common, server.layout):
        return ()
    named = zip(PHASES, by_phase, strict=True)
    return tuple(p for p, backend in named if backend is None and casts_pool(common, server.layout, p))


def check_draft_reader(server: Server, backend: str | None) -> None:
    """Refuse a draft's explicit backend unless it can read the draft's pool in all phases: it serves all."""
    for phase in PHASES:
        _check_reader(server, "--speculative-draft-attention-backend", backend, phase, PHASES[0])


def _check_reader(
    server: Server,
    flag: str,
    backend: str | None,
    phase: str | None,
    proposed: str | None = None,
    subject: str | None = None,
) -> None:
    """Refuse a backend that cannot read the rows in `phase`, or in any phase if that is None.

    The error names backends that read them in phase `proposed`; it begins with `subject`, or with the flag.
    """
    layout, arrangement = server.layout, server.arrangement
    if backend is None or can_read(backend, layout, arrangement, phase):
        return
    able = use_values(flag, (KVPOOL_BACKEND, *suggestions(layout, server.view.device, arrangement, proposed)))
    subject = f"{subject or flag} {backend}"
    if casts_pool(backend, layout, phase):
        raise Refusal(
            f"{subject} would cast the whole pool of a layer in every call of {phase or 'each phase'} "
            f"with {LAYOUT.flag} {layout}, however few rows the batch refers to",
            *(leave_out(flag), *able),
        )
    if can_read(backend, layout, phase=phase):
        raise Refusal(
            f"{subject} cannot read rows of {ARRANGEMENT.flag} {arrangement}: {obstacle(arrangement)}",
            *(*leave_out_one(flag, ARRANGEMENT.flag), *able),
        )
    raise Refusal(f"{subject} cannot read rows of {LAYOUT.flag} {layout}", leave_out(flag), *able)


def check_readers(server: Server) -> None:
    """Refuse backends in use that cannot read the rows, and a variable that needs ours for prefill."""
    for phase, backend in zip(PHASES, server.backends, strict=True):
        flag, subject = f"--{phase}-attention-backend", f"the {phase} attention backend"
        _check_reader(server, flag, backend, phase, phase, subject)
    prefill = server.backends[0]
    if env.flag(env.PREFILL_READS_ROWS) and prefill != KVPOOL_BACKEND:
        raise Refusal(
            f"{env.PREFILL_READS_ROWS}=1 does nothing for the prefill attention backend {prefill}",
            *("leave it out", use_words(f"--prefill-attention-backend={KVPOOL_BACKEND}")),
        )


def check_ours(server: Server) -> None:
    """Refuse devices and features that our backend does not support."""
    if KVPOOL_BACKEND not in server.backends:
        return
    prefill, decode = server.backends
    if server.view.enable_deterministic_inference and prefill != decode:
        raise Refusal(
            f"--enable-deterministic-inference does not work with attention backends {prefill} for prefill "
            f"and {decode} for decode, whose results differ",
            ALONE,
        )
    if server.device_name not in KVPOOL_DEVICES:
        raise Refusal(
            f"attention backend {KVPOOL_BACKEND} runs on NVIDIA GPUs and on CPUs only, and the device is "
            f"{server.device_name}",
            leave_out(LAYOUT.flag, text=f"leave out {LAYOUT.flag}"),
        )
    _check_features(BACKEND_FEATURES, server)


def check_draft(server: Server) -> None:
    """Refuse a backend for drafts that cannot read a pool of the target's rows.

    Such a draft is a layer of the same checkpoint. The pool of a separate draft model is checked when it is
    built.
    """
    if server.view.speculative_algorithm is not None and not server.has_own_draft:
        check_draft_reader(server, server.view.speculative_draft_attention_backend)


def check_gpu(what: str, *ways: Way | str) -> None:
    """Refuse `what`, which needs our decode, on a GPU that does not run it."""
    import torch

    if (problem := gpu_problem(torch.cuda.get_device_capability())) is not None:
        raise Refusal(f"{what} {problem}", *ways)


def check_model(server: Server) -> None:
    """Refuse GPUs and models that our backend does not support on CUDA."""
    if KVPOOL_BACKEND not in server.backends or server.view.device == "cpu":
        return
    ways = (
        leave_out(LAYOUT.flag, text=f"serve it without {LAYOUT.flag}"),
        "use bf16 with an --attention-backend of SGLang",
    )
    check_gpu(f"attention backend {KVPOOL_BACKEND}", *ways)
    rank = server.model_config.kv_lora_rank
    dtype = str(server.model_config.dtype).removeprefix("torch.")
    if rank > MAX_LATENT_RANK:
        raise Refusal(
            f"the model has kv_lora_rank={rank}, and attention backend {KVPOOL_BACKEND} computes up to "
            f"{MAX_LATENT_RANK} on CUDA",
            *ways,
        )
    if dtype not in ("bfloat16", "float16"):
        raise Refusal(
            f"--dtype {dtype} does not work with attention backend {KVPOOL_BACKEND} on CUDA, whose kernels "
            "multiply 16-bit numbers",
            *(Way("use --dtype bfloat16 or float16", add=(f"--dtype={n}",)) for n in ("bfloat16", "float16")),
        )


def _check_features(features: tuple[Feature, ...], server: Server) -> None:
    rows = _rows_of_sglang(server)
    check_features(
        features, server, f"attention backend {KVPOOL_BACKEND}", lambda flag: (leave_out(flag), *rows)
    )


def _rows_of_sglang(server: Server) -> tuple[Way, ...]:
    """The way with the layout that SGLang's own backend reads, if there is one."""
    plain = MLAKVCacheLayout.BF16
    if server.layout is plain or is_chosen(plain, server.arrangement, server.view.device):
        return ()
    layout, then = f"{LAYOUT.flag}={plain}", ", and SGLang's backend reads it"
    return (use_words(layout, without=("--attention-backend",), then=then),)


def check_speculation(server: Server) -> None:
    """Refuse speculative decoding that our backend does not verify, or does not draft for."""
    view, in_use = server.view, server.backends
    algorithm, draft = view.speculative_algorithm, view.speculative_draft_attention_backend
    if algorithm is None or not any(in_use):  # SGLang has not chosen yet
        return
    ours = [name == KVPOOL_BACKEND for name in in_use]
    if not any(ours):
        if draft == KVPOOL_BACKEND:
            raise Refusal(
                f"--speculative-draft-attention-backend {draft} is not used beside the attention backend "
                f"{in_use[1]} of the target",
                *(leave_out("--speculative-draft-attention-backend"), ALONE),
            )
        return
    flag = f"--speculative-algorithm {algorithm}"
    if view.device == "cpu":
        raise Refusal(
            f"{flag} does not work with attention backend {KVPOOL_BACKEND} on a CPU, where it computes "
            "neither the steps of a draft nor their verification",
            *(leave_out("--speculative-algorithm"), "serve on a GPU"),
        )
    name = {"NEXTN": "EAGLE"}.get(algorithm.upper(), algorithm.upper())  # as SGLang resolves it later
    if name not in (*SPECULATIVE_ALGORITHMS, _DSPARK):
        reason = UNSHOWN_ALGORITHMS.get(name, "it is not known which tokens it attends")
        raise Refusal(
            f"{flag} does not work with attention backend {KVPOOL_BACKEND}: {reason}",
            leave_out("--speculative-algorithm"),
            *use_values("--speculative-algorithm", (*SPECULATIVE_ALGORITHMS, "NEXTN")),
            *_rows_of_sglang(server),
        )
    if not all(ours):
        raise Refusal(
            f"{flag} needs the same attention backend for prefill, decode and draft, but prefill uses "
            f"{in_use[0]} and decode uses {in_use[1]}",
            ALONE,
        )
    if name == _DSPARK:
        _check_dspark(flag, server)
    topk = view.speculative_eagle_topk
    if topk not in (None, 1):
        raise Refusal(
            f"--speculative-eagle-topk {topk} does not work with attention backend {KVPOOL_BACKEND}: it "
            "verifies chains, and trees need a mask per query in its kernels",
            *(use_words("--speculative-eagle-topk=1"), *_rows_of_sglang(server)),
        )
    _check_features(DRAFT_FEATURES, server)


def _check_dspark(flag: str, server: Server) -> None:
    from sglang.srt.speculative.ragged_verify import RaggedVerifyMode, read_ragged_verify_mode

    mode = read_ragged_verify_mode()
    if mode is not RaggedVerifyMode.STATIC:
        raise Refusal(
            f"SGLANG_RAGGED_VERIFY_MODE={mode.value} does not work with attention backend {KVPOOL_BACKEND}, "
            "which verifies as many drafts for each request",
            *("leave it out", "use static"),
        )
    if server.view.enable_two_batch_overlap:
        raise Refusal(
            f"{flag} does not work with --enable-two-batch-overlap: SGLang does not split its verification",
            *leave_out_one(
                "--speculative-algorithm", "--enable-two-batch-overlap", text="leave out one of them"
            ),
        )
    if server.has_host_tier:
        raise Refusal(
            f"{flag} does not work with a host tier of {LAYOUT.flag}: its drafts there have not been tested",
            leave_out("--enable-hierarchical-cache", text="leave out --enable-hierarchical-cache"),
        )


def check_ranks(server: Server) -> None:
    """Refuse ranks that cannot be grouped, which SGLang asserts without a text, or does not notice."""
    view = server.view
    for flag, count, ranks, what in (
        ("--attn-dp-size", view.attn_dp_size, view.tp_size, "tensor-parallel ranks"),
        ("--dcp-size", view.dcp_size, server.same_rows_ranks, "attention ranks"),
    ):
        if count < 1 or ranks % count:
            way = Way(f"give a divisor of {ranks}", add=(f"{flag}=1",))
            raise Refusal(f"{flag} {count} does not divide {ranks} {what}", way)


def check_dcp(server: Server) -> None:
    check_ranks(server)
    view, name = server.view, server.model_name
    if view.dcp_size == 1:
        return
    out = leave_out("--dcp-size")
    ours = f"--dcp-size {view.dcp_size} does not work with {LAYOUT.flag} {server.layout}"
    if view.device == "cpu":
        raise Refusal(f"{ours} on a CPU: SGLang merges results of ranks by kernels for GPUs", out)
    for unfit, reason in (
        *(_sparse_obstacles if server.is_dsa else dense_dcp_obstacles)(server),
        (
            name not in (*_GATHERED, *_SPARSE),
            "SGLang does not gather the rows of several ranks for its prefills",
        ),
        (
            getattr(server.model_config.hf_text_config, "llama_4_scaling", None),
            "where SGLang scales its queries by their position, it does not merge results of ranks",
        ),
    ):
        if unfit:
            raise Refusal(f"{ours} and {name}: {reason}", out)
    of_kind = SPARSE_DCP_FEATURES if server.is_dsa else DENSE_DCP_FEATURES
    if (found := first_in_use((*of_kind, *DCP_FEATURES), server)) is not None:
        feature, text = found
        ways = leave_out_one("--dcp-size", feature.flag, text="leave out one of them")
        raise Refusal(f"{ours} and {text}: {feature.reason}", *ways)
    if env.flag(env.PREFILL_READS_ROWS):
        raise Refusal(
            f"{ours} and {env.PREFILL_READS_ROWS}=1: the rows of a prefill's new tokens are stored on "
            "several ranks",
            leave_out("--dcp-size", text="leave out one of them"),
        )


def _sparse_obstacles(server: Server) -> Iterator[tuple[bool, str]]:
    """What several ranks do not serve of a model with sparse attention: whether it is so, and why."""
    from sglang.srt.configs.model_config import get_dsa_index_kpool

    config, drafts = server.model_config, server.view.speculative_algorithm is not None
    raw = server.layout is MLAKVCacheLayout.FP8_NOPE_FP8_ROPE
    yield raw, "SGLang stores such rows for tilelang and trtllm only, which it does not serve there"
    yield get_dsa_index_kpool(config.hf_config) > 1, "a pooled index key has tokens of several ranks"
    short = config.hf_config.index_topk not in PAGED_TOP_K
    yield short, "SGLang's operator for prefills over stored rows selects 2048 (index_topk)"
    yield server.model_name not in _SPARSE, "its attention has not been tested there"
    yield drafts and server.has_own_draft, "a draft of another checkpoint has not been tested there"
    several = (config.num_nextn_predict_layers or 0) > 1
    yield drafts and several, "chains of several layers for multi-token prediction have not been tested there"


def check_dcp_backends(server: Server) -> None:
    """Refuse other attention backends than ours, whatever rows they read."""
    others = [backend for backend in server.backends if backend != KVPOOL_BACKEND]
    if server.view.dcp_size > 1 and others:
        raise Refusal(
            f"--dcp-size {server.view.dcp_size} with {LAYOUT.flag} {server.layout} needs attention backend "
            f"{KVPOOL_BACKEND} in all phases, and {others[0]} has not been tested over these pools",
            ALONE,
        )
