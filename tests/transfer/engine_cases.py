"""What the GPU engines have to do, on a GPU and over emulated streams alike; needs no SGLang."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from sgl_kvpool import KVArrangement, MLAKVCacheLayout
from sgl_kvpool.codec import encode_rows
from sgl_kvpool.connectors.allocation import allocate_cross_layer, as_canonical
from sgl_kvpool.connectors.cross_layer import LayerPages
from sgl_kvpool.memory.canonical import CanonicalGroup, CanonicalKVCaches, LayerReference, TensorList
from sgl_kvpool.memory.runs import PageRuns
from sgl_kvpool.transfer.conversion import RowConversion
from sgl_kvpool.transfer.engines import GPU_ENGINES
from sgl_kvpool.transfer.plan import TransferPlan
from sgl_kvpool.transfer.slots import DevicePages, Transfer, packed_view

LAYERS, K_SCALES = 7, (0.5, 1.0, 3.25, 1.0, 0.125, 2.0, 1.5)
#: Device and host layout: every narrower layout that a host tier may have.
CONVERSIONS = [
    (device.value, host.value)
    for device, host in itertools.product(MLAKVCacheLayout, repeat=2)
    if not host.uses_k_scale and host.row_format(512, 64).row_bytes < device.row_format(512, 64).row_bytes
]
assert len(CONVERSIONS) >= 8
ARRANGEMENTS = ["layer_major", "token_major", "page_major"]


def quick(cases, chosen):
    """Cases of a test, the chosen ones marked."""
    chosen = set(chosen)
    return [pytest.param(*case, marks=[pytest.mark.quick] * (case in chosen)) for case in cases]


def device_pool(arrangement, pages, page_size, row_bytes, device, layers=LAYERS, content="rows"):
    """Caches of a pool, and their bytes as `[layers, pages, page_size, row_bytes]`, uint8."""
    size = page_size * row_bytes
    if arrangement == "layer_major":
        memory = torch.full((layers, pages, size), -18, dtype=torch.int8, device=device)
        tensors, references = TensorList(), []
        for layer in range(layers):
            runs = PageRuns(tensor_index=tensors.add(memory[layer]), offset_bytes=0, run_bytes=size)
            references.append(LayerReference(layer_id=layer, part="kv", runs=runs, content=content))
        group = CanonicalGroup(
            name="kv", layers=tuple(references), num_pages=pages, page_size_tokens=page_size
        )
        caches = CanonicalKVCaches(tuple(tensors.tensors), (group,))
        return caches, memory.view(torch.uint8).view(layers, pages, page_size, row_bytes)
    members = [
        LayerPages(name=i, page_bytes=size, backend="b", page_size_tokens=page_size, content=content)
        for i in range(layers)
    ]
    order = KVArrangement(arrangement)
    (buffer,) = allocate_cross_layer([members], pages=pages, arrangement=order, device=device)
    buffer.tensor.fill_(-18)
    flat = buffer.tensor.view(-1).view(torch.uint8)
    if arrangement == "token_major":
        rows = flat.view(pages, page_size, layers, row_bytes).permute(2, 0, 1, 3)
    else:
        rows = flat.view(pages, layers, page_size, row_bytes).permute(1, 0, 2, 3)
    return as_canonical([buffer], ["kv"]), rows


def slots_of(pages, page_size=4, device="cpu"):
    """As SGLang lists them: the slots of each page in their order."""
    pages = torch.tensor(pages, dtype=torch.int64)
    slots = (pages[:, None] * page_size + torch.arange(page_size)).view(-1)
    return DevicePages(slots.to(device), page_size)


#: What is stored and loaded, as (device pages, host pages) and (host pages, device pages).
SCATTERED = ([([5, 0, 8], [1, 11, 4]), ([2, 7], [0, 9])], [([11, 4, 9], [3, 0, 6]), ([1], [8])])
#: Neighbours on both sides, more than three in a row.
ADJACENT = (
    [([2, 3, 4, 5, 6], [1, 2, 3, 4, 5]), ([0, 1], [8, 9])],
    [([1, 2, 3, 4], [3, 4, 5, 6]), ([8, 9], [0, 1])],
)


def hard_values(count, width, generator):
    """bf16 of every size, zeros, subnormals, infinities and NaN: rows of random bits among others."""
    values = torch.randn(count, width, generator=generator)
    values *= torch.exp2(torch.randint(-60, 40, (count, 1), generator=generator).float())
    values = values.bfloat16()
    values[::7] = 0
    bits = torch.randint(-(1 << 15), 1 << 15, values[3::5].shape, generator=generator)
    values[3::5] = bits.to(torch.int16).view(torch.bfloat16)
    return values


def round_trip(
    engine, own, other, arrangement, page_size, *, device, make_tools, finish, make_host=None, pages=9,
    geometry=(512, 64), lists=SCATTERED,
):  # fmt: skip
    """Two stores in flight together, then two loads; every byte of both sides is compared.

    Rows are converted if the layouts of device (`own`) and host (`other`) differ. `make_tools`: tools of one
    direction for pages of so many bytes and a host tensor; `finish` waits until all steps are done;
    `make_host`: host memory of `(pages, page_bytes)`; `geometry`: rank and rope.
    """
    rank = geometry[0]
    formats = [MLAKVCacheLayout(name).row_format(*geometry) for name in (own, other)]
    caches, on_device = device_pool(arrangement, pages, page_size, formats[0].row_bytes, device)
    (group,) = caches.groups
    page_bytes = LAYERS * page_size * formats[1].row_bytes
    shape = (pages + 3, page_bytes)
    memory = make_host(*shape) if make_host else torch.empty(shape, dtype=torch.uint8)
    memory.fill_(0xEE)
    host = _host_view(memory, group, page_size * formats[1].row_bytes)
    conversion = None
    if own != other:
        conversion = RowConversion(source=formats[0], target=formats[1], k_scales=K_SCALES)
    generator = torch.Generator().manual_seed(page_size)
    for layer, k_scale in zip(on_device, K_SCALES, strict=True):
        values = hard_values(pages * page_size, sum(geometry), generator)
        stored = encode_rows(values[:, :rank], values[:, rank:], formats[0], k_scale=k_scale)
        layer.copy_(stored.view(layer.shape).to(device))
    before = [layer.cpu().clone() for layer in on_device]

    def there(layer, rows):
        rows = rows.reshape(-1, formats[0].row_bytes)
        return rows if conversion is None else conversion.convert(rows, layer)

    def back(layer, rows):
        rows = rows.reshape(-1, formats[1].row_bytes)
        return rows if conversion is None else conversion.reversed().convert(rows, layer)

    expected = memory.clone().view(pages + 3, LAYERS, page_size, -1)
    kept = []
    plan = TransferPlan(caches, host, "kv", conversion)
    store = GPU_ENGINES[engine](plan, make_tools(page_bytes, memory), True)
    for taken, put in lists[0]:
        kept.append(Transfer(np.array(put), slots_of(taken, page_size, device), to_host=True))
        store.copy(kept[-1])
        for layer in range(LAYERS):
            narrow = there(layer, before[layer][taken])
            expected[put, layer] = narrow.view(len(put), page_size, -1)
    finish()
    assert torch.equal(memory.view(expected.shape), expected)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(before, on_device, strict=True))

    plan = TransferPlan(host, caches, "kv", conversion and conversion.reversed())
    load = GPU_ENGINES[engine](plan, make_tools(page_bytes, memory), False)
    for taken, put in lists[1]:
        kept.append(Transfer(np.array(taken), slots_of(put, page_size, device), to_host=False))
        for layer in range(LAYERS):
            load.copy(kept[-1], layer)
            wide = back(layer, expected[taken, layer])
            before[layer][put] = wide.view(len(put), page_size, -1)
    finish()
    assert all(torch.equal(a, b.cpu()) for a, b in zip(before, on_device, strict=True))
    assert torch.equal(memory.view(expected.shape), expected)


def _host_view(memory, group, layer_bytes):
    """The same layers with the host's sizes."""
    runs = PageRuns(tensor_index=0, offset_bytes=0, run_bytes=layer_bytes)
    layers = tuple(replace(layer, runs=runs) for layer in group.layers)
    return packed_view(memory, replace(group, layers=layers))
