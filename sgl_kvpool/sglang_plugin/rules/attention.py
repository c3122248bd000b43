"""Which attention backends work with a layout, and what our own backend does not work with.

Each refusal is an error at start that names the value, the reason and what to use instead.
"""

from typing import Any

from sgl_kvpool import env
from sgl_kvpool.attention.decode_config import MAX_LATENT_RANK
from sgl_kvpool.attention.readers import (
    KVPOOL_BACKEND,
    KVPOOL_DEVICES,
    PHASES,
    can_read,
    casts_pool,
    obstacle,
    suggestions,
)
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.memory.arrangement import KVArrangement
from sgl_kvpool.refusal import Refusal, use
from sgl_kvpool.sglang_plugin.models import check_gpu, device_name, has_own_draft
from sgl_kvpool.sglang_plugin.options import ARRANGEMENT, LAYOUT
from sgl_kvpool.sglang_plugin.registry import fields, uses
from sgl_kvpool.sglang_plugin.rules import dcp as dcp_rules
from sgl_kvpool.sglang_plugin.rules.features import (
    BACKEND_FEATURES,
    DRAFT_FEATURES,
    Feature,
    check_features,
)
from sgl_kvpool.sglang_plugin.rules.host_tier import has_host_tier

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

uses("sglang.srt.arg_groups.overrides.attention_backends_of", "arguments", takes=("cfg",))
fields("speculative_algorithm", "speculative_eagle_topk", "speculative_draft_attention_backend")


def backends_in_use(view: Any) -> tuple[str | None, str | None]:
    """Attention backends (prefill, decode) of a resolving view."""
    from sglang.srt.arg_groups.overrides import attention_backends_of

    return attention_backends_of(view)


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


def check_named(
    layout: MLAKVCacheLayout,
    arrangement: KVArrangement,
    view: Any,
    common: str | None,
    prefill: str | None,
    decode: str | None,
) -> None:
    """Refuse explicit backends that cannot read the rows; the error names the flag of the backend."""
    own = dict(zip(PHASES, (prefill, decode), strict=True))
    for phase, backend in own.items():
        _check_reader(f"--{phase}-attention-backend", backend, layout, arrangement, phase, view.device, phase)
    taken_over = phases_taken_over(layout, common, prefill, decode)
    for phase, backend in own.items():
        if backend is None and phase not in taken_over:
            # A draft's steps and verification need one backend for all phases.
            proposed = None if view.speculative_algorithm is None else phase
            _check_reader("--attention-backend", common, layout, arrangement, phase, view.device, proposed)
    _check_reader("--attention-backend", common, layout, arrangement, None, view.device)


def phases_taken_over(
    layout: MLAKVCacheLayout, common: str | None, prefill: str | None, decode: str | None
) -> tuple[str, ...]:
    """Phases of `--attention-backend` that `kvpool_mla` computes instead.

    The backend would cast full pools in these phases, and reads the rows directly in the other phase:
    flashmla over fp8. Its prefill is FlashInfer's, which casts the pool in absorbed calls: under prefill
    graphs, SGLang's default, and after short prefixes.
    """
    if common is None or casts_pool(common, layout):
        return ()
    own = zip(PHASES, (prefill, decode), strict=True)
    return tuple(phase for phase, named in own if named is None and casts_pool(common, layout, phase))


def check_draft(
    layout: MLAKVCacheLayout, arrangement: KVArrangement, backend: str | None, device: str = "cuda"
) -> None:
    """Refuse a draft's explicit backend unless it can read the draft's pool in all phases: it serves all."""
    for phase in PHASES:
        flag = "--speculative-draft-attention-backend"
        _check_reader(flag, backend, layout, arrangement, phase, device, PHASES[0])


