"""Pooled index keys (one per four tokens) in LayoutHybridLinearKVPool, byte by byte against SGLang's pool.

SGLang's kernels write the keys, in Triton's interpreter; tokens that do not fill a key yet are kept in their
request's tail.
"""

import numpy as np
import pytest
import torch
from codec_oracle import LAYOUTS, OURS_ALONE
from pools import LINEAR_LAYERS, MLA_LAYERS, POOLED, hybrid_pool, index_pages, rows, state_tensors, waits

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("published")]

every_layer = pytest.mark.parametrize("layer_id", MLA_LAYERS)
#: Without fp4, which is refused: no reader of its rows supports pooled keys.
pooled_layouts = pytest.mark.parametrize("layout", [one for one in LAYOUTS if one not in OURS_ALONE])
REQUESTS, TAIL = 4, 6  # with a request for padding; tail: a key's four tokens and two drafts
#: Index blocks of 64 tokens: tokens 0 to 255 of request 1 on page 1, of request 2 on page 2.
BLOCKS = torch.tensor([[4, 5, 6, 7], [8, 9, 10, 11]], dtype=torch.int32)


def both(layout, **extra):
    return [hybrid_pool(layout, **POOLED, stock=stock, **extra) for stock in (False, True)]


def tails(pool):
    """Bytes of the tails' keys and scores by MLA layer."""
    found = [pool.get_compress_tail_buffers(layer_id) for layer_id in MLA_LAYERS]
    return [[part.view(torch.uint8).numpy() for part in pair] for pair in found]


def assert_same_index(ours, stock):
    for found, wanted in zip(index_pages(ours), index_pages(stock), strict=True):
        assert np.array_equal(found, wanted)
    for pair, wanted in zip(tails(ours), tails(stock), strict=True):
        for found, part in zip(pair, wanted, strict=True):
            assert np.array_equal(found, part)


def rows_are_empty(pool):
    return not any(part.any() for part in [*rows(pool), *state_tensors(pool.mamba_pool)])


def vectors(tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, 128, generator=generator, dtype=torch.float32)


def decode(pool, layer_id, position, round_scale=False):
    """One token of requests 1 and 2."""
    keys, scores = vectors(4, seed=100 * layer_id + position).to(torch.bfloat16).chunk(2)
    at = torch.tensor([position] * 2)
    pool.kpool_decode_update_index_cache(
        layer_id,
        keys,
        scores,
        vectors(4, seed=7),
        BLOCKS,
        torch.tensor([1, 2]),
        at,
        (at + 1).to(torch.int32),
        at + torch.tensor([256, 512]),
        round_scale,
    )
    return keys, scores


@pooled_layouts
def test_sizes(layout):
    ours, stock = both(layout)
    shapes = [part.shape for part in index_pages(ours)]
    assert shapes == [part.shape for part in index_pages(stock)] == [(3, 64 * 132)] * 3
    for layer_id in MLA_LAYERS:
        for number, part in enumerate(ours.get_compress_tail_buffers(layer_id)):
            assert (part.shape, part.dtype) == ((REQUESTS, TAIL, 128), torch.bfloat16)
            inner = ours.full_kv_pool
            kept = (inner._compress_tail_k, inner._compress_tail_score)[number]
            assert part.data_ptr() == kept[MLA_LAYERS.index(layer_id)].data_ptr()


@pytest.mark.parametrize(("tokens", "start"), [(3, 0), (2, 5), (0, 4)])
@every_layer
@pooled_layouts
def test_tails_of_a_prefilled_request(layout, layer_id, tokens, start):
    """The tail is a ring of six entries; without tokens nothing changes."""
    ours, stock = both(layout)
    keys, scores = (
        vectors(2 * tokens, seed=start).to(torch.bfloat16).chunk(2) if tokens else [vectors(0, 0)] * 2
    )
    waited = waits(ours)
    for pool in (ours, stock):
        pool.set_compress_tail_for_request(layer_id, torch.tensor(2), keys, scores, tokens, start)
    assert waited == []
    for found, part in zip(ours.get_compress_tail_buffers(layer_id), (keys, scores), strict=True):
        wanted = torch.zeros(REQUESTS, TAIL, 128, dtype=torch.bfloat16)
        for token in range(tokens):
            wanted[2, (start + token) % TAIL] = part[token]
        assert torch.equal(found, wanted)
    for other in set(MLA_LAYERS) - {layer_id}:
        assert not any(part.any() for part in tails(ours)[MLA_LAYERS.index(other)])
    assert_same_index(ours, stock)
    assert not any(part.any() for part in index_pages(ours))
    assert rows_are_empty(ours)


