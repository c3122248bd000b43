"""`kvpool_mla` in SGLang's registry, and in the lists that SGLang keeps by backend name.

SGLang's models select code by a backend's name. SGLang treats a name that is missing in these lists like
`triton`: it concatenates q and k for every layer and does not use chunked prefixes.
"""

from typing import Any

from sgl_kvpool import env
from sgl_kvpool.sglang_plugin.registry import installs, uses
from sgl_kvpool.srt.facts.readers import KVPOOL_BACKEND
from sgl_kvpool.srt.pool.drafts import require_mla

#: SGLang's backend whose dispatch between absorbed and multi-head attention we use too.
_LIKE = "flashinfer"

#: Hook groups of the backend.
_GROUPS = ("dense MLA on a CPU", "dense MLA on CUDA")
_REGISTRY = "sglang.srt.layers.attention.attention_registry"
_DEEPSEEK = "sglang.srt.models.deepseek_common"
_HANDLER = f"{_DEEPSEEK}.attention_backend_handler"

uses(f"{_REGISTRY}.register_attention_backend", *_GROUPS, takes=("name",))
uses(f"{_REGISTRY}.ATTENTION_BACKENDS", *_GROUPS, added=(KVPOOL_BACKEND,))
uses(f"{_HANDLER}.AttentionBackendRegistry.register", *_GROUPS, takes=("backend_name", "handler_func"))
uses(f"{_HANDLER}.AttentionBackendRegistry._handlers", *_GROUPS, members=(_LIKE,), added=(KVPOOL_BACKEND,))
uses(f"{_HANDLER}._handle_attention_backend", *_GROUPS, takes=("attn", "forward_batch", "backend_name"))
uses(f"{_HANDLER}._dispatch_mla_subtype", *_GROUPS, takes=("attn", "forward_batch"))
uses(f"{_HANDLER}.MHA_ONE_SHOT_SUPPORTED_BACKENDS", *_GROUPS, members=(_LIKE,))
for _names in (
    f"{_DEEPSEEK}.utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS",
    "sglang.srt.arg_groups.choices.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS",
):
    uses(_names, *_GROUPS, members=(_LIKE,), added=(KVPOOL_BACKEND,))
uses("sglang.srt.mem_cache.memory_pool.KVWriteLoc.for_batch", *_GROUPS, takes=("forward_batch",))


@installs(*_GROUPS)
def _install() -> None:
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
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry

    reads_rows = env.flag(env.PREFILL_READS_ROWS)
    AttentionBackendRegistry.register(KVPOOL_BACKEND, _absorbed if reads_rows else _forward_method)
    for names in name_lists():
        if KVPOOL_BACKEND not in names:
            names.append(KVPOOL_BACKEND)


def let_sglang_scale_queries() -> None:
    """Make SGLang multiply queries by a factor of their position (llama_4_scaling, Mistral-Large-3).

    It does so in the absorbed form alone, and for backends that are not in its list
    (`forward_mla.py:789`), for which it concatenates the parts of q and of k in every layer.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry

    AttentionBackendRegistry.register(KVPOOL_BACKEND, _absorbed)
    _, separate_parts = name_lists()
    if KVPOOL_BACKEND in separate_parts:
        separate_parts.remove(KVPOOL_BACKEND)


def _forward_method(attention: Any, forward_batch: Any):
    """How DeepSeek's attention computes a batch: absorbed, or in the MHA form, in one or several chunks."""
    from sglang.srt.models.deepseek_common import attention_backend_handler

    from sgl_kvpool.srt.attention.decode_verify import is_deterministic

    if is_deterministic():
        return _absorbed(attention, forward_batch)
    return attention_backend_handler._handle_attention_backend(attention, forward_batch, _LIKE)


def _absorbed(attention: Any, forward_batch: Any):
    """The absorbed form for every batch.

    The MHA form would attend new keys before rounding, and queries without the factor of their position.
    """
    from sglang.srt.models.deepseek_common import attention_backend_handler

    return attention_backend_handler._dispatch_mla_subtype(attention, forward_batch)


def backend_class(device: str) -> type:
    if device == "cpu":
        from sgl_kvpool.srt.attention.cpu import KVPoolMLABackend

        return KVPoolMLABackend
    from sgl_kvpool.srt.attention.cuda import KVPoolMLACudaBackend

    return KVPoolMLACudaBackend


def create_backend(runner: Any):
    """Our backend for a ModelRunner, target or draft; Refusal for a draft without MLA."""
    require_mla(runner)
    if getattr(runner.model_config.hf_text_config, "llama_4_scaling", None):
        let_sglang_scale_queries()
    return backend_class(runner.device)(runner)
