"""`kvpool_mla` in SGLang's registry, and in the lists that SGLang keeps by backend name.

SGLang's models select code by a backend's name. SGLang treats a name that is missing in these lists like
`triton`: it concatenates q and k for every layer and does not use chunked prefixes.
"""

from __future__ import annotations

from typing import Any

from sgl_kvpool import env
from sgl_kvpool.attention.readers import KVPOOL_BACKEND
from sgl_kvpool.sglang_plugin.hooks.drafts import require_mla

__all__ = ["create_backend", "install", "name_lists", "register_names"]

#: SGLang's backend whose dispatch between absorbed and multi-head attention we use too.
_LIKE = "flashinfer"


def install() -> None:
    """Register the backend; safe to call again."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend(KVPOOL_BACKEND)(create_backend)
    register_names()


def name_lists() -> tuple[list[str], ...]:
    """SGLang's lists of backend names; our name is added in place, since modules share the list objects."""
    from sglang.srt.arg_groups.choices import CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS
    from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS

    return CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS, FORWARD_ABSORB_CORE_ATTENTION_BACKENDS


def register_names() -> None:
    """Add our backend's name to DeepSeek's attention and to the lists of backend names."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry

    reads_rows = env.flag(env.PREFILL_READS_ROWS)
    AttentionBackendRegistry.register(KVPOOL_BACKEND, _absorbed if reads_rows else _forward_method)
    for names in name_lists():
        if KVPOOL_BACKEND not in names:
            names.append(KVPOOL_BACKEND)


def _forward_method(attention: Any, forward_batch: Any):
    """How DeepSeek's attention computes a batch: absorbed, or in the MHA form, in one or several chunks."""
    from sglang.srt.models.deepseek_common import attention_backend_handler

    return attention_backend_handler._handle_attention_backend(attention, forward_batch, _LIKE)


def _absorbed(attention: Any, forward_batch: Any):
    """The absorbed form for every batch; the MHA form would attend new keys before rounding."""
    from sglang.srt.models.deepseek_common import attention_backend_handler

    return attention_backend_handler._dispatch_mla_subtype(attention, forward_batch)


# -------------------------------------------------------------------- factories


def create_backend(runner: Any):
    """Our backend for a ModelRunner, target or draft.

    Raises
    ------
    ValueError
        A draft model does not use MLA, and our backend cannot read its pool.
    """
    require_mla(runner)
    if runner.device == "cpu":
        from sgl_kvpool.srt.attention.cpu import KVPoolMLABackend

        return KVPoolMLABackend(runner)
    from sgl_kvpool.srt.attention.cuda import KVPoolMLACudaBackend

    return KVPoolMLACudaBackend(runner)
