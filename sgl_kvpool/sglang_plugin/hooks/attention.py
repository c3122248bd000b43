"""`kvpool_mla` in SGLang's registry, in the lists that SGLang keeps by backend name, and for draft models.

SGLang's models do not ask a backend what it can do: they look for its name. A name that is in no list is
treated like `triton`, which concatenates q and k for every layer and gives up chunked prefixes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sgl_kvpool import env
from sgl_kvpool.attention.readers import KVPOOL_BACKEND
from sgl_kvpool.refusal import Refusal
from sgl_kvpool.sglang_plugin import hook_points

__all__ = ["create_backend", "install", "name_lists", "register_names"]

#: Name in SGLang whose dispatch between absorbed and multi-head attention is ours too.
_LIKE = "flashinfer"


def install() -> None:
    """Register the backend in a scheduler process that was asked for a layout; safe to call again."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend(KVPOOL_BACKEND)(create_backend)
    register_names()
    hook_points.wrap_all(HOOKS)


def name_lists() -> tuple[list[str], ...]:
    """SGLang's lists of backend names that ours is added to, in place: others refer to the same lists."""
    from sglang.srt.arg_groups.choices import CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS
    from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS

    return CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS, FORWARD_ABSORB_CORE_ATTENTION_BACKENDS


def register_names() -> None:
    """Name our backend where DeepSeek's attention, and what switches chunked prefixes off, look for names."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry

    reads_rows = env.flag(env.PREFILL_READS_ROWS)
    AttentionBackendRegistry.register(KVPOOL_BACKEND, _absorbed if reads_rows else _forward_method)
    for names in name_lists():
        if KVPOOL_BACKEND not in names:
            names.append(KVPOOL_BACKEND)


def _forward_method(attention: Any, forward_batch: Any):
    """How DeepSeek's attention computes a batch: absorbed, or multi-head in one or several pieces."""
    from sglang.srt.models.deepseek_common import attention_backend_handler

    return attention_backend_handler._handle_attention_backend(attention, forward_batch, _LIKE)


def _absorbed(attention: Any, forward_batch: Any):
    """The absorbed form for every batch: the multi-head one attends new keys as they were before rounding."""
    from sglang.srt.models.deepseek_common import attention_backend_handler

    return attention_backend_handler._dispatch_mla_subtype(attention, forward_batch)


# -------------------------------------------------------------------- factories


def create_backend(runner: Any):
    """Our backend for a ModelRunner, target or draft.

    Raises
    ------
    ValueError
        A draft model whose attention is no MLA: it has a pool of its own, which our backend does not read.
    """
    _require_mla(runner)
    if runner.device == "cpu":
        from sgl_kvpool.srt.attention.cpu import KVPoolMLABackend

        return KVPoolMLABackend(runner)
    from sgl_kvpool.srt.attention.cuda import KVPoolMLACudaBackend

    return KVPoolMLACudaBackend(runner)


def _wrap_for_model(original, runner, full_attn_backend):
    """SGLang's wrapper for hybrid models, whose linear layers are told nothing of how rows are stored.

    Lightning attention casts its float32 queries to the dtype of the KV cache unless that is `auto`, and
    writes its result in theirs. A layout names a dtype of the rows, which linear layers do not have.
    """
    backend = original(runner, full_attn_backend)
    linear: Any = getattr(backend, "linear_attn_backend", None)
    if hasattr(linear, "kv_cache_dtype_str"):
        from sgl_kvpool.srt.pool import RowPool

        if isinstance(runner.token_to_kv_pool, RowPool):
            linear.kv_cache_dtype_str = "auto"
    return backend


def _require_mla(runner: Any) -> None:
    if runner.is_draft_worker and not runner.use_mla_backend:
        name = (getattr(runner.model_config.hf_config, "architectures", None) or ["the draft model"])[0]
        raise Refusal(
            f"{name}, the draft model, does not use multi-head latent attention (MLA), and attention backend "
            f"{KVPOOL_BACKEND} reads MLA pools; name one for the draft with "
            "--speculative-draft-attention-backend (flashinfer, fa3 or triton)"
        )


def _create_draft(original, self, backend_name, backend_map, error_template, stamps_children=False):
    """Add our backends to the map that SGLang is about to look the name up in.

    Only the backends of draft decoding are containers of one backend per step, whose children SGLang names
    too: that tells the two maps apart.
    """
    runner = self.draft_model_runner

    def steps():
        _require_mla(runner)
        from sgl_kvpool.srt.attention.draft import KVPoolMultiStepDraftBackend

        return KVPOOL_BACKEND, KVPoolMultiStepDraftBackend(runner, self.topk, self.speculative_num_steps)

    def extend():
        _require_mla(runner)
        from sgl_kvpool.srt.attention.cuda import KVPoolMLACudaBackend

        return KVPOOL_BACKEND, KVPoolMLACudaBackend(runner, skip_prefill=False)

    backend_map = {**backend_map, KVPOOL_BACKEND: steps if stamps_children else extend}
    return original(self, backend_name, backend_map, error_template, stamps_children=stamps_children)


#: Function of SGLang -> hook around it.
HOOKS: Mapping[str, Callable] = {
    "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend": _create_draft,
    "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper": _wrap_for_model,
}
