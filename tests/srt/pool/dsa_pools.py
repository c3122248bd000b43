"""Small real pools of models with sparse attention on the CPU; their bytes are found with numpy alone."""

from types import SimpleNamespace

import codec_oracle as oracle
import numpy as np
import torch

LAYERS, START, PAGE, SIZE = (
    3,
    2,
    64,
    128,
)  # layers, first model layer, tokens of a page, slots without the padded page
SLOTS, PAGES = SIZE + PAGE, SIZE // PAGE + 1
LAYOUTS = oracle.LAYOUTS
#: (latent, rope): DeepSeek-V3.2 and GLM-5, a model without rope, a model with 264-byte rows.
GEOMETRIES = [(512, 64), (512, 0), (256, 0)]
CASES = [(layout, *geometry) for layout in LAYOUTS for geometry in GEOMETRIES]
#: Dtype that SGLang sees; bfloat16 for rows that none of its kernels reads.
DTYPES = {
    **dict.fromkeys(LAYOUTS, torch.bfloat16),
    "fp8": torch.float8_e4m3fn,
    "fp8_block_scale": torch.float8_e4m3fn,
}
#: An index key has 128 one-byte values and a float32; a page of 64 has 64 x 128 bytes, then 64 x 4.
INDEX_BYTES, INDEX_PAGE_BYTES = 132, 64 * 132
GUARD = 0xEE


def row_bytes(layout, rank=512, rope=64):
    """Bytes of an unpadded row."""
    return oracle.row_bytes(layout, rank, rope, align=1)


def arguments(layout, rank=512, rope=64, **extra):
    """Arguments of SGLang's own class: see `_build_dsa_kv_pool` and `calculate_mla_kv_cache_dim`."""
    values = {
        "size": SIZE, "page_size": PAGE, "dtype": DTYPES[layout], "kv_lora_rank": rank,
        "qk_rope_head_dim": rope, "layer_num": LAYERS, "start_layer": START, "index_head_dim": 128,
        "kv_cache_dim": row_bytes(layout, rank, rope) if layout == "fp8_block_scale" else rank + rope,
        "device": "cpu", "enable_memory_saver": False,
    }  # fmt: skip
    return {**values, **extra}


def dsa_pool(layout, rank=512, rope=64, options=None, **extra):
    """Our pool, as SGLang's builder makes it; `options` are those of `PoolOptions`."""
    from sgl_kvpool.srt.pool import LayoutDSATokenToKVPool, PoolOptions

    return LayoutDSATokenToKVPool(
        options=PoolOptions(layout, **(options or {})), **arguments(layout, rank, rope, **extra)
    )


def stock_pool(layout, rank=512, rope=64, **extra):
    """SGLang's own pool, which cannot hold FP4 latents."""
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

    return DSATokenToKVPool(**arguments(layout, rank, rope, **extra))


def layer(layer_id):
    return SimpleNamespace(layer_id=layer_id)


def values(tokens, rank, rope, seed=0):
    """Latent and rope of `tokens` tokens, bf16 `[tokens, 1, width]`, not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(tokens, 1, rank + 3 + rope, generator=generator, dtype=torch.bfloat16)
    return wide[..., :rank], wide[..., rank + 3 :]


def rows(pool, layer_id=None):
    """Bytes of a layer (by default of all layers), `[slots, row_bytes]`, without the pool's methods."""
    if layer_id is None:
        return [rows(pool, START + index) for index in range(len(pool.kv_buffer))]
    tensor = pool.kv_buffer[layer_id - START]
    return tensor.view(torch.uint8).numpy().reshape(len(tensor), -1)


def index_pages(pool):
    """Bytes of the index pages of each layer, `[pages, bytes]`."""
    return [tensor.numpy() for tensor in pool.index_k_with_scale_buffer]


def fill(pool, seed=0, with_index=True):
    """Different bytes in every row and every index page; returns copies of both."""
    generator = np.random.default_rng(seed)
    for part in [*rows(pool), *(index_pages(pool) if with_index else [])]:
        part[...] = generator.integers(0, 256, part.shape, dtype=np.uint8)
    return [part.copy() for part in rows(pool)], [part.copy() for part in index_pages(pool)]


def guard(pool):
    """Fill all rows and index pages with guard bytes."""
    for part in (*rows(pool), *index_pages(pool)):
        part[...] = GUARD
