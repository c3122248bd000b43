"""Small hybrid models: real pools of rows and states, SGLang's tree and controller over them, on the CPU.

With sparse attention there are index keys too, and a packed draft (MTP) has its own rows. numpy finds all
bytes in SGLang's own tensors, without our views.
"""

import hashlib
import threading
from array import array
from types import SimpleNamespace

import dsa_pools
import numpy as np
import torch
from host_tier import GUARD, device_pool, rows
from tree_model import Request, TreeModel

#: A model of five layers: 1 and 4 are MLA layers, 0, 2 and 3 are linear layers.
ROW_LAYERS, STATE_LAYERS = [1, 4], [0, 2, 3]
#: (conv shapes, ssm shape, conv dtype, ssm dtype); no part of the second has a multiple of 16 bytes.
STATES = {
    "kda": ([(3, 96)], (2, 16, 16), torch.bfloat16, torch.float32),
    "odd": ([(3, 7), (2, 5)], (3, 5, 7), torch.bfloat16, torch.float32),
    "three-convs": ([(3, 32), (3, 16), (3, 8)], (2, 8, 8), torch.float32, torch.bfloat16),
    "no-ssm": ([(3, 24)], (0, 8, 8), torch.bfloat16, torch.float32),
}


def cache_params(kind="kda", layers=STATE_LAYERS):
    conv, temporal, conv_dtype, ssm_dtype = STATES[kind]
    return SimpleNamespace(
        shape=SimpleNamespace(conv=conv, temporal=temporal), layers=list(layers), is_kda=True,
        dtype=SimpleNamespace(conv=conv_dtype, temporal=ssm_dtype),
    )  # fmt: skip


def state_pool(kind="kda", slots=6, layers=STATE_LAYERS):
    from sglang.srt.mem_cache.memory_pool import MambaPool

    return MambaPool(
        size=slots, spec_state_size=0, cache_params=cache_params(kind, layers), mamba_layer_ids=list(layers),
        device="cpu",
    )  # fmt: skip


def state_tensors(pool):
    """`[layers, slots, bytes]` uint8 of each component in SGLang's order, writable."""
    found = []
    for states in (pool.mamba_cache.temporal, *pool.mamba_cache.conv):
        assert states.is_contiguous()
        if states.numel():
            raw = states.view(-1).view(torch.uint8).numpy()
            found.append(raw.reshape(*states.shape[:2], -1))
    return found


def state_bytes(pool, slot):
    """Bytes of a slot in the order of SGLang's stores: ssm of all layers, then each convolution."""
    return np.concatenate([part[:, slot].ravel() for part in state_tensors(pool)])


def fill_states(pool, seed=0):
    generator = np.random.default_rng(seed)
    for part in state_tensors(pool):
        part[...] = generator.integers(0, 256, part.shape, dtype=np.uint8)


def guard(*pools):
    for pool in pools:
        parts = state_tensors(pool) if hasattr(pool, "mamba_cache") else rows(pool)
        for part in parts:
            part[...] = GUARD


