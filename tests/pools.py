"""Small real pools, ours and SGLang's, by default on the CPU; numpy alone finds all of their bytes."""

from types import SimpleNamespace

import numpy as np
import torch
from codec_oracle import LAYOUTS, row_bytes

#: Layers, first model layer and pages of pools of rows; page 0 takes the writes of padded tokens.
LAYERS, START, PAGES = 3, 5, 5
#: Of pools with sparse attention: first model layer, tokens of a page, slots beside that page.
DSA_START, DSA_PAGE, DSA_SIZE = 2, 64, 128
#: (latent, rope) of sparse attention: DeepSeek-V3.2 and GLM-5, a model without rope, one with 264-byte rows.
DSA_GEOMETRIES = [(512, 64), (512, 0), (256, 0)]
DSA_CASES = [(layout, *geometry) for layout in LAYOUTS for geometry in DSA_GEOMETRIES]
#: Layers of hybrid models with rows, and with states.
MLA_LAYERS, LINEAR_LAYERS = [1, 3, 4], [0, 2, 5]
ARRANGEMENTS = ["layer_major", "token_major", "page_major"]
#: Axes in memory, outermost first.
ORDER = {"layer_major": "LBNC", "token_major": "BNLC", "page_major": "BLNC"}
#: Dtype that SGLang sees; bfloat16 for rows that none of its kernels reads.
DTYPES = {layout: torch.float8_e4m3fn if layout == "fp8" else torch.bfloat16 for layout in LAYOUTS}
DSA_DTYPES = {**DTYPES, "fp8_block_scale": torch.float8_e4m3fn}
#: An index key has 128 one-byte values and a float32; a page of 64 has 64 x 128 bytes, then 64 x 4.
INDEX_BYTES, INDEX_PAGE_BYTES = 132, 64 * 132
#: Arguments of SGLang's builder for pooled index keys; a page of 256 tokens has 64 keys.
POOLED = {
    "sparse": True, "page_size": 256, "size": 512, "index_kpool": 4, "index_kpool_compress": True,
    "tail_extra_slots": 2, "max_running_requests": 3,
}  # fmt: skip
#: (conv shapes, ssm shape, conv dtype, ssm dtype); no part of the second has a multiple of 16 bytes.
STATES = {
    "kda": ([(3, 96)], (2, 16, 16), torch.bfloat16, torch.float32),
    "odd": ([(3, 7), (2, 5)], (3, 5, 7), torch.bfloat16, torch.float32),
    "three-convs": ([(3, 32), (3, 16), (3, 8)], (2, 8, 8), torch.float32, torch.bfloat16),
    "no-ssm": ([(3, 24)], (0, 8, 8), torch.bfloat16, torch.float32),
}
GUARD = 0xEE


# -------------------------------------------------------------------- factories

# Beside SGLang's arguments they take those of `PoolOptions`; with `stock` they make SGLang's own pool.


def device_pool(layout, arrangement="layer_major", page_size=4, pages=PAGES, layers=LAYERS, **extra):
    """The pool of a dense model."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    from sgl_kvpool.srt.pool.mla import LayoutMLATokenToKVPool

    values = {
        **_arguments(layout, (pages - 1) * page_size, page_size), "layer_num": layers, "start_layer": START,
    }  # fmt: skip
    return _made(MLATokenToKVPool, LayoutMLATokenToKVPool, layout, arrangement, {**values, **extra})


def dsa_row_bytes(layout, rank=512, rope=64):
    """Bytes of a row of a model with sparse attention, which is not padded."""
    return row_bytes(layout, rank, rope, align=1)


def dsa_arguments(layout, rank=512, rope=64):
    """Arguments for sparse attention: see `_build_dsa_kv_pool` and `calculate_mla_kv_cache_dim`."""
    scaled = layout == "fp8_block_scale"
    return {
        "dtype": DSA_DTYPES[layout], "kv_lora_rank": rank, "qk_rope_head_dim": rope, "index_head_dim": 128,
        "kv_cache_dim": dsa_row_bytes(layout, rank, rope) if scaled else rank + rope,
    }  # fmt: skip


def dsa_pool(layout, rank=512, rope=64, **extra):
    """The pool of a model with sparse attention."""
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

    from sgl_kvpool.srt.pool.dsa import LayoutDSATokenToKVPool

    values = {
        **_arguments(layout, DSA_SIZE, DSA_PAGE), **dsa_arguments(layout, rank, rope), "layer_num": LAYERS,
        "start_layer": DSA_START,
    }  # fmt: skip
    return _made(DSATokenToKVPool, LayoutDSATokenToKVPool, layout, "layer_major", {**values, **extra})


def hybrid_pool(layout, arrangement="layer_major", *, sparse=False, layers=MLA_LAYERS, **extra):
    """The pool of a hybrid model (`_build_hybrid_linear_kv_pool`), with new states unless given some."""
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

    from sgl_kvpool.srt.pool.hybrid import LayoutHybridLinearKVPool

    values = {
        **_arguments(layout, 12, 4), "head_num": 2, "head_dim": 72, "full_attention_layer_ids": layers,
        "use_mla": True, "enable_kv_cache_copy": False, "start_layer": 0, "quant_method": None,
        "post_capture_active": False,
    }  # fmt: skip
    if sparse:
        values |= {
            **dsa_arguments(layout), "use_dsa": True, "size": DSA_SIZE, "page_size": DSA_PAGE,
            "skip_topk_layers": None,
        }  # fmt: skip
    if "mamba_pool" not in extra:
        values["mamba_pool"] = state_pool()
    return _made(HybridLinearKVPool, LayoutHybridLinearKVPool, layout, arrangement, {**values, **extra})


def _arguments(layout, size, page_size):
    return {
        "size": size, "page_size": page_size, "dtype": DTYPES[layout], "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "device": "cpu", "enable_memory_saver": False,
    }  # fmt: skip


def _made(sglangs, ours, layout, arrangement, values):
    from sgl_kvpool.srt.pool.row_pool import PoolOptions

    if values.pop("stock", False):
        return sglangs(**values)
    options = {name: values.pop(name) for name in ("k_scales", "readers", "host_tier") if name in values}
    return ours(options=PoolOptions(layout, arrangement=arrangement, **options), **values)


def cache_params(kind="kda", layers=LINEAR_LAYERS):
    """What SGLang's configurations say of the states of linear layers."""
    conv, temporal, conv_dtype, ssm_dtype = STATES[kind]
    return SimpleNamespace(
        shape=SimpleNamespace(conv=conv, temporal=temporal), layers=list(layers), is_kda=True,
        dtype=SimpleNamespace(conv=conv_dtype, temporal=ssm_dtype),
    )  # fmt: skip


