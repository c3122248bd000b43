"""LayoutDSATokenToKVPool: what it returns to SGLang's readers, and what it refuses.

SGLang's own kernels read rows of `bf16`, `fp8` and `fp8_block_scale`. Such rows are compared with those of
SGLang's own pool, and with the output of SGLang's Triton kernels in the interpreter.
"""

import codec_oracle as oracle
import numpy as np
import pytest
import torch
from pools import (
    DSA_CASES,
    DSA_DTYPES,
    DSA_GEOMETRIES,
    INDEX_PAGE_BYTES,
    LAYERS,
    dsa_pool,
    dsa_row_bytes,
    index_pages,
    layer,
    values,
)
from pools import rows as pages_of_rows

pytestmark = pytest.mark.usefixtures("published")

LAYOUTS = oracle.LAYOUTS
SLOTS = 192
READ_BY_SGLANG = [case for case in DSA_CASES if case[0] not in oracle.OURS_ALONE]
#: Without slot 0, which SGLang's own writer skips.
LOC = [3, 7, 100, 1, 191]


def rows(pool, layer_id):
    """Rows of a layer by slot."""
    return pages_of_rows(pool)[layer_id - 2].reshape(-1, pages_of_rows(pool)[0].shape[-1])


def written(pool, rank, rope, seed=0):
    """Write the tokens of `LOC` to a layer; returns their latent and rope."""
    nope, keys = values(len(LOC), rank, rope, seed)
    pool.set_mla_kv_buffer(layer(3), torch.tensor(LOC), nope, keys)
    return nope, keys


# -------------------------------------------------------------------- comparison with SGLang's own pool


@pytest.mark.parametrize(("layout", "rank", "rope"), READ_BY_SGLANG)
def test_keys_are_what_sglangs_pool_returns(layout, rank, rope):
    pools = dsa_pool(layout, rank, rope), dsa_pool(layout, rank, rope, stock=True)
    for each in pools:
        written(each, rank, rope)
    ours, stock = (each.get_key_buffer(3) for each in pools)
    assert (ours.dtype, ours.shape, ours.stride()) == (stock.dtype, stock.shape, stock.stride())
    assert ours.data_ptr() == pools[0].kv_buffer[1].data_ptr()  # a view of the live pool
    if layout != "fp8_block_scale":  # the interpreter rounds some of its values wrongly
        oracle.assert_same_bytes(*(each.view(torch.uint8)[LOC, 0] for each in (ours, stock)))


@pytest.mark.parametrize(("rank", "rope"), DSA_GEOMETRIES)
def test_scaled_rows_are_what_sglangs_quantiser_makes(rank, rope):
    """SGLang's kernel with float32 results, which torch rounds: the interpreter's e4m3 loses carries."""
    from sglang.kernels.ops.quantization import dsa_quant_k_cache

    pool = dsa_pool("fp8_block_scale", rank, rope)
    nope, keys = (part.squeeze(1).contiguous() for part in written(pool, rank, rope))
    tiles = rank // 128
    scaled, scales = torch.zeros(len(LOC), rank), torch.zeros(len(LOC), tiles)
    copied = torch.zeros(len(LOC), rope, dtype=torch.bfloat16)
    dsa_quant_k_cache._quantize_k_cache_fast_kernel[(len(LOC), tiles + (rope > 0))](
        scaled, scales, copied, nope, keys,
        *(part.stride(0) for part in (scaled, scales, copied, nope, keys)),
        NUM_NOPE_BLOCKS=tiles, GROUP_SIZE=128, DIM_NOPE=rank, DIM_ROPE=rope, FP8_MIN=-448.0, FP8_MAX=448.0,
    )  # fmt: skip
    stored = rows(pool, 3)[LOC]
    oracle.assert_same_bytes(stored[:, rank : rank + 4 * tiles], scales.numpy().view(np.uint8))
    oracle.assert_same_bytes(stored[:, rank + 4 * tiles :], copied.view(torch.uint8).numpy())
    codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8).numpy().astype(int)
    apart = np.abs(codes - stored[:, :rank])
    # SGLang multiplies by the reciprocal of a scale, we divide: at most one step apart, at ties.
    assert apart.max() <= 1
    assert (apart != 0).mean() < 0.02


def on_a_cpu(module, monkeypatch):
    """SGLang's function with float32 results: the interpreter stores its bf16 results wrongly."""

    class Torch:
        def __getattr__(self, name):
            return getattr(torch, name)

        def empty(self, *shape, dtype, **extra):
            return torch.empty(*shape, dtype=torch.float32 if dtype == torch.bfloat16 else dtype, **extra)

    monkeypatch.setattr(module, "torch", Torch())


