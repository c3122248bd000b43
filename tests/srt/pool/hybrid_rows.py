"""Helpers for rows of hybrid pools: fill, guard and write rows, expected bytes."""

import codec_oracle as oracle
import numpy as np
import pytest
import torch
from dsa_pools import layer
from hybrid_pools import (
    ARRANGEMENTS,
    MLA_LAYERS,
    PAGE,
    ROW_BYTES,
    SIZE,
    as_bytes,
    hybrid_pool,
    rows,
    state_tensors,
)

PACKED = oracle.PACKED
GUARD = 0xEE
everywhere = pytest.mark.parametrize("arrangement", ARRANGEMENTS)
#: Page size -> size of the pool, and slots: the last one, and for 61 and 64 both sides of a page boundary.
PAGES = {
    1: (15, [15, 3, 6, 1]),
    2: (14, [15, 3, 6, 1]),
    PAGE: (SIZE, [15, 3, 6, 1]),
    61: (122, [182, 61, 60, 1]),
    64: (128, [191, 64, 63, 1]),
}
pages = pytest.mark.parametrize("page_size", PAGES)


def paged(layout, arrangement, page_size):
    """A pool with pages of `page_size` tokens, and some of its slots."""
    size, slots = PAGES[page_size]
    return hybrid_pool(layout, arrangement, page_size=page_size, size=size), torch.tensor(slots)


def guard(pool):
    for tensor in pool.full_kv_pool.kv_buffer:
        tensor.view(torch.uint8).fill_(GUARD)
    for tensor in state_tensors(pool).values():
        tensor.view(torch.uint8).fill_(GUARD)


def fill(pool, seed=0):
    """Different bytes in every row; returns copies by layer."""
    generator = np.random.default_rng(seed)
    for layer_id in MLA_LAYERS:
        found = rows(pool, layer_id)
        found[np.arange(len(found))] = generator.integers(0, 256, found.shape, dtype=np.uint8)
    return {layer_id: np.array(rows(pool, layer_id)) for layer_id in MLA_LAYERS}


def expected_rows(layout, nope, rope, rope_dim=64, k_scale=1.0):
    row_bytes = ROW_BYTES[layout][rope_dim == 0]
    parts = nope.reshape(len(nope), -1), rope.reshape(len(nope), -1) if rope_dim else None
    return oracle.encode(*parts, layout, 512, rope_dim, row_bytes, k_scale)


def states_are_guarded(pool):
    return all((as_bytes(tensor) == GUARD).all() for tensor in state_tensors(pool).values())


def written_by(method, pool, layer_id, loc, nope, rope):
    if method == "set_kv_buffer":
        combined = torch.cat([nope, rope], -1)
        pool.set_kv_buffer(layer(layer_id), loc, combined, combined[..., :512])
    else:
        pool.set_mla_kv_buffer(layer(layer_id), loc, nope, rope if rope.shape[-1] else None)


def locations(kind, pool, slots):
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    from sgl_kvpool.srt.pool.row_pool import RowWriteLoc

    if kind == "tensor":
        return slots
    return KVWriteLoc(slots) if kind == "slots" else RowWriteLoc(pool.slot_to_row(slots))