def _check_reader(
    flag: str,
    backend: str | None,
    layout: MLAKVCacheLayout,
    arrangement: KVArrangement,
    phase: str | None,
    device: str,
    proposed: str | None = None,
) -> None:
    """Refuse a backend that cannot read the rows in `phase`, or in any phase if that is None.

    The error names backends that read them in phase `proposed`.
    """
    if backend is None or can_read(backend, layout, arrangement, phase):
        return
    able = use((KVPOOL_BACKEND, *suggestions(layout, device, arrangement, proposed)))
    if casts_pool(backend, layout, phase):
        raise Refusal(
            f"{flag} {backend} would cast the whole pool of a layer in every call of {phase or 'each phase'} "
            f"with {LAYOUT.flag} {layout}, however few rows the batch refers to; leave it out, or {able}"
        )
    if can_read(backend, layout, phase=phase):
        raise Refusal(
            f"{flag} {backend} cannot read rows of {ARRANGEMENT.flag} {arrangement}: "
            f"{obstacle(arrangement)}; leave out one of the two, or {able}"
        )
    raise Refusal(f"{flag} {backend} cannot read rows of {LAYOUT.flag} {layout}; leave it out, or {able}")


def check_backends(layout: MLAKVCacheLayout, arrangement: KVArrangement, view: Any) -> None:
    """Refuse backends that cannot read the rows, and features that our own backend does not support."""
    in_use = backends_in_use(view)
    for phase, backend in zip(PHASES, in_use, strict=True):
        _check_reader(
            f"the {phase} attention backend", backend, layout, arrangement, phase, view.device, phase
        )
    if env.flag(env.PREFILL_READS_ROWS) and in_use[0] != KVPOOL_BACKEND:
        raise Refusal(
            f"{env.PREFILL_READS_ROWS}=1 does nothing for the prefill attention backend {in_use[0]}; leave "
            f"it out, or use --prefill-attention-backend {KVPOOL_BACKEND}"
        )
    dcp_rules.check_backends(layout, in_use, view)
    if KVPOOL_BACKEND in in_use:
        if view.enable_deterministic_inference and in_use[0] != in_use[1]:
            raise Refusal(
                f"--enable-deterministic-inference does not work with attention backends {in_use[0]} for "
                f"prefill and {in_use[1]} for decode, whose results differ; use --attention-backend "
                f"{KVPOOL_BACKEND} alone"
            )
        device = device_name(view)
        if device not in KVPOOL_DEVICES:
            raise Refusal(
                f"attention backend {KVPOOL_BACKEND} runs on NVIDIA GPUs and on CPUs only, and the device is "
                f"{device}; leave out {LAYOUT.flag}"
            )
        _check_features(BACKEND_FEATURES, view, layout, arrangement)
    _check_speculation(in_use, view, layout, arrangement)
    if view.speculative_algorithm is None:
        return
    draft = view.speculative_draft_attention_backend
    if not has_own_draft(view):
        # The draft is a layer of the same checkpoint, with a pool of the same rows. The pool of a separate
        # draft model is checked when it is built.
        check_draft(layout, arrangement, draft, view.device)


def check_model(model_config: Any, view: Any) -> None:
    """Refuse GPUs and models that our backend does not support on CUDA."""
    if KVPOOL_BACKEND not in backends_in_use(view) or view.device == "cpu":
        return
    remedy = f"serve it without {LAYOUT.flag}, or use bf16 with an --attention-backend of SGLang"
    check_gpu(f"attention backend {KVPOOL_BACKEND}", remedy)
    rank, dtype = model_config.kv_lora_rank, str(model_config.dtype).removeprefix("torch.")
    if rank > MAX_LATENT_RANK:
        raise Refusal(
            f"the model has kv_lora_rank={rank}, and attention backend {KVPOOL_BACKEND} computes up to "
            f"{MAX_LATENT_RANK} on CUDA; {remedy}"
        )
    if dtype not in ("bfloat16", "float16"):
        raise Refusal(
            f"--dtype {dtype} does not work with attention backend {KVPOOL_BACKEND} on CUDA, whose kernels "
            "multiply 16-bit numbers; use --dtype bfloat16 or float16"
        )


