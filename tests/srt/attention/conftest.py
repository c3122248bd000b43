"""SGLang's DeepSeek models as on CUDA, with our backend's name."""

import pytest


@pytest.fixture
def named(monkeypatch):
    """Our name in SGLang's lists as in a scheduler, small thresholds, and multi-head prefill."""
    from deepseek_layer import BACKEND
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mha

    from sgl_kvpool.sglang_plugin.hooks import attention

    # SGLang's defaults are 8192 prefix tokens and 131072 tokens per chunk.
    monkeypatch.setenv("SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD", "10")
    monkeypatch.setenv("SGLANG_MAX_KV_CHUNK_CAPACITY", "25")
    monkeypatch.setattr(forward_mha, "_is_cuda", True)
    registry = handler.AttentionBackendRegistry
    monkeypatch.setattr(registry, "_handlers", dict(registry._handlers))
    lists = attention.name_lists()
    before = [list(names) for names in lists]
    attention.register_names()
    attention.register_names()
    yield
    for names, old in zip(lists, before, strict=True):
        assert names.count(BACKEND) == 1
        names[:] = old
