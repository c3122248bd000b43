"""Check of rows that SGLang's calls write and read, against the codec's bytes."""

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sgl_kvpool.memory.arrangement import global_slots
from sgl_kvpool.srt.self_check.pages import (
    Difference,
    PageBytes,
    decoded,
    encoded,
    random_values,
    require_same_bytes,
    slots_of_rank,
)


def check_rows(pool: Any) -> str:
    """Write rows of some layers and read them back.

    The check uses the first, the middle and the last layer, and the first, a middle and the last page of
    SGLang's allocator; neighbours of the written rows have to keep their bytes, in every layer. The pages are
    restored afterwards. No request may use the pool meanwhile.
    """
    ids, rows = pool.row_layer_ids, pool.row_pool
    if not ids:
        return "no layer with rows"
    chosen = sorted({0, len(ids) // 2, len(ids) - 1})
    last = rows.size // rows.page_size  # page 0 takes the writes of padded tokens
    # A page of one token has its neighbours in the adjacent pages.
    near = {1, 2, last // 2, last // 2 + 1, last - 1, last}
    pages = PageBytes(rows, sorted(page for page in near if 1 <= page <= last))
    before = pages.read()
    try:
        expected = _written(pool, {index: ids[index] for index in chosen}, pages, before)
        for index in chosen:
            _check_reading(pool, ids[index], index, pages, expected)
        _check_waits(pool, [ids[index] for index in chosen])
    finally:
        pages.write(before)
    return f"rows of {len(chosen)} of {len(ids)} layers"


def _places(pages: PageBytes, page_size: int) -> torch.Tensor:
    """Indices of the written rows among the tokens of all `pages`, in descending order."""
    tokens = sorted({0, page_size // 2, page_size - 1})
    written = sorted({0, len(pages.pages) // 2, len(pages.pages) - 1})
    return torch.tensor([page * page_size + token for page in written for token in tokens]).flip(0)


def _slots(pages: PageBytes, page_size: int) -> torch.Tensor:
    """SGLang's slots of `_places`, int64 on the CPU."""
    places = _places(pages, page_size)
    return torch.tensor(pages.pages)[places // page_size] * page_size + places % page_size


def _written(pool: Any, layers: dict[int, int], pages: PageBytes, before: torch.Tensor) -> torch.Tensor:
    """Write rows to `layers` (ids by index), compare the pages of all layers, return the expected bytes."""
    rows, fmt, rank = pool.row_pool, pool.row_format, pool.kv_lora_rank
    places, slots = _places(pages, rows.page_size), _slots(pages, rows.page_size).to(rows.device)
    expected = before.clone()
    half = len(places) // 2 if pool.dcp_size == 1 else 0  # SGLang refuses set_kv_buffer with ranks
    for index, layer_id in layers.items():
        values = random_values(len(places), fmt, seed=index)
        by_place = expected[index].view(-1, fmt.row_bytes)
        by_place[places] = encoded(values, fmt, pool.k_scale(layer_id))
        layer = SimpleNamespace(layer_id=layer_id)
        given = values.to(rows.device).unsqueeze(1)
        rope = given[half:, :, rank:] if fmt.qk_rope_head_dim else None
        if half:
            pool.set_kv_buffer(layer, KVWriteLoc(slots[:half]), given[:half], given[:half, :, :rank])
        loc = KVWriteLoc(slots_of_rank(pool, slots[half:]))
        pool.set_mla_kv_buffer(layer, loc, given[half:, :, :rank], rope)
        if pool.dcp_size > 1:  # tokens of the next rank are not stored here
            theirs = global_slots(slots, (pool.dcp_rank + 1) % pool.dcp_size, pool.dcp_size)
            pool.set_mla_kv_buffer(layer, KVWriteLoc(theirs.roll(1)), given[:, :, :rank], rope)
    ids = pool.row_layer_ids

    def place(index: int, page: int, token: int) -> str:
        return f"layer {ids[index]}, slot {pages.pages[page] * rows.page_size + token}"

    require_same_bytes(pages.read(), expected, f"rows of {fmt.layout} written to the pool", place)
    return expected


def _check_reading(pool: Any, layer_id: int, index: int, pages: PageBytes, expected: torch.Tensor) -> None:
    """Read the written rows of a layer, as bytes and as values."""
    rows, fmt = pool.row_pool, pool.row_format
    slots = _slots(pages, rows.page_size)
    stored = expected[index].view(-1, fmt.row_bytes)[_places(pages, rows.page_size)]

    def place(token: int) -> str:
        return f"layer {layer_id}, slot {int(slots[token])}"

    on_device = slots.to(rows.device)
    found = pool.get_row_buffer(layer_id).squeeze(1)[pool.slot_to_row(on_device)]
    require_same_bytes(found.cpu(), stored, f"rows of {fmt.layout} from get_row_buffer", place)
    layer = SimpleNamespace(layer_id=layer_id)
    nope, rope = pool.get_mla_kv_buffer(layer, on_device, torch.bfloat16)
    parts = [part.squeeze(1).cpu() for part in (nope, rope) if part is not None]
    wanted = decoded(stored, fmt, pool.k_scale(layer_id), torch.bfloat16)
    feature = f"values of {fmt.layout} from get_mla_kv_buffer, two bytes each"
    found = torch.cat(parts, dim=-1)
    require_same_bytes(found.view(torch.uint8), wanted.view(torch.uint8), feature, place)


class _Waits:
    """Stand-in for SGLang's counter of loaded layers."""

    def __init__(self) -> None:
        self.layers: list[int] = []

    def wait_until(self, layer: int) -> None:
        self.layers.append(layer)


def _check_waits(pool: Any, chosen: list[int]) -> None:
    """Check that readers wait until a load of the layer from the host tier is done."""
    counter = pool.layer_transfer_counter
    waits = _Waits()
    slots = torch.tensor([pool.row_pool.page_size], device=pool.row_pool.device)
    readers = {
        "get_row_buffer": pool.get_row_buffer,
        "get_mla_kv_buffer": lambda layer_id: pool.get_mla_kv_buffer(
            SimpleNamespace(layer_id=layer_id), slots
        ),
    }
    pool.register_layer_transfer_counter(waits)
    try:
        for layer_id in chosen:
            for name, read in readers.items():
                waits.layers.clear()
                read(layer_id)
                if set(waits.layers) != {layer_id - pool.start_layer}:
                    raise Difference(
                        f"loads from the host tier: {name} of layer {layer_id} waited for layers "
                        f"{waits.layers}, expected {layer_id - pool.start_layer}"
                    )
    finally:
        pool.register_layer_transfer_counter(counter)
