"""Loaded by SGLang in the scheduler process; prints the pool's class at the first forward."""

from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

from sgl_kvpool.demo.models.absorbed import EntryClass

_MODEL = EntryClass[0]
_forward = _MODEL.forward
_said: list[str] = []


def forward(self, *args, **kwargs):
    if not _said:
        pool = type(get_token_to_kv_pool())
        _said.append(f"served from {pool.__module__}.{pool.__qualname__}")
        print(_said[0], flush=True)
    return _forward(self, *args, **kwargs)


_MODEL.forward = forward
