"""Statements about the encodings that hold for all values, beyond agreement with the oracle."""

import codec_oracle as oracle
import numpy as np
import pytest
import torch
from codec_oracle import LAYOUTS, assert_same_bytes, every_bf16, hard_rows, order_decides, row_format

from sgl_kvpool import env
from sgl_kvpool.codec import decode_rows, encode_rows, fake_quant, scalars, store_rows

pytestmark = pytest.mark.usefixtures("each_encoder")

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def test_products_with_reciprocals_round_as_quotients():
    """Every magnitude of bf16 at every scale, by a product and two additions instead of a division."""
    sizes = every_bf16().flatten()[:0x7F80].float()
    for scale in scalars.ue5m3_values(torch.arange(1, 0xF8)):
        exact = scalars.round_to_e2m1(sizes / scale)
        products = sizes * (1.0 / scale)
        quotients = (products.clamp(max=6.0) + 3072.0) - 3072.0
        assert torch.equal(scalars.round_to_e2m1(quotients), exact)
        # Without the two additions the errors are the same, although ties may go to the other neighbour.
        errors = (sizes - scalars.round_to_e2m1(products) * scale).abs()
        assert torch.equal(errors, (sizes - exact * scale).abs())


@pytest.mark.parametrize("sigma", [1e-6, 1e-5, 1e-4, 0.003, 1.0, 300.0])
def test_encoding_decoded_rows_keeps_their_values(sigma):
    """A million blocks: a row stays the same however often it goes to a narrower host tier and back."""
    fmt = row_format("fp4", 512, 0)
    generator = torch.Generator().manual_seed(3)
    values = (torch.randn(5461, 512, generator=generator) * sigma).bfloat16()
    once = decode_rows(encode_rows(values, None, fmt), fmt)
    assert once.any()
    assert torch.equal(decode_rows(encode_rows(once, None, fmt), fmt), once)


def test_every_block_of_two_levels_is_kept():
    """Each pair of a scale and a largest magnitude that an encoder stores, with every smaller magnitude."""
    largest = every_bf16().flatten()[1:0x7F80].float().numpy()
    fmt = row_format("fp4", 512, 0)
    for scale_byte in oracle.fp4_scale_bytes(largest):
        scale = torch.from_numpy(oracle.UE5M3[scale_byte]).float()
        top = scalars.round_to_e2m1(torch.from_numpy(largest) / scale)
        pairs = torch.stack([top, scale], -1).unique(dim=0)
        block = torch.minimum(E2M1.repeat(2), pairs[:, :1]) * pairs[:, 1:]  # [pairs, 16]
        rows = torch.nn.functional.pad(block, (0, 0, 0, -len(block) % 32)).view(-1, 512)
        assert torch.equal(decode_rows(encode_rows(rows, None, fmt), fmt, torch.float32), rows)


@pytest.mark.parametrize("name", LAYOUTS)
def test_check_finite_raises_for_encoded_segments_only(name, monkeypatch):
    monkeypatch.setenv(env.CHECK_FINITE, "1")
    fmt = row_format(name, 128, 64)
    good = torch.ones(3, 192)
    encode_rows(good[:, :128], good[:, 128:], fmt)
    for column, part, numbers in zip((7, 130), ("k_nope", "k_rope"), oracle.STORED[name], strict=True):
        bad = good.clone()
        bad[1, column] = float("nan")
        pool = torch.zeros(4, fmt.row_bytes, dtype=torch.uint8)
        if numbers == "bf16":
            encode_rows(bad[:, :128], bad[:, 128:], fmt)
            continue
        with pytest.raises(ValueError, match=rf"{part}\[1, {column % 128}\] is nan.*{env.CHECK_FINITE}"):
            encode_rows(bad[:, :128], bad[:, 128:], fmt)
        with pytest.raises(ValueError, match=part):
            store_rows(pool, torch.tensor([0, 1, 2]), bad[:, :128], bad[:, 128:], fmt)
        assert not pool.any()
        # A padded token may hold anything.
        store_rows(pool, torch.tensor([0, -1, 2]), bad[:, :128], bad[:, 128:], fmt)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", LAYOUTS)
def test_other_inputs_are_rounded_to_bf16_first(name, dtype):
    fmt = row_format(name, 128, 64)
    x = (torch.randn(50, 192) * 3).to(dtype)
    y = x.float().bfloat16()
    assert_same_bytes(encode_rows(x[:, :128], x[:, 128:], fmt), encode_rows(y[:, :128], y[:, 128:], fmt))


