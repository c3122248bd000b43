"""B2 of the vLLM checklist of tests/connectors: kvpool_mla copies nothing of any arrangement of a pool."""

import itertools

import codec_oracle as oracle
import pytest
import torch
from cases import crossed
from pools import ARRANGEMENTS
from test_backend import Case
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.usefixtures("published")

PLACED = list(itertools.product(ARRANGEMENTS, [1, 8]))
CASES = [(layout, *placed) for layout, placed in crossed(oracle.LAYOUTS, PLACED)]


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
    """The smallest part of the cache that a backend could copy is one layer's rows."""
    monkeypatch.setattr("test_backend.SLOTS", 16000)
    case = Case(layout, [5, 9], [4, 8], monkeypatch, arrangement=arrangement, page_size=page_size)
    layer_bytes = case.pool.get_kv_size_bytes() // case.pool.layer_num
    with LargestAllocation() as largest:
        case.run(mode)
    assert 0 < largest.bytes < layer_bytes / 8
    with LargestAllocation() as control:  # a copy of one layer is detected
        case.pool.get_row_buffer(case.layer.layer_id).contiguous().clone()
    assert control.bytes >= layer_bytes