@pytest.mark.parametrize(("rank", "rope"), DSA_GEOMETRIES)
def test_sglangs_kernel_decodes_scaled_rows(monkeypatch, rank, rope):
    """`dequantize_k_cache_paged_dsa`, with which SGLang's prefill reads the prefix."""
    from sglang.kernels.ops.attention.dsa import dequant_k_cache

    on_a_cpu(dequant_k_cache, monkeypatch)
    pool = dsa_pool("fp8_block_scale", rank, rope)
    nope, keys = written(pool, rank, rope, seed=1)
    slots = torch.tensor([191, 1, 191, 3], dtype=torch.int32)
    decoded = dequant_k_cache.dequantize_k_cache_paged_dsa(pool.get_key_buffer(3), slots).squeeze(1)
    encoded = oracle.encode(
        nope.squeeze(1), keys.squeeze(1), "fp8_block_scale", rank, rope,
        dsa_row_bytes("fp8_block_scale", rank, rope),
    )  # fmt: skip
    wanted = oracle.decode(encoded[[4, 3, 4, 0]], "fp8_block_scale", rank, rope)
    assert np.array_equal(decoded.numpy(), wanted)


@pytest.mark.parametrize(("layout", "rank", "rope"), [c for c in DSA_CASES if c[0] not in oracle.PACKED])
def test_values_are_what_sglangs_pool_returns(layout, rank, rope):
    pools = dsa_pool(layout, rank, rope), dsa_pool(layout, rank, rope, stock=True)
    for each in pools:
        written(each, rank, rope, seed=2)
    ours, stock = (each.get_value_buffer(3) for each in pools)
    assert (ours.dtype, ours.shape, ours.stride()) == (stock.dtype, stock.shape, stock.stride())
    assert torch.equal(ours.view(torch.uint8), stock.view(torch.uint8))
    assert [part.shape for part in pools[0].get_kv_buffer(3)] == [(SLOTS, 1, rank + rope), (SLOTS, 1, rank)]


@pytest.mark.parametrize("layout", oracle.PACKED)
@pytest.mark.parametrize("getter", ["get_value_buffer", "get_kv_buffer"])
def test_packed_rows_have_no_values(layout, getter):
    with pytest.raises(TypeError, match=r"get_row_buffer\(layer_id\)$"):  # kvpool_mla reads no DSA pools
        getattr(dsa_pool(layout), getter)(3)


@pytest.mark.parametrize("method", ["set_mla_kv_buffer", "set_kv_buffer"])
@pytest.mark.parametrize(("rank", "rope"), DSA_GEOMETRIES)
def test_values_that_are_e4m3_already(rank, rope, method):
    """Raw rows store e4m3 values unchanged: SGLang's fused rope kernel returns them."""
    pool = dsa_pool("fp8", rank, rope)
    nope, keys = (part.to(torch.float8_e4m3fn) for part in values(3, rank, rope, seed=3))
    both = torch.cat([nope, keys], -1)
    parts = (nope, keys) if method == "set_mla_kv_buffer" else (both, nope)
    getattr(pool, method)(layer(3), torch.tensor([1, 70, 71]), *parts)
    assert np.array_equal(rows(pool, 3)[[1, 70, 71]], both.squeeze(1).view(torch.uint8).numpy())


# -------------------------------------------------------------------- refusals and sizes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_dtype(layout):
    """SGLang uses `kv_cache_dim` only for e4m3, so the pool would have rows of another size."""
    other = next(dtype for dtype in DSA_DTYPES.values() if dtype != DSA_DTYPES[layout])
    with pytest.raises(ValueError, match=f"SGLang sees layout {layout} as {DSA_DTYPES[layout]}, but"):
        dsa_pool(layout, dtype=other)


@pytest.mark.parametrize(
    ("layout", "kv_cache_dim", "read"),
    [
        # 576 and 656 are the kv_cache_dim of raw and of scaled rows.
        ("fp8_block_scale", 576, "576 values"),
        ("fp8", 656, "656 bytes"),
        ("bf16", 656, "656 values"),
        ("fp4", 416, "416 values"),
    ],
)
def test_rows_of_other_readers_are_refused_before_they_are_allocated(monkeypatch, layout, kv_cache_dim, read):
    allocated = []
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: allocated.append(a) or zeros(*a, **k))
    with pytest.raises(
        ValueError,
        match=f"read rows of {read}, which rows of KV cache layout {layout} do not have; .*-prefill-backend",
    ):
        dsa_pool(layout, kv_cache_dim=kv_cache_dim)
    assert not allocated


def test_pooled_index_keys():
    """As in GLM-5's successor: a page of index keys covers 256 tokens."""
    kpool = {"index_kpool": 4, "page_size": 256, "size": 512}
    pool = dsa_pool("bf16", **kpool)
    assert pool.get_kv_size_bytes() == LAYERS * 768 * (1152 + 33)
    nope, keys = written(pool, 512, 64)
    assert np.array_equal(rows(pool, 3)[LOC], oracle.encode(nope[:, 0], keys[:, 0], "bf16", 512, 64, 1152))


def test_a_pool_of_no_whole_number_of_pages():
    """SGLang rounds the number of index pages up."""
    pool = dsa_pool("fp4", size=100)
    assert [part.shape for part in pool.kv_buffer] == [(164, 1, 416)] * LAYERS
    assert [part.shape for part in index_pages(pool)] == [(2, INDEX_PAGE_BYTES)] * LAYERS
