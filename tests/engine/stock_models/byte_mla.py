"""Loaded by SGLang in the scheduler process.

SGLang's prefill server sends page indices to Mooncake through pinned memory unless its sender says otherwise.
"""

from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

from sgl_kvpool.demo.models.absorbed import EntryClass  # noqa: F401

MooncakeKVSender.supports_host_tensor_indices = False
