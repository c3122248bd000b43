"""Deliberate breakages that the soak must report; `scripts.soak --break NAME`."""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any


def _wrong_tokens(load: Callable) -> Callable:
    """Load the pages of a prefix in the wrong order."""

    def damaged(self: Any, device_pool: Any, host_indices: Any, *a, **k):
        load(self, device_pool, host_indices.view(-1, self.page_size).flip(0).reshape(-1), *a, **k)

    return damaged


def _leaked_host_page(free: Callable) -> Callable:
    """Lose a page of the host tier when pages are freed for the third time."""
    frees = count(1)

    def leaky(self: Any, indices: Any):
        if next(frees) != 3:
            return free(self, indices)
        free(self, indices[self.page_size :])
        return len(indices)

    return leaky


#: By name: the method of the host tier, and what replaces it.
BREAKAGES: dict[str, tuple[str, Callable[[Callable], Callable]]] = {
    "load-order": ("load_to_device_per_layer", _wrong_tokens),
    "host-leak": ("free", _leaked_host_page),
}


def apply(names: Sequence[str]) -> None:
    """Apply breakages by name, ignoring ""; KeyError for an unknown name."""
    from sgl_kvpool.srt.host.rows import HierarchicalMLAHostPool as Tier

    for method, damaged in (BREAKAGES[name] for name in names if name):
        setattr(Tier, method, damaged(getattr(Tier, method)))