def _check_features(
    features: tuple[Feature, ...], view: Any, layout: MLAKVCacheLayout, arrangement: KVArrangement
) -> None:
    remedy = f"leave it out{_or_rows_of_sglang(layout, arrangement, view)}"
    check_features(features, view, f"attention backend {KVPOOL_BACKEND}", remedy)


def _or_rows_of_sglang(layout: MLAKVCacheLayout, arrangement: KVArrangement, view: Any) -> str:
    """The end of a refusal's last clause: the layout that SGLang's own backend reads, if there is one."""
    plain = MLAKVCacheLayout.BF16
    if layout is plain or is_chosen(plain, arrangement, view.device):
        return ""
    return f", or use {LAYOUT.flag} {plain} and leave out --attention-backend, and SGLang's backend reads it"


def _check_speculation(
    in_use: tuple[str | None, str | None], view: Any, layout: MLAKVCacheLayout, arrangement: KVArrangement
) -> None:
    """Refuse speculative decoding that our backend does not verify, or does not draft for."""
    algorithm, draft = view.speculative_algorithm, view.speculative_draft_attention_backend
    if algorithm is None:
        return
    ours = [name == KVPOOL_BACKEND for name in in_use]
    if not any(ours):
        if draft == KVPOOL_BACKEND:
            raise Refusal(
                f"--speculative-draft-attention-backend {draft} is not used beside the attention backend "
                f"{in_use[1]} of the target; leave it out, or use --attention-backend {KVPOOL_BACKEND} alone"
            )
        return
    flag = f"--speculative-algorithm {algorithm}"
    if view.device == "cpu":
        raise Refusal(
            f"{flag} does not work with attention backend {KVPOOL_BACKEND} on a CPU, where it computes "
            "neither the steps of a draft nor their verification; leave it out, or serve on a GPU"
        )
    name = {"NEXTN": "EAGLE"}.get(algorithm.upper(), algorithm.upper())  # as SGLang resolves it later
    if name not in (*SPECULATIVE_ALGORITHMS, _DSPARK):
        reason = UNSHOWN_ALGORITHMS.get(name, "it is not known which tokens it attends")
        raise Refusal(
            f"{flag} does not work with attention backend {KVPOOL_BACKEND}: {reason}; leave it out, or "
            f"{use((*SPECULATIVE_ALGORITHMS, 'NEXTN'))}{_or_rows_of_sglang(layout, arrangement, view)}"
        )
    if not all(ours):
        raise Refusal(
            f"{flag} needs the same attention backend for prefill, decode and draft, but prefill uses "
            f"{in_use[0]} and decode uses {in_use[1]}; use --attention-backend {KVPOOL_BACKEND} alone"
        )
    if name == _DSPARK:
        _check_dspark(flag, view)
    topk = view.speculative_eagle_topk
    if topk not in (None, 1):
        raise Refusal(
            f"--speculative-eagle-topk {topk} does not work with attention backend {KVPOOL_BACKEND}: it "
            "verifies chains, and trees need a mask per query in its kernels; use --speculative-eagle-topk 1"
            f"{_or_rows_of_sglang(layout, arrangement, view)}"
        )
    _check_features(DRAFT_FEATURES, view, layout, arrangement)


def _check_dspark(flag: str, view: Any) -> None:
    from sglang.srt.speculative.ragged_verify import RaggedVerifyMode, read_ragged_verify_mode

    mode = read_ragged_verify_mode()
    if mode is not RaggedVerifyMode.STATIC:
        raise Refusal(
            f"SGLANG_RAGGED_VERIFY_MODE={mode.value} does not work with attention backend {KVPOOL_BACKEND}, "
            "which verifies as many drafts for each request; leave it out, or use static"
        )
    if view.enable_two_batch_overlap:
        raise Refusal(
            f"{flag} does not work with --enable-two-batch-overlap: SGLang does not split its verification; "
            "leave out one of them"
        )
    if has_host_tier(view):
        raise Refusal(
            f"{flag} does not work with a host tier of {LAYOUT.flag}: its drafts there have not been tested; "
            "leave out --enable-hierarchical-cache"
        )
