"""Which attention backends can read which layout. A table; nothing is probed.

A stock backend not listed for a layout is refused at start, by name. Sources are SGLang 0.5.23's files
under `sglang/srt/layers/attention`; "ran" means that tests/engine serves it on a CPU.
"""

from __future__ import annotations

from sgl_kvpool.layout import MLAKVCacheLayout

__all__ = ["KVPOOL_BACKEND", "KVPOOL_DEVICES", "STOCK_READERS", "can_read", "readers", "suggestions"]

#: Name of our own backend; it reads every layout.
KVPOOL_BACKEND = "kvpool_mla"

#: Values of --device on which it runs, in this release.
KVPOOL_DEVICES = ("cpu",)

_L = MLAKVCacheLayout

#: Stock backends that read a pool's rows as they are stored.
STOCK_READERS: dict[MLAKVCacheLayout, frozenset[str]] = {
    # All of SGLang's MLA backends read 576 bf16 values.
    _L.BF16: frozenset(
        {
            "torch_native",  # ran
            "triton",  # triton_backend.py, get_key_buffer / get_value_buffer
            "flashinfer",  # flashinfer_mla_backend.py
            "fa3",  # flashattention_backend.py
            "fa4",
            "flashmla",  # flashmla_backend.py
            "trtllm_mla",
            "cutedsl_mla",
            "intel_amx",
        }
    ),
    # These read the e4m3 view. None multiplies by k_scale in prefill and in decode (see
    # docs/compatibility.md), so the pool builder refuses them for a checkpoint with k_scale != 1.
    _L.FP8_NOPE_FP8_ROPE: frozenset(
        {
            "torch_native",  # ran; casts the rows of a request to q's dtype
            "triton",  # triton_backend.py, k_descale
            "flashinfer",  # flashinfer_mla_backend.py:761, casts the whole pool in every call
            "fa3",  # flashattention_backend.py:1944, casts the whole pool in every call
            "flashmla",  # flashmla_backend.py:454, reads e4m3 in decode; prefill is flashinfer's
            "trtllm_mla",
            "cutedsl_mla",
        }
    ),
    _L.FP8_NOPE_WITH_BLOCK_SCALE_BF16_ROPE: frozenset(),
    _L.FP4: frozenset(),
}


def readers(layout: MLAKVCacheLayout) -> tuple[str, ...]:
    """Names of all backends that read a layout, ours first."""
    return (KVPOOL_BACKEND, *sorted(STOCK_READERS[layout]))


#: Stock backends that run on a CPU; the others need CUDA.
_ON_CPU = frozenset({"torch_native", "intel_amx"})
#: Stock backends of no use to MLA on Hopper. SGLang refuses the first two off Blackwell
#: (arg_groups/overrides.py:1210 and :1244); fa4's absorbed MLA is written for SM100 and SM110 only
#: (arg_groups/attention_hook.py:648, where SGLang itself refuses it for deterministic inference alone).
_BLACKWELL_ONLY = frozenset({"trtllm_mla", "cutedsl_mla", "fa4"})


def suggestions(layout: MLAKVCacheLayout, device: str) -> tuple[str, ...]:
    """Stock backends to propose for a layout on a device: "cpu", or "cuda" for a Hopper GPU.

    What a user names is checked by `can_read`; this only keeps proposals to what can run there.
    """
    stock = STOCK_READERS[layout]
    fitting = stock & _ON_CPU if device == "cpu" else stock - _ON_CPU - _BLACKWELL_ONLY
    return tuple(sorted(fitting))


def can_read(backend: str, layout: MLAKVCacheLayout) -> bool:
    """Whether the backend of this name reads rows of this layout."""
    return backend == KVPOOL_BACKEND or backend in STOCK_READERS[layout]
