"""kvpool_mla over token-major and page-major pools: other layers' bytes are poison, nothing is copied.

A4, B2 and B5 are items of the vLLM checklist of tests/connectors.
"""

import itertools

import codec_oracle as oracle
import pytest
import torch
from cases import crossed
from test_backend import Case, assert_attends
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.usefixtures("published")

PLACED = list(itertools.product(["token_major", "page_major"], [1, 8]))
CASES = [(layout, *placed) for layout, placed in crossed(oracle.LAYOUTS, PLACED)]


@pytest.mark.parametrize(("layout", "arrangement", "page_size"), CASES)
@pytest.mark.parametrize("reads_rows", [False, True])
def test_a4_b5_scattered_rows_among_poison(layout, reads_rows, arrangement, page_size, monkeypatch):
    """A4, B5: slots are a random permutation; all other bytes are 0xFF, NaN where an encoding has one.

    The output is finite, equal to the oracle's, and bit for bit that of a layer-major pool.
    """
    shapes = {"EXTEND": ([9, 40, 5, 33], [0, 30, 4, 0]), "DECODE": ([1, 40, 7, 65], [0, 39, 6, 64])}
    for mode, lengths in shapes.items():
        case = Case(
            layout, *lengths, monkeypatch, reads_rows=reads_rows, arrangement=arrangement, page_size=page_size
        )
        found = case.run(mode)
        assert torch.isfinite(found).all()
        fresh = mode == "EXTEND" and not reads_rows
        assert_attends(found, case.wanted(fresh_as_computed=fresh))
        packed = Case(layout, *lengths, monkeypatch, reads_rows=reads_rows)
        assert torch.equal(found, packed.run(mode))


def test_slots_that_sglang_fills_in_anew_between_two_steps(monkeypatch):
    """All steps use one `out_cache_loc` tensor, as under a CUDA graph; every step computes its rows anew."""
    case = Case("bf16", [5, 9], [4, 8], monkeypatch, arrangement="page_major", page_size=8)
    batch = case.batch("DECODE")
    nope = torch.cat([keys[-1:, :, :128] for keys in case.keys])
    found = {}
    for step, slots in enumerate(([3, 50], [120, 77])):
        batch.out_cache_loc.copy_(torch.tensor(slots))
        for request, slot in zip(case.rows, slots, strict=True):
            length = case.lengths[case.rows.index(request)]
            case.runner.req_to_token_pool.req_to_token[request, length - 1] = slot
        case.backend.init_forward_metadata(batch)
        keys = torch.cat([k[-1:] for k in case.keys])
        q = torch.zeros(2, 3 * 192, dtype=torch.bfloat16)
        case.backend.forward(q, keys, keys[..., :128], case.layer, batch)
        found[step] = case.pool.get_mla_kv_buffer(case.layer, torch.tensor(slots))[0]
    assert torch.equal(found[0], nope)
    assert torch.equal(found[1], nope)


class LargestAllocation(TorchDispatchMode):
    """Bytes of the largest new storage that any torch operation makes while this is active."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        given = {a.untyped_storage().data_ptr() for a in _tensors((args, kwargs or {}))}
        for tensor in _tensors(found):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given:
                self.bytes = max(self.bytes, storage.nbytes())
        return found


def _tensors(tree):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize(("layout", "arrangement", "page_size"), CASES)
@pytest.mark.parametrize("mode", ["EXTEND", "DECODE"])
def test_b2_no_forward_allocates_as_much_as_a_cache(layout, mode, arrangement, page_size, monkeypatch):
    """B2: the smallest part of the cache that a backend could copy is one layer's rows."""
    monkeypatch.setattr("test_backend.SLOTS", 16000)
    case = Case(layout, [5, 9], [4, 8], monkeypatch, arrangement=arrangement, page_size=page_size)
    layer_bytes = case.pool.get_kv_size_bytes() // case.pool.layer_num
    with LargestAllocation() as largest:
        case.run(mode)
    assert 0 < largest.bytes < layer_bytes / 8
    with LargestAllocation() as control:  # a copy of one layer is detected
        case.pool.get_row_buffer(case.layer.layer_id).contiguous().clone()
    assert control.bytes >= layer_bytes
