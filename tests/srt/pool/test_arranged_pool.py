"""LayoutMLATokenToKVPool in every arrangement: the same rows at other addresses, no other byte changes.

A1, A5, B2 and B3 are items of the vLLM checklist of tests/connectors.
"""

import itertools

import numpy as np
import pytest
import torch
from test_mla_pool import LAYERS, ROW_BYTES, START, expected_rows, layer_object, values

pytestmark = pytest.mark.usefixtures("published")

LAYOUTS = list(ROW_BYTES)
CROSS = ["token_major", "page_major"]
#: Axes in memory, outermost first; repeated here as an oracle.
ORDER = {"token_major": "BNLC", "page_major": "BLNC"}
PAGES = 5  # with the padded page


def make_pool(layout, arrangement, page_size=4, pages=PAGES, size=None, **extra):
    from sgl_kvpool.layout import MLAKVCacheLayout
    from sgl_kvpool.srt.pool import LayoutMLATokenToKVPool, PoolOptions

    chosen = {name: extra.pop(name) for name in ("k_scales", "readers", "host_tier") if name in extra}
    layout = MLAKVCacheLayout(layout)
    shown = {"bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}[layout.sglang_kv_cache_dtype()]
    pool = LayoutMLATokenToKVPool(
        size=(pages - 1) * page_size if size is None else size, page_size=page_size, dtype=shown,
        options=PoolOptions(layout, arrangement=arrangement, **chosen),
        **{"kv_lora_rank": 512, "qk_rope_head_dim": 64, "layer_num": LAYERS, "device": "cpu",
           "enable_memory_saver": False, "start_layer": START, **extra},
    )  # fmt: skip
    if pool.cross_layer is not None:
        pool.cross_layer.fill_(-18)  # 0xEE
    return pool


def raw(pool):
    """The buffer's bytes as numpy, without our own views."""
    return pool.cross_layer.view(-1).numpy().view(np.uint8)


def places(pool, layer_id, slots):
    """Addresses of the rows of a layer's slots, [slots, row_bytes], by numpy alone."""
    name, page_size = pool.kv_cache_arrangement.value, pool.page_size
    row = ROW_BYTES[pool.kv_cache_layout.value]
    sizes = {"L": LAYERS, "B": len(raw(pool)) // (LAYERS * page_size * row), "N": page_size, "C": row}
    grid = np.arange(len(raw(pool))).reshape([sizes[axis] for axis in ORDER[name]])
    grid = grid.transpose([ORDER[name].index(axis) for axis in "LBNC"])
    return grid[layer_id - START].reshape(-1, row)[np.asarray(slots)]


CASES = pytest.mark.parametrize(
    ("layout", "arrangement", "page_size"), list(itertools.product(LAYOUTS, CROSS, [1, 2, 61, 64]))
)


@CASES
def test_b3_rows_lie_at_the_address_and_nowhere_else(layout, arrangement, page_size):
    """B3, A5: both write methods and a read; every other byte stays 0xEE."""
    pool = make_pool(layout, arrangement, page_size, k_scales={START + 1: 0.5})
    slots = torch.tensor([PAGES * page_size - 1, 1 if page_size > 1 else 2, 3 * page_size, 0])
    nope, rope = values(4, 512, 64)
    pool.set_mla_kv_buffer(layer_object(START + 1), slots, nope, rope)
    k_scale = 0.5 if layout == "fp8" else 1.0
    wanted = expected_rows(layout, nope, rope, 512, 64, ROW_BYTES[layout], k_scale)
    where = places(pool, START + 1, slots)
    assert np.array_equal(raw(pool)[where], wanted)
    assert int((raw(pool) != 0xEE).sum()) == int((wanted != 0xEE).sum())

    both = torch.cat([nope, rope], dim=-1)
    pool.set_kv_buffer(layer_object(START + 2), slots.flip(0).int(), both, None)
    plain = expected_rows(layout, nope, rope, 512, 64, ROW_BYTES[layout])
    assert np.array_equal(raw(pool)[places(pool, START + 2, slots.flip(0))], plain)
    assert np.array_equal(raw(pool)[where], wanted)

    got_nope, got_rope = pool.get_mla_kv_buffer(layer_object(START + 1), slots, torch.float32)
    reference = make_pool(layout, "layer_major", page_size, k_scales={START + 1: 0.5})
    reference.set_mla_kv_buffer(layer_object(START + 1), slots, nope, rope)
    # SGLang's own bf16 writer skips slot 0, where padded tokens go; its row is never read.
    same = slots != 0
    expected = reference.get_mla_kv_buffer(layer_object(START + 1), slots, torch.float32)
    assert torch.equal(got_nope[same], expected[0][same])
    assert torch.equal(got_rope[same], expected[1][same])


@CASES
def test_sizes_and_spans(layout, arrangement, page_size):
    pool = make_pool(layout, arrangement, page_size)
    row, slots = ROW_BYTES[layout], PAGES * page_size
    total = LAYERS * slots * row
    assert pool.get_kv_size_bytes() == total == len(raw(pool))
    assert pool.mem_usage == pytest.approx(total / 2**30)
    pointers, lengths, items = pool.get_contiguous_buf_infos()
    assert pointers == [pool.cross_layer.data_ptr()]
    assert lengths == [total]
    assert items == [page_size * LAYERS * row]
    # For page 3, a transfer engine reads the page of all layers.
    for layer_id in range(START, START + LAYERS):
        page = places(pool, layer_id, range(3 * page_size, 4 * page_size))
        assert page.min() >= 3 * items[0]
        assert page.max() < 4 * items[0]
    assert [t.data_ptr() for t in pool.kv_buffer] == pool.data_ptrs.tolist()
    assert pool.get_kv_buffer_shape() == ((slots, 1, 576), (slots, 1, 512))
    assert pool.get_v_head_dim() == 512


@CASES
def test_move_and_cpu_copies(layout, arrangement, page_size):
    """Lists that share a slot, not contiguous, of both integer types; several chunks on the CPU."""
    pool = make_pool(layout, arrangement, page_size)
    generator = np.random.default_rng(3)
    raw(pool)[:] = generator.integers(0, 256, raw(pool).size, dtype=np.uint8)
    slots = PAGES * page_size
    # SGLang's own pool reads the rows of all slots before it writes any.
    target = torch.tensor([slots - 1, 3, 1, 2])[::2]
    source = torch.tensor([3, slots - 1], dtype=torch.int32)
    expected = raw(pool).copy()
    for layer_id in range(START, START + LAYERS):
        expected[places(pool, layer_id, target)] = raw(pool)[places(pool, layer_id, source)]
    pool.move_kv_cache(target, source)
    assert np.array_equal(raw(pool), expected)
    pool.move_kv_cache(target[:0], source[:0])
    assert np.array_equal(raw(pool), expected)

    pool.cpu_offloading_chunk_size = 2
    taken = torch.tensor([2, slots - 1, 1])
    copy = pool.get_cpu_copy(taken)
    put = torch.tensor([0, 3, 4])
    expected = raw(pool).copy()
    for layer_id in range(START, START + LAYERS):
        expected[places(pool, layer_id, put)] = raw(pool)[places(pool, layer_id, taken)]
    pool.load_cpu_copy(copy, put)
    assert np.array_equal(raw(pool), expected)


@pytest.mark.parametrize("arrangement", CROSS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_b2_views_share_one_storage_and_nothing_copies_them(layout, arrangement):
    pool = make_pool(layout, arrangement)
    home = pool.cross_layer.untyped_storage().data_ptr()
    views = [*pool.kv_buffer, *map(pool.get_row_buffer, range(START, START + LAYERS))]
    if arrangement == "token_major" and not pool.kv_cache_layout.is_packed:
        views += [pool.get_key_buffer(START), pool.get_value_buffer(START + 1), *pool.get_kv_buffer(START)]
    assert {view.untyped_storage().data_ptr() for view in views} == {home}
    assert pool.cross_layer.untyped_storage().nbytes() == pool.get_kv_size_bytes()


@pytest.mark.parametrize("layout", ["bf16", "fp8"])
def test_token_major_keys_are_strided_and_right_for_readers_that_take_strides(layout):
    pool = make_pool(layout, "token_major")
    nope, rope = values(2, 512, 64)
    slots = torch.tensor([7, 12])
    pool.set_mla_kv_buffer(layer_object(START), slots, nope, rope)
    keys = pool.get_key_buffer(START)
    assert tuple(keys.shape) == (20, 1, 576)
    assert keys.stride(0) == LAYERS * 576
    wanted = torch.cat([nope, rope], dim=-1).to(keys.dtype)
    assert torch.equal(keys[slots].view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(
        pool.get_value_buffer(START)[slots].view(torch.uint8), wanted[..., :512].view(torch.uint8)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_page_major_keys_are_not_handed_out_by_slot(layout):
    pool = make_pool(layout, "page_major")
    for method in (pool.get_key_buffer, pool.get_value_buffer, pool.get_kv_buffer):
        with pytest.raises(TypeError, match=r"on a page_major pool: .*get_row_buffer.*slot_to_row"):
            method(START)
    with pytest.raises(TypeError, match="DevicePoolInfo cannot describe a page_major pool"):
        pool.get_device_pool_infos()


@pytest.mark.parametrize("arrangement", CROSS)
def test_with_pages_of_one_token_slots_are_rows(arrangement):
    pool = make_pool("bf16", arrangement, page_size=1, pages=9)
    slots = torch.tensor([4, -1])
    assert pool.slot_to_row(slots) is slots
    assert tuple(pool.get_key_buffer(START).shape) == (9, 1, 576)
    (info,) = pool.get_device_pool_infos()
    info.buffer_info.validate(layer_ids=info.layer_ids)


def test_layer_major_is_sglangs_own():
    pool = make_pool("bf16", "layer_major")
    assert pool.cross_layer is None
    assert all(tensor.is_contiguous() for tensor in pool.kv_buffer)
    slots = torch.tensor([3])
    assert pool.slot_to_row(slots) is slots
    assert len(pool.get_contiguous_buf_infos()[0]) == LAYERS


@pytest.mark.parametrize("arrangement", CROSS)
def test_tokens_without_a_slot_and_slots_outside(arrangement):
    pool = make_pool("fp4", arrangement)
    nope, rope = values(2, 512, 64)
    pool.set_mla_kv_buffer(layer_object(START), torch.tensor([-1, 6]), nope, rope)
    untouched = np.ones(raw(pool).size, dtype=bool)
    untouched[places(pool, START, [6]).ravel()] = False
    assert (raw(pool)[untouched] == 0xEE).all()
    got, _ = pool.get_mla_kv_buffer(layer_object(START), torch.tensor([6, -1]))
    assert (got[1] == 0).all()
    assert got[0].any()
    before = raw(pool).copy()
    with pytest.raises(IndexError):
        pool.set_mla_kv_buffer(layer_object(START), torch.tensor([6, 20]), nope, rope)
    with pytest.raises(IndexError):
        pool.move_kv_cache(torch.tensor([20]), torch.tensor([1]))
    with pytest.raises(IndexError, match="layer 8 is outside of this pool"):
        pool.get_row_buffer(START + LAYERS)
    assert np.array_equal(raw(pool), before)


@pytest.mark.parametrize(
    ("layout", "arrangement"),
    # Layer-major bf16 rows are left out: SGLang's own writer stores them.
    [("fp4", "layer_major"), *itertools.product(["bf16", "fp4"], CROSS)],
)
def test_slots_far_outside_and_of_another_dtype(layout, arrangement):
    """61 layers: with the first slot, int32 row numbers wrap around into another layer's rows of the pool."""
    pool = make_pool(layout, arrangement, page_size=64, pages=4, layer_num=61, end_layer=START + 60)
    nope, rope = values(1, 512, 64)
    before = pool.get_row_buffer(START).clone()
    for slot in (915320992, 2**31 - 1, 256):
        with pytest.raises(IndexError):
            pool.set_mla_kv_buffer(layer_object(START), torch.tensor([slot], dtype=torch.int32), nope, rope)
        with pytest.raises(IndexError):
            pool.get_mla_kv_buffer(layer_object(START), torch.tensor([slot], dtype=torch.int32))
    for bad in (torch.tensor([True]), torch.tensor([3], dtype=torch.uint8), torch.tensor([3.0])):
        with pytest.raises(TypeError):
            pool.set_mla_kv_buffer(layer_object(START), bad, nope, rope)
    if pool.cross_layer is not None:
        assert (raw(pool) == 0xEE).all()
    assert torch.equal(pool.get_row_buffer(START), before)


@pytest.mark.parametrize("arrangement", CROSS)
def test_cpu_copies_of_invalid_slots_are_refused(arrangement):
    pool = make_pool("fp4", arrangement)
    copy = pool.get_cpu_copy(torch.tensor([3]))
    for call in (
        lambda: pool.get_cpu_copy(torch.tensor([3, -5])),
        lambda: pool.load_cpu_copy(copy, torch.tensor([-5])),
    ):
        with pytest.raises(IndexError, match="slot -5 is not valid"):
            call()
    assert pool.get_cpu_copy(torch.tensor([], dtype=torch.int64)) == [[], [], []]
    assert (raw(pool) == 0xEE).all()


@pytest.mark.parametrize("arrangement", CROSS)
def test_rows_written_by_number_once_per_step(arrangement):
    """As in the attention backend: `slot_to_row` once per step, then all layers use the same row numbers."""
    from sgl_kvpool.srt.pool.row_pool import RowWriteLoc

    pool = make_pool("fp8_block_scale", arrangement)
    slots = torch.tensor([9, 2])
    loc = RowWriteLoc(pool.slot_to_row(slots))
    for layer_id in range(START, START + LAYERS):
        nope, rope = values(2, 512, 64, seed=layer_id)
        pool.set_mla_kv_buffer(layer_object(layer_id), loc, nope, rope)
        wanted = expected_rows("fp8_block_scale", nope, rope, 512, 64, 656)
        assert np.array_equal(raw(pool)[places(pool, layer_id, slots)], wanted)


@pytest.mark.parametrize("arrangement", CROSS)
def test_a_pool_of_a_part_of_a_page_is_refused(arrangement):
    with pytest.raises(
        ValueError, match=f"13 tokens is not a multiple of the page size 4, which {arrangement} needs"
    ):
        make_pool("bf16", arrangement, size=13)
    make_pool("bf16", "layer_major", size=13)


@pytest.mark.parametrize("arrangement", CROSS)
def test_numbers_of_any_integer_type(arrangement):
    pool = make_pool("fp4", arrangement, page_size=np.int64(4), pages=np.int32(5))
    assert pool.get_kv_size_bytes() == LAYERS * 20 * 416


def test_options_check_names_and_take_them_as_strings():
    from sgl_kvpool.srt.pool import LayoutMLATokenToKVPool, PoolOptions

    with pytest.raises(ValueError, match="unknown KV cache arrangement 'zzz'"):
        PoolOptions("fp4", arrangement="zzz")
    options = PoolOptions("fp4", arrangement="token_major", readers="kvpool_mla")
    pool = LayoutMLATokenToKVPool(12, 4, torch.bfloat16, 512, 64, 2, "cpu", False, options=options)
    assert pool.kv_cache_arrangement.value == "token_major"


@pytest.mark.parametrize("name", ["head_major", "nhd", ""])
def test_arrangements_without_rows_are_refused(name):
    with pytest.raises(ValueError, match="head_major splits pages by head|unknown KV cache arrangement"):
        make_pool("bf16", name)


@pytest.mark.parametrize(
    ("arrangement", "readers", "refused"),
    [
        ("token_major", ["kvpool_mla", "intel_amx"], "intel_amx"),
        ("token_major", ["fa4"], "fa4"),
        ("token_major", ["some_new_backend"], "some_new_backend"),
        ("page_major", ["flashinfer", "kvpool_mla"], "flashinfer"),
        ("page_major", ["torch_native"], "torch_native"),
        ("layer_major", ["some_new_backend"], "some_new_backend"),
    ],
)
def test_a1_a_reader_that_is_not_on_the_list_is_refused_at_construction_by_name(
    arrangement, readers, refused
):
    with pytest.raises(ValueError, match=refused):
        make_pool("bf16", arrangement, readers=readers)


@pytest.mark.parametrize(
    ("arrangement", "readers"),
    [
        ("token_major", ["kvpool_mla", "flashinfer", "triton", "fa3", "flashmla", "torch_native"]),
        ("page_major", ["kvpool_mla"]),
        ("layer_major", ["intel_amx", "fa4"]),
    ],
)
def test_readers_on_the_list(arrangement, readers):
    assert make_pool("bf16", arrangement, readers=readers).kv_cache_arrangement.value == arrangement


@pytest.mark.parametrize("arrangement", CROSS)
def test_the_buffer_is_allocated_in_the_memory_savers_region_and_freed_with_the_pool(
    arrangement, monkeypatch
):
    from contextlib import contextmanager

    from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

    inside = []
    pool = make_pool("fp4", arrangement)
    kind = type(TorchMemorySaverAdapter.create(enable=False))

    @contextmanager
    def region(self, tag, **kwargs):
        inside.append(tag)
        yield
        inside.append("end")

    monkeypatch.setattr(kind, "region", region)
    allocated = []
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: (allocated.append(list(inside)), zeros(*a, **k))[1])
    pool = make_pool("fp4", arrangement)
    assert [state for state in allocated if state] == [["kv_cache"]]
    assert inside == ["kv_cache", "end"]
    pool._clear_buffers()
    assert pool.cross_layer is None
    assert not hasattr(pool, "kv_buffer")
