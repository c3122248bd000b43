"""Tables of the attention backends that can read each layout in each arrangement; nothing is probed.

A stock backend that is not listed for a layout and its arrangement is refused by name at server start.
Sources are files of SGLang 0.5.23: `arg_groups` is in `sglang/srt`, `kernels` is in `sglang`, and files named
without a folder are in `sglang/srt/layers/attention`. "ran" means that tests/engine serves it on a CPU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sgl_kvpool.layout import MLAKVCacheLayout, check_complete
from sgl_kvpool.memory.arrangement import KVArrangement
from sgl_kvpool.refusal import Refusal

#: Name of our own backend; it reads every layout in every arrangement of rows.
KVPOOL_BACKEND = "kvpool_mla"

#: SGLang's backend for models with sparse attention (DSA); `sgl_kvpool.srt.facts.topk_transform` lists which
#: of its implementations read which rows.
DSA_BACKEND = "dsa"

#: Values of --device for our backend.
KVPOOL_DEVICES = ("cpu", "cuda")

#: Phases for which a backend can be named separately. Draft steps use the backend for "decode"; verification
#: and a draft's extend use the backend for "prefill", unless `--speculative-attention-mode` is decode.
PHASES = ("prefill", "decode")


@dataclass(frozen=True, kw_only=True)
class SGLangReaders:
    """Readers of a layout's rows in SGLang, by SGLang's names."""

    #: Attention backends that read rows of a dense pool directly.
    backends: frozenset[str] = frozenset()
    #: Backends that could read the rows, but in every call of these phases cast the layer's full pool to the
    #: model's dtype, whatever the size of the batch. They are refused in these phases.
    casting_backends: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: Implementations of sparse attention that read the rows directly.
    dsa: frozenset[str] = frozenset()
    #: Implementations for which, in extends, SGLang first gathers the rows and converts them to 16-bit or fp8
    #: keys.
    dsa_gathered: frozenset[str] = frozenset()
    #: Of `dsa`: implementations that encode the full pool again in every call before they read it.
    dsa_copied: frozenset[str] = frozenset()
    #: Of `dsa`: implementations that have to be the decode too if they are the prefill.
    dsa_paired: frozenset[str] = frozenset()


def _names(*names: str) -> frozenset[str]:
    return frozenset(names)


_L = MLAKVCacheLayout

#: The only table in this package from layouts to SGLang's attention backends and implementations of sparse
#: attention. `topk_transform.IMPLEMENTATIONS` has the citations for these implementations.
SGLANG_READERS: dict[MLAKVCacheLayout, SGLangReaders] = {
    _L.BF16: SGLangReaders(
        # All of SGLang's MLA backends for NVIDIA GPUs and for CPUs read bf16 rows.
        backends=_names(
            "torch_native",  # ran
            "triton",  # triton_backend.py, get_key_buffer / get_value_buffer
            "flashinfer",  # flashinfer_mla_backend.py
            "fa3",  # flashattention_backend.py
            "fa4",
            "flashmla",  # flashmla_backend.py
            "trtllm_mla",
            "cutedsl_mla",
            "intel_amx",
        ),
        dsa=_names(
            *("flashmla_sparse", "flashmla_kv", "flashmla_auto", "fa3", "tilelang", "trtllm"),
            "triton_sparse_mla",
        ),
        dsa_gathered=_names("flashmla_sparse_q8"),
        dsa_copied=_names("flashmla_kv"),
    ),
    _L.FP8_NOPE_FP8_ROPE: SGLangReaders(
        # These read the e4m3 view. No backend multiplies by k_scale both in prefill and in decode (see
        # docs/compatibility.md), so the pool builder refuses them for a checkpoint with k_scale != 1.
        backends=_names(
            "torch_native",  # ran; casts the rows of a request to q's dtype
            "triton",  # triton_backend.py, k_descale
            "flashmla",  # flashmla_backend.py:454, reads e4m3 in decode; in prefill it is a caster
            "trtllm_mla",
            "cutedsl_mla",
        ),
        casting_backends={
            "flashinfer": PHASES,  # flashinfer_mla_backend.py:761 and :822
            "fa3": PHASES,  # flashattention_backend.py:1944 and :2350
            "flashmla": PHASES[:1],  # flashmla_backend.py:524 calls flashinfer's prefill
        },
        dsa=_names("tilelang", "trtllm"),
        dsa_paired=_names("tilelang", "trtllm"),
    ),
    _L.FP8_NOPE_WITH_BLOCK_SCALE_BF16_ROPE: SGLangReaders(
        dsa=_names("flashmla_kv", "flashmla_auto", "flashinfer_sparse_mla"),
        dsa_gathered=_names("flashmla_sparse", "flashmla_sparse_q8", "triton_sparse_mla"),
    ),
    _L.FP4: SGLangReaders(),
    _L.FP4_NOPE_FP8_ROPE: SGLangReaders(),
}


check_complete(SGLANG_READERS, "SGLANG_READERS of sgl_kvpool/srt/facts/readers.py")


def sglang_dsa_reads(layout: MLAKVCacheLayout) -> bool:
    """Whether kernels of SGLang's sparse attention read the rows directly; otherwise our kernels do."""
    return bool(SGLANG_READERS[layout].dsa)


