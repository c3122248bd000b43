"""Loaded by SGLang in the scheduler process, before the pool is built."""

from sgl_kvpool.attention import cpu
from sgl_kvpool.demo.models.absorbed import EntryClass  # noqa: F401

_attend_lists = cpu.attend_lists


def _damaged(out, lse, q, *arguments, **options):
    """As if every second latent value of the rows had the other sign."""
    q = q.clone()
    q[..., 1::2].neg_()
    _attend_lists(out, lse, q, *arguments, **options)
    out[..., 1::2].neg_()


cpu.attend_lists = _damaged
