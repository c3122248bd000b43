"""Rows, index keys and states of retracted requests, which SGLang's backend `cpu_tensor` keeps."""

from itertools import product

import pytest
import torch
from codec_oracle import LAYOUTS
from host_tier import allocator_of
from model_kinds import KINDS, pool_of, request_pool
from pools import ARRANGEMENTS, assert_holds, at, copied, fill, guard

#: Kinds of models: page size, and tokens of which the last page is not full.
SIZES = {"dense": (1, 3), "hybrid": (16, 40), "DSA": (64, 160), "hybrid DSA": (64, 129)}


@pytest.mark.parametrize(("n", "kind", "layout"), [(n, *x) for n, x in enumerate(product(SIZES, LAYOUTS))])
def test_a_request_comes_back_to_other_slots(n, kind, layout, published, monkeypatch):
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache import common, memory_pool
    from sglang.srt.sampling.sampling_params import SamplingParams

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    hybrid, (page, tokens), places = KINDS[kind].hybrid, SIZES[kind], []
    table = request_pool(context=256) if hybrid else memory_pool.ReqToTokenPool(4, 256, "cpu", False)
    arrangement = "layer_major" if KINDS[kind].sparse else ARRANGEMENTS[n % 3]
    pool = pool_of(KINDS[kind], layout, page, 8, table if hybrid else None, arrangement=arrangement)
    getattr(pool, "full_kv_pool", pool).cpu_offloading_chunk_size = 48 if KINDS[kind].sparse else 2
    request = Req("r", "", list(range(tokens + 1)), SamplingParams())  # the last token has no row yet
    allocator = allocator_of(pool)

    def take_slots():
        slots = allocator.alloc(-(-tokens // page) * page)[:tokens]
        table.write((request.kv.req_pool_idx, slice(0, tokens)), slots)
        places.append((slots, slots[::page] // page, hybrid and int(request.kv.mamba_pool_idx)))

    table.alloc([request])
    assert table.req_to_token.dtype == torch.int32
    take_slots()
    was = fill(pool)
    assert common.backup_kv_cache(request, None, table, allocator, "cpu_tensor")
    guard(pool)
    wanted = copied(pool)
    if hybrid:
        request.kv.mamba_pool_idx = table.mamba_allocator.alloc(1)[0]
    take_slots()
    common.restore_kv_cache(request, None, table, allocator, "cpu_tensor")
    (slots, pages, state), (others, other_pages, other_state) = places
    for (what, name), part in wanted.items():
        if what == "rows":
            part[at(pool, others)] = was[what, name][at(pool, slots)]
        elif what == "states":
            part[:, other_state] = was[what, name][:, state]
        elif len(part):
            part[other_pages] = was[what, name][pages]
    assert_holds(pool, wanted)