def test_errors_are_summed_in_the_order_of_the_rules():
    fmt = row_format("fp4", 128, 0)
    expected = oracle.encode(order_decides(), None, "fp4", 128, 0, fmt.row_bytes)
    assert_same_bytes(encode_rows(order_decides(), None, fmt), expected)


def test_no_tokens_of_numpy():
    """Such arrays have strides of 0."""
    none = torch.from_numpy(np.zeros((0, 128), np.float32))
    assert encode_rows(none, None, row_format("fp4", 128, 0)).shape == (0, 80)


def test_rows_that_overlap_are_not_written():
    fmt = row_format("fp4", 512, 64)
    pool = torch.zeros(4 * fmt.row_bytes, dtype=torch.uint8).as_strided((3, fmt.row_bytes), (100, 1))
    with pytest.raises(ValueError, match="row_buffer has a row stride of 100 bytes, less than the 416 bytes"):
        store_rows(pool, torch.tensor([1]), torch.zeros(1, 512), torch.zeros(1, 64), fmt)


@pytest.mark.parametrize("rope", [64, 0])
@pytest.mark.parametrize("name", LAYOUTS)
def test_fake_quant_is_what_is_read_back(name, rope):
    """By values that overflow, underflow and decide between scales, in the dtypes of a trainer."""
    nope, keys = hard_rows(9, 256, 3), hard_rows(9, rope, 4) if rope else None
    fmt = row_format(name, 256, rope)
    rows = encode_rows(nope, keys, fmt, k_scale=0.25)
    for dtype in (torch.bfloat16, torch.float32):
        found = fake_quant(nope.to(dtype), keys.to(dtype) if rope else None, name, 0.25)
        parts = decode_rows(rows, fmt, dtype, k_scale=0.25).split([256, rope], 1)
        assert (found[1] is None) == (not rope)
        for part, stored in zip(found[: 1 + bool(rope)], parts, strict=False):
            oracle.assert_same_values(part, stored)


@pytest.mark.parametrize("name", LAYOUTS)
def test_fake_quant_passes_gradients_unchanged(name):
    """Also where the value is clamped, and to one of the two inputs alone."""
    nope = (torch.randn(5, 128) * 1000).requires_grad_()  # fp8 clamps at 448
    rope, weights = torch.randn(5, 64, requires_grad=True), torch.randn(5, 192)
    values = fake_quant(nope, rope, name)
    (torch.cat(values, -1) * weights).sum().backward()
    assert torch.equal(torch.cat([nope.grad, rope.grad], -1), weights)
    rope.grad = None
    fake_quant(nope.detach(), rope, name)[1].sum().backward()
    assert torch.equal(rope.grad, torch.ones(5, 64))


@pytest.mark.parametrize("name", LAYOUTS)
def test_fake_quant_under_torch_func(name):
    """Nested transforms against a loop over the examples and gradients in float64; batches at any place."""
    nope, rope, weights = torch.randn(3, 4, 128), torch.randn(3, 4, 64), torch.randn(128)

    def rounded(nope, rope):
        return fake_quant(nope, rope, name, 0.5)

    def loss(nope, rope):
        nope, rope = rounded(nope, rope)
        return (nope @ weights).square().sum() + rope.pow(3).sum()

    alone = [torch.stack(part) for part in zip(*map(rounded, nope, rope), strict=True)]
    found = torch.func.vmap(rounded, (1, 2), (0, 1))(nope.movedim(0, 1), rope.movedim(0, 2))
    assert torch.equal(found[0], alone[0])
    assert torch.equal(found[1].movedim(1, 0), alone[1])
    shared = torch.func.vmap(rounded, (None, 0))(nope[0], rope)
    assert torch.equal(shared[0], alone[0][:1].expand(3, -1, -1))
    assert torch.equal(shared[1], alone[1])
    double, weights64 = [part.double() for part in alone], weights.double()
    expected = (2 * (double[0] @ weights64)[..., None] * weights64, 3 * double[1].square())
    together = torch.func.grad(lambda *parts: torch.func.vmap(loss)(*parts).sum(), (0, 1))
    for gradients in (torch.func.vmap(torch.func.grad(loss, (0, 1))), together):
        for got, want in zip(gradients(nope, rope), expected, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-3)
    tangents = torch.func.jvp(rounded, (nope[0], rope[0]), (nope[1], rope[1]))[1]
    assert torch.equal(torch.cat(tangents, -1), torch.cat([nope[1], rope[1]], -1))
    without_rope = torch.func.vmap(torch.func.vmap(lambda token: fake_quant(token[None], None, name)[0][0]))
    assert torch.equal(without_rope(nope), torch.stack([fake_quant(each, None, name)[0] for each in nope]))
