"""The self-check of rows: correct pools pass and are unchanged, broken ones give an error that names them."""

import itertools

import pytest
from codec_oracle import LAYOUTS, NARROW
from pools import ARRANGEMENTS, START, assert_holds, copied, device_pool, dsa_pool, fill, hybrid_pool, waits

from sgl_kvpool.srt.pool import mla
from sgl_kvpool.srt.self_check import Difference, check_rows

pytestmark = pytest.mark.usefixtures("published")


def passes(pool):
    before = copied(pool)
    assert check_rows(pool) == "rows of 3 of 3 layers"
    assert_holds(pool, before)


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        *((device_pool, arguments) for arguments in itertools.product(LAYOUTS, ARRANGEMENTS, [1, 4, 61])),
        *((dsa_pool, (layout,)) for layout in LAYOUTS),
        *((hybrid_pool, arguments) for arguments in itertools.product(LAYOUTS, ARRANGEMENTS)),
    ],
)
def test_correct_pools_pass(make, arguments):
    pool = make(*arguments)
    fill(pool)
    passes(pool)


# ------------------------------------------------------------------ broken on purpose


def difference(pool):
    with pytest.raises(Difference) as found:
        check_rows(pool)
    return str(found.value)


#: Pools whose rows are written by our own code: every arrangement, and for bf16 one that is not layer_major.
OWN = [*itertools.product(NARROW, ARRANGEMENTS), ("bf16", "token_major")]


@pytest.mark.parametrize(("layout", "arrangement"), OWN)
def test_an_encoder_that_rounds_otherwise(layout, arrangement, monkeypatch):
    store = mla.store_rows

    def rounded(pool, slots, nope, rope, fmt, k_scale):
        store(pool, slots, nope * 1.01, rope, fmt, k_scale)

    monkeypatch.setattr(mla, "store_rows", rounded)
    text = difference(device_pool(layout, arrangement))
    assert text.startswith(f"rows of {layout} written to the pool: byte ")
    assert f"of layer {START}, slot " in text


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_a_decoder_that_rounds_otherwise(layout, monkeypatch):
    gather = mla.gather_parts

    def rounded(rows, slots, fmt, nope, rope, k_scale):
        gather(rows, slots, fmt, nope, rope, k_scale)
        nope[0, 3] += 1

    monkeypatch.setattr(mla, "gather_parts", rounded)
    text = difference(device_pool(layout))
    assert text.startswith(f"values of {layout} from get_mla_kv_buffer, two bytes each: byte ")


@pytest.mark.parametrize("arrangement", ["token_major", "page_major"])
def test_slots_that_are_taken_for_others(arrangement, monkeypatch):
    """Writer and reader agree, but transfers would find the rows elsewhere."""
    pool = device_pool("fp4", arrangement, pages=9)
    mapping = pool.slot_to_row
    monkeypatch.setattr(pool, "slot_to_row", lambda slots: mapping(slots ^ 1))
    assert "rows of fp4 written to the pool: byte 0 of layer 5, slot " in difference(pool)


def test_a_reader_of_rows_in_another_order(monkeypatch):
    pool = device_pool("fp8_block_scale", pages=9)
    rows = pool.get_row_buffer
    monkeypatch.setattr(pool, "get_row_buffer", lambda layer_id: rows(layer_id).roll(1, 0))
    assert difference(pool).startswith("rows of fp8_block_scale from get_row_buffer: byte ")


@pytest.mark.parametrize("sparse", [False, True])
def test_neighbours_that_are_written_too(sparse, monkeypatch):
    store = mla.store_rows

    def wide(rows, slots, *more, **named):
        store(rows, slots, *more, **named)
        rows[slots - 1, 0] ^= 1

    monkeypatch.setattr(mla, "store_rows", wide)
    pool = dsa_pool("fp4") if sparse else device_pool("fp4", page_size=64, pages=9)
    assert "rows of fp4 written to the pool: byte 0 of layer" in difference(pool)


def test_reading_without_waiting(monkeypatch):
    pool = device_pool("fp4")
    monkeypatch.setattr(pool, "_stored", lambda layer_id: pool.kv_buffer[layer_id - START])
    text = difference(pool)
    assert text == ("loads from the host tier: get_row_buffer of layer 5 waited for layers [], expected 0")


def test_the_counter_is_given_back():
    for pool in (device_pool("fp4"), hybrid_pool("fp4")):
        counter = waits(pool)
        registered = pool.layer_transfer_counter
        passes(pool)
        assert pool.layer_transfer_counter is registered
        assert len(set(counter)) == 3  # the self-check's reads wait on the registered counter