def hybrid_pool(
    layout,
    states,
    arrangement="layer_major",
    page_size=1,
    tokens=32,
    sparse=False,
    layers=ROW_LAYERS,
    **extra,
):
    from sgl_kvpool.layout import MLAKVCacheLayout
    from sgl_kvpool.srt.pool import LayoutHybridLinearKVPool, PoolOptions

    chosen = {name: extra.pop(name) for name in ("k_scales", "readers", "host_tier") if name in extra}
    shown = MLAKVCacheLayout(layout).sglang_kv_cache_dtype(is_dsa=sparse)
    if sparse:
        named = dsa_pools.arguments(layout)
        extra |= {"use_dsa": True, "index_head_dim": 128, "kv_cache_dim": named["kv_cache_dim"]}
    return LayoutHybridLinearKVPool(
        size=tokens, dtype={"bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}[shown],
        page_size=page_size, head_num=2, head_dim=8, device="cpu", full_attention_layer_ids=list(layers),
        mamba_pool=states, use_mla=True, kv_lora_rank=512, qk_rope_head_dim=64,
        options=PoolOptions(layout, arrangement=arrangement, **chosen), **extra,
    )  # fmt: skip


def draft_pool(kind, layout, states, page_size, tokens, sparse=False):
    """Pool of a packed draft with one layer; for hybrid models SGLang wraps it in a hybrid pool."""
    if kind == "hybrid":  # its states are the target's, and it has no layer of them
        return hybrid_pool(layout, states, page_size=page_size, tokens=tokens, sparse=sparse, layers=[0])
    assert kind == "plain"
    if sparse:
        return dsa_pools.dsa_pool(layout, size=tokens, page_size=page_size, layer_num=1, start_layer=0)
    pages = tokens // page_size + 1
    return device_pool(layout, page_size=page_size, pages=pages, layers=1, start_layer=0)


def request_pool(kind="kda", slots=6):
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    return HybridReqToTokenPool(
        size=4, mamba_size=slots, mamba_spec_state_size=0, max_context_len=64, device="cpu",
        enable_memory_saver=False, cache_params=cache_params(kind), mamba_layer_ids=STATE_LAYERS,
        enable_mamba_extra_buffer=True,
    )  # fmt: skip


def _bytes(of, size):
    return np.frombuffer(hashlib.shake_128(of).digest(size), dtype=np.uint8)


class Served:
    """Rows, index keys and state of the prefix that a request continues."""

    def __init__(self, tokens, row_bytes, index, state):
        self.tokens, self.rows, self.index, self.state = tokens, row_bytes, index, state


class Model(TreeModel):
    """A tree with a host tier over hybrid pools; records the rows, index keys and state of each prefix."""

    def __init__(self, cache, pool, requests, page_size, drafts=()):
        super().__init__(cache, pool, page_size)
        self.requests = requests
        self.rows, self.states = pool.row_pool, requests.mamba_pool
        # `full_kv_pool` is SGLang's name for the row pool in a hybrid pool; the target's layers come first.
        self.row_pools = [self.rows, *(getattr(draft, "full_kv_pool", draft) for draft in drafts)]

    @property
    def tiers(self):
        """Host tiers of rows and of states."""
        from sglang.srt.mem_cache.hicache_storage import PoolName

        entries = self.controller.mem_pool_host.entry_map
        return [entries[name].host_pool for name in (PoolName.KV, PoolName.MAMBA)]

    def row_layers(self):
        """Rows of all layers, drafts last."""
        return [layer for pool in self.row_pools for layer in rows(pool)]

    def index_layers(self):
        """Index keys `[pages, bytes]` of all layers, drafts last; empty without sparse attention."""
        from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

        sparse = [pool for pool in self.row_pools if isinstance(pool, DSATokenToKVPool)]
        return [layer for pool in sparse for layer in dsa_pools.index_pages(pool)]

    def row_bytes_of(self, tokens):
        """Rows of a prompt, `[layers, tokens, row_bytes]`; each row depends on all tokens before it."""
        layers = self.row_layers()
        size = len(layers) * layers[0].shape[-1]
        made = [_bytes(array("q", tokens[: i + 1]).tobytes(), size) for i in range(len(tokens))]
        return np.stack(made).reshape(len(tokens), len(layers), -1).transpose(1, 0, 2)

    def index_bytes_of(self, tokens):
        """Index keys of a prompt, `[layers, pages, bytes]`."""
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [
            np.stack(
                [
                    _bytes(b"index %d" % at + array("q", tokens[:end]).tobytes(), layer.shape[1])
                    for end in ends
                ]
            )
            for at, layer in enumerate(self.index_layers())
        ]

    def state_of(self, tokens):
        """The state after a prompt, as `state_bytes`."""
        size = sum(part[:, 0].size for part in state_tensors(self.states))
        return _bytes(b"state" + array("q", tokens).tobytes(), size)

    def put(self, tokens, settle=True):
        """Compute a prompt: new rows behind the prefix that the tree holds, and a state at its end.

        Without `settle`, its backup is not acknowledged, and locks them.
        """
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        slots, had = self.put_rows(tokens)
        state = self.requests.mamba_allocator.alloc(1)
        assert state is not None
        for layer, made in zip(self.index_layers(), self.index_bytes_of(tokens), strict=True):
            layer[self.pages_of(slots[had:])] = made[had // self.page_size :]
        raw = self.state_of(tokens)
        for part in state_tensors(self.states):
            part[:, int(state)] = raw[: part[:, 0].size].reshape(part[:, 0].shape)
            raw = raw[part[:, 0].size :]
        result = self.cache.insert(
            InsertParams(key=self.key(tokens), value=slots, mamba_value=state, prev_prefix_len=had)
        )
        if result.mamba_exist:
            self.requests.mamba_allocator.free(state)
        if settle:
            self.settle()

    def pages_of(self, slots):
        return slots.numpy()[:: self.page_size] // self.page_size

    def evict(self, tokens=1000, states=0):
        """Evict rows (with the states of their ends) or states from the device; guard the free slots."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.cache.evict(EvictParams(num_tokens=tokens, mamba_num=states))
        self.poison()

    def poison(self):
        """Guard bytes in every free slot of the device."""
        free = self.cache.token_to_kv_pool_allocator.free_pages.numpy()
        for layer in (*self.row_layers(), *self.index_layers()):
            layer[free] = GUARD
        for part in state_tensors(self.states):
            part[:, self.requests.mamba_allocator.free_slots.numpy()] = GUARD

    def serve(self, tokens):
        """Rows, index keys and state that a request for these tokens would continue."""
        request = Request()
        slots = self.go_on(tokens, request, cow_mamba=True, req=request)
        kv, state = request.kv, None
        if kv.mamba_cow_src_index is not None:
            state = state_bytes(self.states, int(kv.mamba_cow_src_index))
        elif kv.holds_mamba:
            state = state_bytes(self.states, int(kv.mamba_pool_idx))
        index = [np.array(layer[self.pages_of(slots)]) for layer in self.index_layers()]
        served = Served(len(slots), self.row_bytes(slots), index, state)
        if kv.holds_mamba:
            self.requests.mamba_allocator.free(kv.mamba_pool_idx.unsqueeze(0))
        self.settle()
        return served

    def check(self, tokens, length=None):
        """Length of the prefix found: rows, index keys and state must be that prefix's, or absent."""
        served = self.serve(tokens)
        if served.tokens == 0:
            assert served.state is None
        else:
            prefix = tokens[: served.tokens]
            assert np.array_equal(served.rows, self.row_bytes_of(prefix))
            for index, made in zip(served.index, self.index_bytes_of(prefix), strict=True):
                assert np.array_equal(index, made)
            assert served.state is not None, f"a prefix of {served.tokens} tokens without a state"
            assert np.array_equal(served.state, self.state_of(prefix))
        if length is not None:
            assert served.tokens == length
        return served.tokens


def make_model(
    args, process_group, pool, requests, page_size, monkeypatch, tree=None, drafts=(), **ranks
):  # fmt: skip
    """SGLang's tree with its host tier and our hooks; `ranks` are process groups and the pipeline stage."""
    from sglang.srt.arg_groups import overrides
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    # The chunk size of the model's kernels; there is no model config to derive it from.
    monkeypatch.setattr(overrides, "mamba_cache_chunk_size", lambda args: page_size)
    allocator = PagedTokenToKVPoolAllocator(
        pool.size, page_size=page_size, dtype=pool.dtype, device="cpu", kvcache=pool, need_sort=False
    )
    params = CacheInitParams(
        disable=False, req_to_token_pool=requests, token_to_kv_pool_allocator=allocator, page_size=page_size,
        tp_cache_group=process_group, enable_mamba_extra_buffer=True,
        tree_components=(ComponentType.FULL, ComponentType.MAMBA), tree_core_backend=tree,
        mtp_draft_device_pools=tuple(drafts), **ranks,
    )  # fmt: skip
    cache = UnifiedRadixCache(params)
    cache.init_hicache(args, params)
    cache.load_back_threshold = 1
    assert isinstance(cache.load_cache_event, type(threading.Event()))
    return Model(cache, pool, requests, page_size, drafts)