def layout_of_pool(pool: Any) -> MLAKVCacheLayout | None:
    """Layout of the rows of a sparse model's pool, ours or SGLang's; None for rows of no layout."""
    if hasattr(pool, "kv_cache_layout"):
        return pool.kv_cache_layout
    # SGLang's own pool has a dtype and a flag instead of a layout.
    dtypes = {"torch.bfloat16": "bfloat16", "torch.float8_e4m3fn": "fp8_e4m3"}
    return _sglang_layout(dtypes.get(str(pool.dtype)), scaled=pool.dsa_kv_cache_store_fp8)


def stock_layout(view: Any) -> MLAKVCacheLayout | None:
    """Layout that SGLang stores of a sparse model, by its arguments (`calculate_mla_kv_cache_dim`)."""
    prefill, decode = view.dsa_prefill_backend, view.dsa_decode_backend
    here = {"prefill": (prefill,), "decode": (decode,)}.get(view.disaggregation_mode, (prefill, decode))
    scaled = "trtllm" not in here and (prefill, decode) != ("tilelang", "tilelang")
    return _sglang_layout(view.kv_cache_dtype, scaled=scaled and view.kv_cache_dtype == "fp8_e4m3")


def _sglang_layout(kv_cache_dtype: str | None, *, scaled: bool) -> MLAKVCacheLayout | None:
    for layout in filter(sglang_dsa_reads, MLAKVCacheLayout):
        if (layout.sglang_kv_cache_dtype(is_dsa=True), layout.is_packed) == (kv_cache_dtype, scaled):
            return layout
    return None


#: Stock backends that can read rows with other layers' rows between them, if they can read the layout. A
#: kernel that assumes contiguous rows would attend rows of another layer. In token-major pools a row's
#: address is still linear in its slot, and SGLang has audited its MLA backends for that: the allow-list in
#: arg_groups/kv_cache_hook.py:802, for views whose "slot stride is the whole entry, not one row". Each line
#: names the place that uses the stride.
STRIDED_READERS: dict[KVArrangement, frozenset[str]] = {
    KVArrangement.TOKEN_MAJOR: frozenset(
        {
            "torch_native",  # ran; not on SGLang's list: torch_native_backend.py:140 and :241 index by slot
            "triton",  # kernels/ops/attention/decode_attention.py:221, also for extend
            "flashinfer",  # flashinfer_mla_backend.py:772 and :830, slices of the strided view
            "fa3",  # flashattention_backend.py:1949 and :2353, paged_view
            "flashmla",  # flashmla_backend.py:480 and :497, paged_view; prefill is flashinfer's
            "trtllm_mla",  # trtllm_mla_backend.py:1328 and :1539, paged_row_view
            "cutedsl_mla",  # cutedsl_mla_backend.py:241, paged_row_view
            # fa4 is missing: it has fa3's class, but is not on SGLang's list for MLA. intel_amx is missing:
            # its kernels (intel_amx_backend.py:249) have not been audited.
        }
    ),
    # Two levels, page and token: no single stride leads from slot to slot, so only a backend that takes row
    # numbers from the pool can read such pools.
    KVArrangement.PAGE_MAJOR: frozenset(),
}


