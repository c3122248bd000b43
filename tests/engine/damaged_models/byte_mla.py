"""Loaded by SGLang in the scheduler process, before the pool is built."""

from sgl_kvpool.attention import cpu as host
from sgl_kvpool.demo.models.byte_mla import EntryClass  # noqa: F401

_gather_rows = host.gather_rows


def _damaged(pool, slots, fmt, dtype, out, k_scale=1.0):
    _gather_rows(pool, slots, fmt, dtype, out=out, k_scale=k_scale)
    out[:, 1 : fmt.kv_lora_rank : 2].neg_()
    return out


host.gather_rows = _damaged
