"""Small real hybrid pools on the CPU, ours and SGLang's; the bytes of rows are found with numpy alone."""

from types import SimpleNamespace

import dsa_pools
import numpy as np
import torch
from codec_oracle import row_bytes

MLA_LAYERS, LINEAR_LAYERS = [1, 3, 4], [0, 2, 5]
PAGE, SIZE, SLOTS_OF_STATES = 4, 12, 6
LAYOUTS = dsa_pools.LAYOUTS
ARRANGEMENTS = ["layer_major", "token_major", "page_major"]
#: Bytes of a row with 512 latent and 64 rope values, and of a row without rope.
ROW_BYTES = {layout: (row_bytes(layout), row_bytes(layout, rope=0)) for layout in LAYOUTS}
#: Dtype that SGLang sees.
DTYPES = {layout: torch.float8_e4m3fn if layout == "fp8" else torch.bfloat16 for layout in LAYOUTS}

#: Arguments of SGLang's builder for pooled index keys; a page of 256 tokens has 64 keys.
POOLED = {
    "sparse": True, "page_size": 256, "size": 512, "index_kpool": 4, "index_kpool_compress": True,
    "tail_extra_slots": 2, "max_running_requests": 3,
}  # fmt: skip


def states(layer_ids=LINEAR_LAYERS, slots=SLOTS_OF_STATES):
    """SGLang's pool of conv and ssm states of KDA layers."""
    from sglang.srt.configs.mamba_utils import KimiLinearCacheParams, KimiLinearStateShape
    from sglang.srt.mem_cache.memory_pool import MambaPool

    shape = KimiLinearStateShape.create(tp_world_size=1, num_heads=3, head_dim=16)
    params = KimiLinearCacheParams(shape=shape, layers=list(layer_ids))
    return MambaPool(
        size=slots, spec_state_size=0, cache_params=params, mamba_layer_ids=list(layer_ids), device="cpu"
    )


def arguments(layout, rope=64, sparse=False, **extra):
    """The arguments SGLang's builder passes to its own class (`_build_hybrid_linear_kv_pool`)."""
    values = {
        "size": SIZE, "page_size": PAGE, "dtype": DTYPES[layout], "head_num": 2, "head_dim": 72,
        "full_attention_layer_ids": MLA_LAYERS, "device": "cpu", "mamba_pool": states(), "use_mla": True,
        "kv_lora_rank": 512, "qk_rope_head_dim": rope, "enable_memory_saver": False,
        "enable_kv_cache_copy": False, "start_layer": 0, "quant_method": None, "post_capture_active": False,
    }  # fmt: skip
    if sparse:
        named = dsa_pools.arguments(layout, 512, rope)
        values |= {
            "use_dsa": True, "size": named["size"], "page_size": named["page_size"], "dtype": named["dtype"],
            "index_head_dim": 128, "kv_cache_dim": named["kv_cache_dim"], "skip_topk_layers": None,
        }  # fmt: skip
    return {**values, **extra}


def hybrid_pool(
    layout, arrangement="layer_major", rope=64, sparse=False, k_scales=None, options=None, **extra
):
    """Our pool, as the plugin makes it; `options` are arguments of `bind`."""
    from sgl_kvpool.srt.pool import LayoutHybridLinearKVPool, PoolOptions

    chosen = PoolOptions(layout, k_scales, arrangement, **(options or {}))
    return LayoutHybridLinearKVPool(options=chosen, **arguments(layout, rope, sparse, **extra))


def stock_pool(layout, **extra):
    """SGLang's own pool: bf16 rows for the FP4 layouts and, in a dense pool, for `fp8_block_scale`."""
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

    return HybridLinearKVPool(**arguments(layout, **extra))


def place(layer_id):
    """Index of a model layer among the MLA layers: its layer id in the inner pool."""
    return MLA_LAYERS.index(layer_id)


def waits(pool):
    """A list that collects the layers that readers wait for from now on."""
    waited = []
    pool.register_layer_transfer_counter(SimpleNamespace(wait_until=waited.append))
    return waited


def rows(pool, layer_id):
    """Rows of a model layer by slot, `[slots, row_bytes]`: a view of the pool's bytes without its methods."""
    inner, place = pool.full_kv_pool, list(pool.full_attention_layer_id_mapping).index(layer_id)
    if inner.cross_layer is None:
        tensor = inner.kv_buffer[place]
        return tensor.view(torch.uint8).numpy().reshape(len(tensor), -1)
    everything = inner.cross_layer.view(torch.uint8).numpy().reshape(-1)
    layers, slots, page = inner.layer_num, pool.size + pool.page_size, pool.page_size
    if str(inner.kv_cache_arrangement) == "token_major":
        return everything.reshape(slots, layers, -1)[:, place]
    by_page = everything.reshape(slots // page, layers, page, -1)
    return _Paged(by_page[:, place])


class _Paged:
    """Rows of a page-major layer indexed by slot; numpy cannot merge page and token as a view."""

    def __init__(self, pages):
        self.pages = pages
        self.shape = (pages.shape[0] * pages.shape[1], pages.shape[2])

    def __len__(self):
        return self.shape[0]

    def __array__(self, dtype=None, copy=None):
        return self.pages.reshape(self.shape)

    def _at(self, slots):
        slots = np.arange(len(self))[slots]
        return slots // self.pages.shape[1], slots % self.pages.shape[1]

    def __getitem__(self, slots):
        return self.pages[self._at(slots)]

    def __setitem__(self, slots, value):
        self.pages[self._at(slots)] = value


def state_tensors(pool):
    """Conv and ssm states as SGLang holds them: name to `[layers, slots, ...]`."""
    cache = pool.mamba_pool.mamba_cache
    return {**{f"conv_{i}": tensor for i, tensor in enumerate(cache.conv)}, "ssm": cache.temporal}


def as_bytes(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()