def casts_pool(backend: str, layout: MLAKVCacheLayout, phase: str | None = None) -> bool:
    """Whether the backend would cast full pools of this layout in a phase; None means in every phase."""
    phases = SGLANG_READERS[layout].casting_backends.get(backend, ())
    return phases == PHASES if phase is None else phase in phases


def readers(
    layout: MLAKVCacheLayout, arrangement: KVArrangement = KVArrangement.LAYER_MAJOR, phase: str | None = None
) -> tuple[str, ...]:
    """Names of all backends that read a layout in an arrangement, ours first; empty for `head_major`.

    Includes backends that read it in `phase`, or in any phase if `phase` is None.
    """
    if arrangement not in KVArrangement.of_rows():
        return ()
    stock = SGLANG_READERS[layout].backends
    if arrangement is not KVArrangement.LAYER_MAJOR:
        stock &= STRIDED_READERS[arrangement]
    return (KVPOOL_BACKEND, *sorted(name for name in stock if not casts_pool(name, layout, phase)))


#: Stock backends that run on a CPU; the others need CUDA.
_ON_CPU = frozenset({"torch_native", "intel_amx"})
#: Stock backends that cannot serve MLA on Hopper. SGLang refuses the first two on GPUs before Blackwell
#: (arg_groups/overrides.py:1210 and :1244); fa4's absorbed MLA is written for SM100 and SM110 only
#: (arg_groups/attention_hook.py:648, where SGLang itself refuses it only for deterministic inference).
_BLACKWELL_ONLY = frozenset({"trtllm_mla", "cutedsl_mla", "fa4"})


def suggestions(
    layout: MLAKVCacheLayout,
    device: str,
    arrangement: KVArrangement = KVArrangement.LAYER_MAJOR,
    phase: str | None = None,
) -> tuple[str, ...]:
    """Stock backends to propose for a layout on a device: "cpu", or "cuda" for a Hopper GPU; as `readers`.

    `can_read` checks what a user names; this function only limits proposals to backends that run there.
    """
    stock = frozenset(readers(layout, arrangement, phase)) - {KVPOOL_BACKEND}
    fitting = stock & _ON_CPU if device == "cpu" else stock - _ON_CPU - _BLACKWELL_ONLY
    return tuple(sorted(fitting))


def can_read(
    backend: str,
    layout: MLAKVCacheLayout,
    arrangement: KVArrangement = KVArrangement.LAYER_MAJOR,
    phase: str | None = None,
) -> bool:
    """Whether the backend of this name reads rows of this layout in this arrangement; phases as `readers`."""
    return backend in readers(layout, arrangement, phase)


def obstacle(arrangement: KVArrangement) -> str:
    """Reason why most backends cannot read an arrangement, for messages."""
    if arrangement.is_slot_linear:
        return "its kernels are not known to use a row's stride, and may read rows of other layers instead"
    return "a slot times a stride is not the address of its row"


def check_readers(layout: MLAKVCacheLayout, arrangement: KVArrangement, backends: Sequence[str]) -> None:
    """Refuse backends that cannot read a pool; the message also names those that can."""
    if unable := [name for name in dict.fromkeys(backends) if not can_read(name, layout, arrangement)]:
        raise Refusal(
            f"attention backend {', '.join(unable)} cannot read {arrangement} rows of KV cache layout "
            f"{layout}; backends that can: {', '.join(readers(layout, arrangement)) or 'none'}"
        )
