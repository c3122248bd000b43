"""Attention backends of a server whose arguments SGLang has resolved, with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sgl_kvpool.attention.readers import DSA_BACKEND, KVPOOL_BACKEND, PHASES, SGLANG_READERS
from sgl_kvpool.layout import MLAKVCacheLayout

__all__ = ["Attention", "attention_of"]


@dataclass(frozen=True)
class Attention:
    """Names of the prefill and decode backends, and the reason for them."""

    prefill: str
    decode: str
    why: str


def attention_of(layout: MLAKVCacheLayout | None, view: Any, *, is_dsa: bool) -> Attention:
    """Attention backends of a layout.

    Parameters
    ----------
    layout : MLAKVCacheLayout or None
        None for SGLang's own pool.
    view
        A resolving view of the server's arguments.
    is_dsa : bool
        Whether the model has sparse attention.
    """
    if is_dsa:
        return _sparse(layout, view)
    from sgl_kvpool.sglang_plugin.rules.attention import backends_in_use

    prefill, decode = (name or "SGLang's choice at start" for name in backends_in_use(view))
    if layout is None:
        return Attention(prefill, decode, "SGLang's choice")
    if KVPOOL_BACKEND not in (prefill, decode):
        return Attention(prefill, decode, f"SGLang's choice, which reads {layout} rows as they are stored")
    return Attention(prefill, decode, _why_ours(layout))


def _why_ours(layout: MLAKVCacheLayout) -> str:
    known = SGLANG_READERS[layout]
    if not known.backends:
        return (
            f"no other backend reads {layout} rows; {KVPOOL_BACKEND} reads the rows of the batch once, in "
            "their stored size"
        )
    casters = sorted(name for name, phases in known.casters.items() if phases == PHASES)
    if casters:
        return (
            f"{' and '.join(casters)} would cast the whole pool of a layer in every call; {KVPOOL_BACKEND} "
            "reads the rows of the batch once, in their stored size"
        )
    return "as the arguments require"


def _sparse(layout: MLAKVCacheLayout | None, view: Any) -> Attention:
    from sgl_kvpool.sglang_plugin.rules.dsa import table_names

    prefill, decode = view.dsa_prefill_backend, view.dsa_decode_backend
    if layout is None:
        return Attention(f"{DSA_BACKEND}/{prefill}", f"{DSA_BACKEND}/{decode}", "SGLang's choice")
    prefill, decode = table_names(layout, prefill, decode)
    if decode == KVPOOL_BACKEND:
        why = (
            f"decode by {KVPOOL_BACKEND}, because no kernel of SGLang's reads {layout} rows; prefill attends "
            "decoded rows"
        )
    else:
        why = f"SGLang's kernels, which read {layout} rows as they are stored"
    return Attention(f"{DSA_BACKEND}/{prefill}", f"{DSA_BACKEND}/{decode}", why)
