"""LayoutMLATokenToKVPool: what it returns to SGLang's readers, slots that are not valid, what it refuses."""

import itertools
from contextlib import contextmanager

import codec_oracle as oracle
import pools
import pytest
import torch
from pools import ARRANGEMENTS, START, assert_holds, at, device_pool, guard, hybrid_pool, layer, values

pytestmark = pytest.mark.usefixtures("published")

LAYOUTS, PACKED, CROSS = oracle.LAYOUTS, oracle.PACKED, ARRANGEMENTS[1:]
WHOLE_PAGES = "13 tokens is not a multiple of the page size 4, which"
cross = pytest.mark.parametrize("arrangement", CROSS)


@pytest.mark.parametrize("layout", ["bf16", "fp8"])
def test_unpacked_rows_are_sglangs_own_tensors(layout):
    pool, stock = device_pool(layout), device_pool(layout, stock=True)
    assert [(t.shape, t.dtype) for t in pool.kv_buffer] == [(t.shape, t.dtype) for t in stock.kv_buffer]
    assert pool.get_key_buffer(6).dtype == stock.get_key_buffer(6).dtype
    assert pool.get_value_buffer(6).shape == stock.get_value_buffer(6).shape


@pytest.mark.parametrize("make", [device_pool, hybrid_pool])
@pytest.mark.parametrize("layout", PACKED)
@pytest.mark.parametrize("getter", ["get_key_buffer", "get_value_buffer", "get_kv_buffer"])
def test_getters_of_packed_rows_name_the_way_out(layout, getter, make):
    layer_id = {device_pool: 5, hybrid_pool: 3}[make]
    with pytest.raises(TypeError, match=rf"on a {layout} pool: .*get_row_buffer.*kvpool_mla"):
        getattr(make(layout), getter)(layer_id)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_page_major_keys_are_not_handed_out_by_slot(layout):
    pool = device_pool(layout, "page_major")
    for method in (pool.get_key_buffer, pool.get_value_buffer, pool.get_kv_buffer):
        with pytest.raises(TypeError, match=r"on a page_major pool: .*get_row_buffer.*slot_to_row"):
            method(START)
    with pytest.raises(TypeError, match="DevicePoolInfo cannot describe a page_major pool"):
        pool.get_device_pool_infos()


# -------------------------------------------------------------------- slots that are not valid


@cross
def test_tokens_without_a_slot_and_slots_outside(arrangement):
    pool = device_pool("fp4", arrangement)
    guard(pool)
    wanted, (nope, rope) = pools.copied(pool), values(2)
    pool.set_mla_kv_buffer(layer(START), torch.tensor([-1, 6]), nope, rope)
    wanted["rows", START][at(pool, 6)] = oracle.encode(nope[1], rope[1], "fp4", 512, 64, 416)[0]
    got, _ = pool.get_mla_kv_buffer(layer(START), torch.tensor([6, -1]))
    assert (got[1] == 0).all()
    assert got[0].any()
    copy = pool.get_cpu_copy(torch.tensor([3]))
    for error, call in (
        ("", lambda: pool.set_mla_kv_buffer(layer(START), torch.tensor([6, 20]), nope, rope)),
        ("", lambda: pool.move_kv_cache(torch.tensor([20]), torch.tensor([1]))),
        ("slot -5 is not valid", lambda: pool.get_cpu_copy(torch.tensor([3, -5]))),
        ("slot -5 is not valid", lambda: pool.load_cpu_copy(copy, torch.tensor([-5]))),
    ):
        with pytest.raises(IndexError, match=error):
            call()
    assert pool.get_cpu_copy(torch.tensor([], dtype=torch.int64)) == [[], [], []]
    assert_holds(pool, wanted)


@pytest.mark.parametrize(
    ("layout", "arrangement"),
    # Layer-major bf16 rows are left out: SGLang's own writer stores them.
    [("fp4", "layer_major"), *itertools.product(["bf16", "fp4"], CROSS)],
)
def test_slots_far_outside_and_of_another_dtype(layout, arrangement):
    """61 layers: with the first slot, int32 row numbers wrap around into another layer's rows of the pool."""
    pool = device_pool(layout, arrangement, page_size=64, pages=4, layers=61)
    guard(pool)
    (nope, rope), wanted = values(1), pools.copied(pool)
    for slot in (915320992, 2**31 - 1, 256):
        with pytest.raises(IndexError):
            pool.set_mla_kv_buffer(layer(START), torch.tensor([slot], dtype=torch.int32), nope, rope)
        with pytest.raises(IndexError):
            pool.get_mla_kv_buffer(layer(START), torch.tensor([slot], dtype=torch.int32))
    for bad in (torch.tensor([True]), torch.tensor([3], dtype=torch.uint8), torch.tensor([3.0])):
        with pytest.raises(TypeError):
            pool.set_mla_kv_buffer(layer(START), bad, nope, rope)
    assert_holds(pool, wanted)


# -------------------------------------------------------------------- construction


@pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan"), 1e-46, 1e39, "x", None])
def test_a_damaged_k_scale_is_named_by_the_models_layer(bad):
    for make, layer_id in ((device_pool, 6), (hybrid_pool, 4)):
        with pytest.raises(ValueError, match=rf"^k_scale=.* of layer {layer_id} is "):
            make("fp8", k_scales={layer_id: bad})
    with pytest.raises(ValueError, match="key '6'"):
        device_pool("fp8", k_scales={"6": 1.0})


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"dtype": torch.float8_e4m3fn}, r"SGLang sees layout fp4 as torch\.bfloat16"),
        ({"kv_lora_rank": 448}, "kv_lora_rank=448"),
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim=32"),
        ({"arrangement": "zzz"}, "unknown KV cache arrangement 'zzz'"),
        ({"arrangement": ""}, "unknown KV cache arrangement"),
        ({"arrangement": "head_major"}, "head_major splits pages by head"),
        *(({"arrangement": name, "size": 13}, f"{WHOLE_PAGES} {name}") for name in CROSS),
    ],
)
def test_arguments_that_are_refused(arguments, error):
    with pytest.raises(ValueError, match=error):
        device_pool("fp4", **arguments)


def test_a1_a_reader_that_is_not_on_the_list_is_refused_at_construction_by_name():
    """The list: tests/srt/facts/test_readers.py."""
    device_pool("bf16", "token_major", readers=["kvpool_mla", "fa3"])
    with pytest.raises(ValueError, match="intel_amx"):
        device_pool("bf16", "token_major", readers=["kvpool_mla", "intel_amx"])


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_the_rows_are_allocated_in_the_memory_savers_region_and_freed_with_the_pool(arrangement, monkeypatch):
    from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

    inside, allocated, zeros = [], [], torch.zeros

    @contextmanager
    def region(self, tag, **kwargs):
        inside.append(tag)
        yield
        inside.append("end")

    monkeypatch.setattr(type(TorchMemorySaverAdapter.create(enable=False)), "region", region)
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: (allocated.append(list(inside)), zeros(*a, **k))[1])
    pool = device_pool("fp4", arrangement)
    buffers = 3 if arrangement == "layer_major" else 1
    assert [state for state in allocated if state] == [["kv_cache"]] * buffers
    assert inside == ["kv_cache", "end"]
    pool._clear_buffers()
    assert pool.cross_layer is None
    assert not hasattr(pool, "kv_buffer")