@pytest.mark.parametrize("round_scale", [False, True])
@every_layer
@pooled_layouts
def test_decoded_tokens_fill_keys_of_their_model_layer(layout, layer_id, round_scale):
    """Tokens 2 to 7: keys are written after tokens 3 and 7 only."""
    ours, stock = both(layout)
    waited = waits(ours)
    for position in range(2, 8):
        for pool in (ours, stock):
            keys, scores = decode(pool, layer_id, position, round_scale)
        ring = [part[[1, 2], position % TAIL] for part in ours.get_compress_tail_buffers(layer_id)]
        assert torch.equal(ring[0], keys)
        assert torch.equal(ring[1], scores)
        assert_same_index(ours, stock)
        pages = index_pages(ours)[MLA_LAYERS.index(layer_id)]
        filled = (position + 1) // 4
        for page in (1, 2):  # of requests 1 and 2: keys, then scales
            assert pages[page, : 128 * filled].any() == (filled > 0)
            assert not pages[page, 128 * filled : 8192].any()
            assert not pages[page, 8192 + 4 * filled :].any()
        assert not pages[0].any()
    assert waited == []
    for other in set(MLA_LAYERS) - {layer_id}:
        assert not index_pages(ours)[MLA_LAYERS.index(other)].any()
        assert not any(part.any() for part in tails(ours)[MLA_LAYERS.index(other)])
    assert rows_are_empty(ours)


@pooled_layouts
def test_every_layer_beside_sglangs_wrapper(layout):
    """Also whole keys, which prefill writes by key number, and reading back."""
    ours, stock = both(layout)
    for number, layer_id in enumerate(MLA_LAYERS):
        keys, scales = vectors(3, seed=number).to(torch.float8_e4m3fn), vectors(3, seed=9)[:, :1].abs()
        for pool in (ours, stock):
            pool.set_index_k_scale_buffer(layer_id, torch.tensor([70, 191, 128 + number]), keys, scales)
            for position in range(4):
                decode(pool, layer_id, position)
    assert_same_index(ours, stock)
    waited = waits(ours)
    for layer_id in MLA_LAYERS:
        length, table = torch.tensor([66], dtype=torch.int32), torch.tensor([[2, 1]], dtype=torch.int32)
        pairs = zip(
            ours.get_index_k_scale_buffer(layer_id, length, table, 66, 66),
            stock.get_index_k_scale_buffer(layer_id, length, table, 66, 66),
            strict=True,
        )
        assert all(torch.equal(found, wanted) for found, wanted in pairs)
        assert torch.equal(*(pool.get_index_k_with_scale_buffer(layer_id) for pool in (ours, stock)))
        assert waited == [layer_id] * 2
        waited.clear()


@pooled_layouts
def test_cpu_copies_carry_the_tails_of_a_request(layout, monkeypatch):
    """To another request's tail, and to another page."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    ours, stock = both(layout)
    before, after = torch.arange(256, 512), torch.arange(512, 768)
    for pool in (ours, stock):
        for layer_id in MLA_LAYERS:
            for position in range(6):
                decode(pool, layer_id, position)
    was_tails = [[part.copy() for part in pair] for pair in tails(ours)]
    was_pages = [part.copy() for part in index_pages(ours)]
    for pool in (ours, stock):
        state = torch.tensor([1])
        saved = pool.get_cpu_copy(before, mamba_indices=state, req_pool_index=1)
        pool.load_cpu_copy(saved, after, mamba_indices=state, req_pool_index=3)
    assert_same_index(ours, stock)
    for number, pair in enumerate(tails(ours)):
        for found, was in zip(pair, was_tails[number], strict=True):
            was[3] = was[1]
            assert np.array_equal(found, was)
        was_pages[number][2] = was_pages[number][1]
        assert np.array_equal(index_pages(ours)[number], was_pages[number])


@pooled_layouts
def test_refusals_are_sglangs(layout):
    plain = hybrid_pool(layout, sparse=True)
    for pool in (plain, hybrid_pool(layout, sparse=True, stock=True)):
        with pytest.raises(AssertionError, match="kpool compress is disabled"):
            pool.get_compress_tail_buffers(3)
        with pytest.raises(AssertionError, match="kpool compress is disabled"):
            decode(pool, 3, 0)
        with pytest.raises(AssertionError, match="kpool compress is disabled"):
            pool.set_compress_tail_for_request(3, torch.tensor(1), None, None, 1, 0)
    for pool in both(layout):
        with pytest.raises(AssertionError, match="Moving pooled index keys"):
            pool.move_kv_cache(torch.tensor([3]), torch.tensor([1]))
        for layer_id in LINEAR_LAYERS:
            with pytest.raises(ValueError, match="not in full attention layers"):
                decode(pool, layer_id, 0)
