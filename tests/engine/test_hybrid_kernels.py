"""The plain-torch kernels of the hybrid model against the delta rule in float64, token by token."""

import pytest
import torch
from hybrid_net import HybridNet, Remembered

pytest.importorskip("sglang")
from hybrid_models import cpu_kernels
from hybrid_states import CHUNK, CONFIG, LAYER, SLOTS, UNTOUCHED, Pool


def close(found, wanted):
    """Equal up to the rounding of fp32."""
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)


def test_the_plain_net_is_the_oracle():
    pool = Pool(7)
    part = pool.inputs(CHUNK + 3)
    net = HybridNet(CONFIG)
    attention = net.layers[LAYER].self_attn
    attention.conv_weight.data = pool.weight.double()
    attention.A_log.data, attention.dt_bias.data = pool.a_log.double(), pool.dt_bias.double()
    with torch.no_grad():
        out = Remembered(net).recur(LAYER, *(tensor.double() for tensor in part))
    torch.testing.assert_close(out, pool.oracle([part]))


@pytest.mark.parametrize("tokens", [1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_a_sequence_from_nothing(tokens):
    pool = Pool()
    part = pool.inputs(tokens)
    pool.clear([3])
    [out], _ = pool.extend([3], [part], [0])
    close(out, pool.oracle([part]))


@pytest.mark.parametrize("cut", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1])
def test_a_prefix_goes_on_where_it_ended(cut):
    pool = Pool(1)
    first, second = pool.inputs(cut), pool.inputs(CHUNK + 9)
    pool.clear([5])
    [head], _ = pool.extend([5], [first], [0])
    [tail], _ = pool.extend([5], [second], [cut])
    close(torch.cat([head, tail]), pool.oracle([first, second]))


def test_decoded_tokens_go_on_from_a_prefill_and_from_each_other():
    pool = Pool(2)
    parts = [pool.inputs(CHUNK), *(pool.inputs(1) for _ in range(6))]
    pool.clear([2])
    [head], _ = pool.extend([2], parts[:1], [0])
    rest = [pool.decode([2], [part]) for part in parts[1:]]
    close(torch.cat([head, *rest]), pool.oracle(parts))


def test_sequences_of_a_batch_keep_to_their_slots():
    pool = Pool(3)
    lengths, slots = [5, CHUNK, 1, CHUNK + 7], [4, 1, 8, 6]
    begun, more = [pool.inputs(n) for n in (3, 2, 9)], [pool.inputs(n) for n in lengths]
    pool.clear(slots)
    # The last begins now, the others have begun in another order and batch.
    pool.extend([8, 4, 1], [begun[2], begun[0], begun[1]], [0, 0, 0])
    outs, _ = pool.extend(slots, more, [3, 2, 9, 0])
    steps = [pool.inputs(1) for _ in slots]
    last = pool.decode(slots, steps)
    for row in range(4):
        whole = [*begun[row : row + 1], more[row], steps[row]]
        close(torch.cat([outs[row], last[row : row + 1]]), pool.oracle(whole)[-lengths[row] - 1 :])
    free = [slot for slot in range(SLOTS) if slot not in slots]
    assert (pool.conv[free] == UNTOUCHED).all()
    assert (pool.temporal[free] == UNTOUCHED).all()


def test_a_padded_row_reads_and_writes_no_slot():
    pool = Pool(4)
    pool.clear([2])
    part = pool.inputs(4)
    outs, _ = pool.extend([2, -1], [part, pool.inputs(3)], [0, 0])
    close(outs[0], pool.oracle([part]))
    pool.decode([-1, 2], [pool.inputs(1), pool.inputs(1)])
    free = [slot for slot in range(SLOTS) if slot != 2]
    assert (pool.conv[free] == UNTOUCHED).all()
    assert (pool.temporal[free] == UNTOUCHED).all()


def test_a_sequence_that_begins_does_not_see_what_was_in_its_slot():
    pool = Pool(5)
    part = pool.inputs(6)
    pool.temporal[1] = 0
    # SGLang clears the window too; the kernel is told that there is no prefix, and must not read it.
    [out], _ = pool.extend([1], [part], [0])
    close(out, pool.oracle([part]))


@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_the_state_of_a_tracked_chunk_is_that_of_a_sequence_that_ends_there(chunk):
    pool, other = Pool(6), Pool(6)
    part = pool.inputs(2 * CHUNK + 11)
    pool.clear([3, 4])
    _, snapshot = pool.extend([4, 3], [pool.inputs(5), part], [0, 0], track=[-1, chunk])
    other.clear([7])
    if chunk:
        other.extend([7], [tuple(tensor[: chunk * CHUNK] for tensor in part)], [0])
    torch.testing.assert_close(snapshot[1], other.temporal[7])
    assert (snapshot[0] == UNTOUCHED).all()


def test_tracking_copies_the_masked_rows_alone():
    layers, slots = 3, 10
    conv = torch.arange(layers * slots * 4.0).view(layers, slots, 2, 2)
    temporal = -torch.arange(layers * slots * 8.0).view(layers, slots, 2, 2, 2)
    before = conv.clone(), temporal.clone()
    indices = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    mask = torch.tensor([True, False, True, True])
    # The last row's tracking slot has been given back.
    targets = torch.tensor([7, 8, 9, -1])
    cpu_kernels.track_all_layers(conv, temporal, indices, mask, targets, 4)
    for found, old in zip((conv, temporal), before, strict=True):
        wanted = old.clone()
        wanted[:, 7], wanted[:, 9] = old[:, 1], old[:, 3]
        assert torch.equal(found, wanted)
    cpu_kernels.track_one_layer(conv[1], temporal[1], indices, mask[[1, 0, 1, 1]], targets, 2)
    assert torch.equal(conv[1, 8], before[0][1, 2])
    assert torch.equal(conv[0, 8], before[0][0, 8])
