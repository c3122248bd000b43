"""Byte views of real pools on a CUDA device: rows lie where the view says, pages move alone. Needs SGLang."""

from types import SimpleNamespace

import codec_oracle as oracle
import numpy as np
import pytest
import torch
from pools import device_pool
from test_cuda_backend_gpu import DEVICE, PLACED_LAYOUTS, RANK, ROPE, published_on_cuda  # noqa: F401

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LAYERS, FIRST, PAGE, PAGES = 3, 5, 4, 7
EMPTY = 0xEE


def bytes_of(caches, layer_id):
    """Bytes of a layer by page, token and byte, as the view describes them."""
    (group,) = caches.groups
    view = caches.view(group, group.layer(layer_id).runs).cpu()
    return view.numpy().view(np.uint8).reshape(PAGES, PAGE, -1)


@pytest.mark.parametrize(("layout", "arrangement"), PLACED_LAYOUTS)
def test_the_view_of_a_pool_has_the_rows_that_were_written(layout, arrangement):
    from sgl_kvpool.connectors.allocation import copy_pages
    from sgl_kvpool.connectors.pools import describe

    pool = device_pool(layout, arrangement, PAGE, PAGES, LAYERS, start_layer=FIRST, device=DEVICE)
    for tensor in pool.kv_buffer:
        tensor.view(torch.uint8).fill_(EMPTY)
    expected = np.full((LAYERS, PAGES, PAGE, oracle.ROW_BYTES[layout]), EMPTY, np.uint8)
    generator = torch.Generator().manual_seed(3)
    for layer in range(LAYERS):
        # Of page 0, which is reserved, only padded tokens write slots.
        slots = torch.randperm((PAGES - 1) * PAGE, generator=generator)[: 11 + layer] + PAGE
        keys = torch.randn(len(slots), 1, RANK + ROPE, generator=generator).bfloat16()
        nope, rope = keys.split([RANK, ROPE], -1)
        written = SimpleNamespace(layer_id=FIRST + layer)
        pool.set_mla_kv_buffer(written, slots.to(DEVICE), nope.to(DEVICE), rope.to(DEVICE))
        rows = oracle.encode(nope[:, 0], rope[:, 0], layout, RANK, ROPE, oracle.ROW_BYTES[layout])
        expected[layer].reshape(PAGES * PAGE, -1)[slots.numpy()] = rows
    caches = describe(pool)
    assert all(tensor.is_cuda for tensor in caches.tensors)
    for layer in range(LAYERS):
        assert np.array_equal(bytes_of(caches, FIRST + layer), expected[layer]), layer
    copy_pages(caches, caches, "kv", torch.tensor([2, 5], device=DEVICE), torch.tensor([4, 1], device=DEVICE))
    expected[:, [4, 1]] = expected[:, [2, 5]]
    for layer in range(LAYERS):
        assert np.array_equal(bytes_of(caches, FIRST + layer), expected[layer]), layer
