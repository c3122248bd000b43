"""LayoutDSATokenToKVPool: what it returns to SGLang's readers, and what it refuses.

SGLang's own kernels read rows of `bf16`, `fp8` and `fp8_block_scale`. Such rows are compared with those of
SGLang's own pool, and with the output of SGLang's Triton kernels in the interpreter.
"""

import itertools

import codec_oracle as oracle
import numpy as np
import pools
import pytest
import torch
from pool_kinds import SHARED, Pool
from pools import DSA_GEOMETRIES, INDEX_PAGE_BYTES, LAYERS, dsa_pool, index_pages, layer
from pools import rows as pages_of_rows

pytestmark = pytest.mark.usefixtures("published")

LAYOUTS = oracle.LAYOUTS
SLOTS = 192
READ_BY_SGLANG = [case for case in pools.DSA_CASES if case[0] not in oracle.OURS_ALONE]
UNPACKED = [case for case in pools.DSA_CASES if case[0] not in oracle.PACKED]
#: Without slot 0, which SGLang's own writer skips.
LOC = [3, 7, 100, 1, 191]


def rows(pool, layer_id):
    """Rows of a layer by slot."""
    return pages_of_rows(pool)[layer_id - 2].reshape(-1, pages_of_rows(pool)[0].shape[-1])


def written(pool, rank, rope, seed=0):
    """Write the tokens of `LOC` to a layer; returns their latent and rope."""
    nope, keys = pools.values(len(LOC), rank, rope, seed)
    pool.set_mla_kv_buffer(layer(3), torch.tensor(LOC), nope, keys)
    return nope, keys


# -------------------------------------------------------------------- comparison with SGLang's own pool


@pytest.mark.parametrize(("layout", "rank", "rope"), READ_BY_SGLANG)
def test_keys_are_what_sglangs_pool_returns(layout, rank, rope):
    both = dsa_pool(layout, rank, rope), dsa_pool(layout, rank, rope, stock=True)
    for each in both:
        written(each, rank, rope)
    ours, stock = (each.get_key_buffer(3) for each in both)
    assert (ours.dtype, ours.shape, ours.stride()) == (stock.dtype, stock.shape, stock.stride())
    assert ours.data_ptr() == both[0].kv_buffer[1].data_ptr()  # a view of the live pool
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
        pools.dsa_row_bytes("fp8_block_scale", rank, rope),
    )  # fmt: skip
    wanted = oracle.decode(encoded[[4, 3, 4, 0]], "fp8_block_scale", rank, rope)
    assert np.array_equal(decoded.numpy(), wanted)


@pytest.mark.parametrize(("layout", "rank", "rope"), UNPACKED)
def test_values_are_what_sglangs_pool_returns(layout, rank, rope):
    both = dsa_pool(layout, rank, rope), dsa_pool(layout, rank, rope, stock=True)
    for each in both:
        written(each, rank, rope, seed=2)
    ours, stock = (each.get_value_buffer(3) for each in both)
    assert (ours.dtype, ours.shape, ours.stride()) == (stock.dtype, stock.shape, stock.stride())
    assert torch.equal(ours.view(torch.uint8), stock.view(torch.uint8))
    assert [part.shape for part in both[0].get_kv_buffer(3)] == [(SLOTS, 1, rank + rope), (SLOTS, 1, rank)]


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
    nope, keys = (part.to(torch.float8_e4m3fn) for part in pools.values(3, rank, rope, seed=3))
    both = torch.cat([nope, keys], -1)
    parts = (nope, keys) if method == "set_mla_kv_buffer" else (both, nope)
    getattr(pool, method)(layer(3), torch.tensor([1, 70, 71]), *parts)
    assert np.array_equal(rows(pool, 3)[[1, 70, 71]], both.squeeze(1).view(torch.uint8).numpy())