def state_pool(kind="kda", slots=6, layers=LINEAR_LAYERS):
    """SGLang's pool of conv and ssm states."""
    from sglang.srt.mem_cache.memory_pool import MambaPool

    return MambaPool(
        size=slots, spec_state_size=0, cache_params=cache_params(kind, layers), mamba_layer_ids=list(layers),
        device="cpu",
    )  # fmt: skip


# -------------------------------------------------------------------- bytes


def memory(pool):
    """The bytes of a pool's rows, one flat array per buffer."""
    pool = getattr(pool, "full_kv_pool", pool)
    if getattr(pool, "cross_layer", None) is None:
        return [layer.view(torch.uint8).view(-1).numpy() for layer in pool.kv_buffer]
    return [pool.cross_layer.view(-1).numpy().view(np.uint8)]


def rows(pool):
    """The rows of each layer, `[pages, tokens, row_bytes]`, writable; `at` is the place of slots in them."""
    flat, pool = memory(pool), getattr(pool, "full_kv_pool", pool)
    order = ORDER[getattr(pool, "kv_cache_arrangement", "layer_major")]
    pages = (pool.size + pool.page_size) // pool.page_size
    sizes = {"L": pool.layer_num, "B": pages, "N": pool.page_size}
    sizes["C"] = sum(map(len, flat)) // (pool.layer_num * pages * pool.page_size)
    if order[0] == "L":
        return [layer.reshape(pages, pool.page_size, sizes["C"]) for layer in flat]
    grid = flat[0].reshape([sizes[axis] for axis in order])
    return list(grid.transpose([order.index(axis) for axis in "LBNC"]))


def at(pool, slots):
    """Index of slots in `rows`."""
    return np.divmod(np.asarray(slots), pool.page_size)


def layer_ids(pool):
    """Model layers with rows."""
    if hasattr(pool, "full_kv_pool"):
        return list(pool.full_attention_layer_id_mapping)
    return list(range(pool.start_layer, pool.start_layer + pool.layer_num))


def index_pages(pool):
    """The index pages of each layer, `[pages, bytes]`; none without sparse attention."""
    pool = getattr(pool, "full_kv_pool", pool)
    return [pages.numpy() for pages in getattr(pool, "index_k_with_scale_buffer", ())]


def state_tensors(states):
    """`[layers, slots, bytes]` of each component of a pool of states in SGLang's order, writable."""
    found = []
    for part in (states.mamba_cache.temporal, *states.mamba_cache.conv):
        assert part.is_contiguous()
        if part.numel():
            found.append(part.view(-1).view(torch.uint8).numpy().reshape(*part.shape[:2], -1))
    return found


def everything(pool):
    """All bytes by ("rows" or "index", model layer) and ("states", component), writable."""
    if hasattr(pool, "mamba_cache"):
        return {("states", number): part for number, part in enumerate(state_tensors(pool))}
    found = {("rows", layer): part for layer, part in zip(layer_ids(pool), rows(pool), strict=True)}
    found |= {("index", layer): part for layer, part in zip(layer_ids(pool), index_pages(pool), strict=False)}
    return found | (everything(states) if (states := _states_of(pool)) is not None else {})


def _states_of(pool):
    return pool if hasattr(pool, "mamba_cache") else getattr(pool, "mamba_pool", None)


def guard(*pools, byte=GUARD):
    """Set every byte."""
    for pool in pools:
        of_rows = [] if hasattr(pool, "mamba_cache") else [*memory(pool), *index_pages(pool)]
        states = state_tensors(found) if (found := _states_of(pool)) is not None else []
        for part in (*of_rows, *states):
            part[...] = byte


def fill(pool, seed=0):
    """Different bytes everywhere; returns a copy."""
    generator = np.random.default_rng(seed)
    for part in everything(pool).values():
        part[...] = generator.integers(0, 256, part.shape, dtype=np.uint8)
    return copied(pool)


def copied(pool):
    return {name: part.copy() for name, part in everything(pool).items()}


def assert_holds(pool, wanted):
    """Every byte is that of `wanted`, as `copied` returns them."""
    for name, part in everything(pool).items():
        assert np.array_equal(part, wanted[name]), name


# -------------------------------------------------------------------- what is passed to pools


def layer(layer_id):
    """The layer object of a call."""
    return SimpleNamespace(layer_id=layer_id)


def values(tokens, rank=512, rope=64, seed=0):
    """Latent and rope of `tokens` tokens, bf16 `[tokens, 1, width]`, not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(tokens, 1, rank + 3 + rope, generator=generator, dtype=torch.bfloat16)
    return wide[..., :rank], wide[..., rank + 3 :]


def waits(pool):
    """A list that collects the layers that readers wait for from now on."""
    waited = []
    pool.register_layer_transfer_counter(SimpleNamespace(wait_until=waited.append))
    return waited
