"""Loaded by SGLang in the scheduler process, before the pool is built."""

from sgl_kvpool.attention import compiled
from sgl_kvpool.demo.models.byte_mla import EntryClass  # noqa: F401

_attend_rows = compiled.attend_rows


def _damaged(out, lse, q, *arguments):
    """As if every second latent value of the rows had the other sign."""
    q = q.clone()
    q[..., 1::2].neg_()
    _attend_rows(out, lse, q, *arguments)
    out[..., 1::2].neg_()


compiled.attend_rows = _damaged