# -------------------------------------------------------------------- refusals and sizes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_dtype(layout):
    """SGLang uses `kv_cache_dim` only for e4m3, so the pool would have rows of another size."""
    other = next(dtype for dtype in pools.DSA_DTYPES.values() if dtype != pools.DSA_DTYPES[layout])
    with pytest.raises(ValueError, match=f"SGLang sees layout {layout} as {pools.DSA_DTYPES[layout]}, but"):
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
    text = f"read rows of {read}, which rows of KV cache layout {layout} do not have; .*-prefill-backend"
    with pytest.raises(ValueError, match=text):
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


# -------------------------------------------------------------------- index keys, with and without states

every_sparse_pool = pytest.mark.parametrize(
    ("kind", "layout"), list(itertools.product(["dsa", "hybrid-sparse"], LAYOUTS))
)


@every_sparse_pool
def test_index_pages_and_host_pools_are_declared(kind, layout):
    """As in SGLang's class: rows, and index keys unless pages of our host tier hold both."""
    pool = Pool(kind, layout).pool
    inner = getattr(pool, "full_kv_pool", pool)
    lengths = [0 if skipped else 3 for skipped in SHARED]
    assert [part.shape for part in index_pages(pool)] == [(pages, INDEX_PAGE_BYTES) for pages in lengths]
    pointers, sizes, page_sizes = inner.get_state_buf_infos()
    assert pointers == [tensor.data_ptr() for tensor in inner.index_k_with_scale_buffer]
    assert sizes == [pages * INDEX_PAGE_BYTES for pages in lengths]
    assert page_sizes == [INDEX_PAGE_BYTES if pages else 0 for pages in lengths]
    (kv,) = pool.host_pool_decls()
    assert (kv.pool_name.value, kv.is_primary, kv.device_pool) == ("kv", True, inner)
    # On CUDA, SGLang's own tier serves rows that are not packed.
    inner.device = "cuda"
    kv, *beside = pool.host_pool_decls()
    assert (kv.pool_name.value, kv.device_pool) == ("kv", inner)
    assert len(beside) == (layout in ("bf16", "fp8"))
    for indexer in beside:
        assert (indexer.pool_name.value, indexer.is_primary, indexer.device_pool) == ("indexer", False, inner)
        assert indexer.storage_info.bytes_per_token_per_layer == pools.INDEX_BYTES
        assert indexer.owned_device_layers == (0, 2)


@every_sparse_pool
def test_index_keys_are_written_and_read_as_sglang_does(kind, layout):
    case = Pool(kind, layout)
    pool, wanted, generator = case.pool, pools.copied(case.pool), torch.Generator().manual_seed(7)
    loc = torch.tensor([1, 64, 190])
    waited = pools.waits(pool)
    for place in (0, 2):
        layer_id, pages = case.layers[place], wanted["index", case.layers[place]]
        keys = torch.randn(3, 128, generator=generator).to(torch.float8_e4m3fn)
        scales = torch.rand(3, 1, generator=generator)
        pool.set_index_k_scale_buffer(layer_id, loc, keys, scales)
        assert waited == []  # as in SGLang's pool: only readers wait
        for number, slot in enumerate(loc.tolist()):
            page, token = divmod(slot, 64)
            pages[page, token * 128 : token * 128 + 128] = keys[number].view(torch.uint8).numpy()
            pages[page, 8192 + token * 4 : 8192 + token * 4 + 4] = scales[number].numpy().view(np.uint8)
        pools.assert_holds(pool, wanted)
        assert np.array_equal(pool.get_index_k_with_scale_buffer(layer_id).numpy(), pages)
        # A request of 70 tokens on pages 2 and 1, gathered by SGLang's kernel.
        length, table = torch.tensor([70], dtype=torch.int32), torch.tensor([[2, 1]], dtype=torch.int32)
        keys, scales = pool.get_index_k_scale_buffer(layer_id, length, table, 70, 70)
        request = pages[[2, 1]]
        assert np.array_equal(keys.view(torch.uint8).numpy(), request[:, :8192].reshape(-1, 128)[:70])
        assert np.array_equal(scales.view(torch.uint8).numpy(), request[:, 8192:].reshape(-1, 4)[:70])
        assert waited == [case.waits_for(layer_id)] * 2
        waited.clear()
