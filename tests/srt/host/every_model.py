"""One small model of every kind that a layout serves with a host tier, under SGLang's tree and controller.

Every byte that attention reads of a token (rows, index keys and states, the target's and the drafts') depends
on all tokens before it. numpy finds the bytes in SGLang's tensors, without views of the package.
"""

import functools
import hashlib
import threading
from array import array
from dataclasses import dataclass
from types import SimpleNamespace

import codec_oracle as oracle
import dsa_pools
import hybrid_tier
import numpy as np
import torch
from host_tier import GUARD, ROW_BYTES, device_pool
from tree_model import Request, TreeModel

RANK, ROPE = 512, 64


@dataclass(frozen=True)
class Kind:
    """Attention of the target, and its draft: packed with it, or with a tier of its own.

    A draft with "heads" stores keys and values of heads (EAGLE3), in SGLang's own host pool.
    """

    sparse: bool = False
    hybrid: bool = False
    packed: tuple[str, ...] = ()
    own: str | None = None


KINDS = {
    "dense": Kind(),
    "dense, packed draft": Kind(packed=("plain",)),
    "dense, own draft": Kind(own="dense"),
    "dense, own draft with heads": Kind(own="heads"),
    "DSA": Kind(sparse=True),
    "DSA, packed draft": Kind(sparse=True, packed=("plain",)),
    "DSA, own draft": Kind(sparse=True, own="sparse"),
    "DSA, own draft with heads": Kind(sparse=True, own="heads"),
    "hybrid": Kind(hybrid=True),
    "hybrid, packed draft": Kind(hybrid=True, packed=("hybrid",)),
    "hybrid DSA": Kind(hybrid=True, sparse=True),
    "hybrid DSA, packed draft": Kind(hybrid=True, sparse=True, packed=("hybrid",)),
    "hybrid DSA, own draft": Kind(hybrid=True, sparse=True, own="sparse"),
}


def _made(of, size):
    return np.frombuffer(hashlib.shake_128(of).digest(size), dtype=np.uint8)


def _encoded(values, layout):
    return oracle.encode(values[:, :RANK], values[:, RANK:], layout, RANK, ROPE, ROW_BYTES[layout])


@functools.lru_cache(maxsize=64)
def _made_rows(tokens, layers, layout):
    values = np.empty((len(tokens), layers, RANK + ROPE), dtype=np.float32)
    for end in range(1, len(tokens) + 1):
        seed = int.from_bytes(_made(array("q", tokens[:end]).tobytes(), 8).tobytes(), "little")
        values[end - 1] = np.random.default_rng(seed).standard_normal((layers, RANK + ROPE), np.float32)
    flat = torch.from_numpy(values.reshape(-1, RANK + ROPE)).to(torch.bfloat16)
    return _encoded(flat, layout).reshape(len(tokens), layers, -1).transpose(1, 0, 2)


def _rows(pool):
    """`[slots, row_bytes]` of each layer, writable."""
    return [layer.view(torch.uint8).numpy().reshape(len(layer), -1) for layer in pool.kv_buffer]


class EveryByte(TreeModel):
    """Writes, evicts and verifies all bytes of prefixes; free slots of the device hold guard bytes.

    A host tier with narrower rows returns the codec's round trip, which the oracle computes.
    """

    def __init__(self, cache, pool, page_size, requests, pools, host_layout):
        from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

        super().__init__(cache, pool, page_size)
        self.requests, self.pools, self.host_layout = requests, pools, host_layout
        self.layout = pools[0].kv_cache_layout.value
        self.slot_layers = [layer for each in pools if hasattr(each, "kv_buffer") for layer in _rows(each)]
        heads = [each for each in pools if not hasattr(each, "kv_buffer")]
        self.head_layers = [
            layer.view(len(layer), -1).view(torch.uint8).numpy()
            for each in heads
            for layer in (*each.k_buffer, *each.v_buffer)
        ]
        sparse = [each for each in pools if isinstance(each, DSATokenToKVPool)]
        self.index_layers = [layer for each in sparse for layer in dsa_pools.index_pages(each) if len(layer)]
        self.states = [] if requests is None else hybrid_tier.state_tensors(requests.mamba_pool)
        for host_pool in self.host_pools:
            host_pool.pin_memory = False  # SGLang's own pools pin the pages that they pass to a store

    def made_rows(self, tokens):
        """Rows of all layers, `[layers, tokens, row_bytes]`, encoded from values."""
        return _made_rows(tuple(tokens), len(self.slot_layers), self.layout)

    def made_index(self, tokens):
        """Index keys of all layers, `[layers, pages, bytes]`."""
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [
            [_made(b"%d index" % at + array("q", tokens[:end]).tobytes(), layer.shape[1]) for end in ends]
            for at, layer in enumerate(self.index_layers)
        ]

    def made_heads(self, tokens):
        """Keys and values of a draft with heads, `[layers, tokens, bytes]`."""
        ends = range(1, len(tokens) + 1)
        return [
            np.stack(
                [_made(b"%d heads" % at + array("q", tokens[:end]).tobytes(), layer.shape[1]) for end in ends]
            )
            for at, layer in enumerate(self.head_layers)
        ]

    def made_state(self, tokens):
        size = sum(part[:, 0].size for part in self.states)
        return _made(b"state" + array("q", tokens).tobytes(), size)

    def rounded(self, rows):
        """Rows after a round trip through the host's layout."""
        if self.host_layout == self.layout:
            return rows
        flat = np.ascontiguousarray(rows).reshape(-1, rows.shape[-1])
        for source, target in ((self.layout, self.host_layout), (self.host_layout, self.layout)):
            flat = _encoded(oracle.cast(oracle.decode(flat, source, RANK, ROPE), torch.bfloat16), target)
        return flat.reshape(rows.shape)

    # ---------------------------------------------------------------- what a scheduler does

    def put(self, tokens, settle=True):
        """Compute a prompt behind the device's prefix, and give the tree its rows and its state."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams

        match = self.cache.match_prefix(MatchPrefixParams(key=self.key(tokens)))
        had = self.cache.path_device_indices(match.last_device_node)
        new = self.cache.token_to_kv_pool_allocator.alloc(len(tokens) - len(had))
        assert new is not None
        for layer, made in zip(self.slot_layers, self.made_rows(tokens), strict=True):
            layer[new.numpy()] = made[len(had) :]
        for layer, made in zip(self.head_layers, self.made_heads(tokens), strict=True):
            layer[new.numpy()] = made[len(had) :]
        for layer, made in zip(self.index_layers, self.made_index(tokens), strict=True):
            for page, keys in zip(self._pages(new), made[len(had) // self.page_size :], strict=True):
                layer[page] = keys
        state = None
        if self.states:
            state = self.requests.mamba_allocator.alloc(1)
            assert state is not None
            raw = self.made_state(tokens)
            for part in self.states:
                part[:, int(state)] = raw[: part[:, 0].size].reshape(part[:, 0].shape)
                raw = raw[part[:, 0].size :]
        result = self.cache.insert(
            InsertParams(
                key=self.key(tokens), value=torch.cat([had, new]), mamba_value=state, prev_prefix_len=len(had)
            )
        )
        if state is not None and result.mamba_exist:
            self.requests.mamba_allocator.free(state)
        if settle:
            self.settle()

    def _pages(self, slots):
        return slots.numpy()[:: self.page_size] // self.page_size

    def evict(self, tokens=10_000, states=0):
        """Evict from the device, then overwrite whatever is free."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.cache.evict(EvictParams(num_tokens=tokens, mamba_num=states))
        pages = self.cache.token_to_kv_pool_allocator.free_pages.numpy()
        for layer in (*self.slot_layers, *self.head_layers):
            layer.reshape(-1, self.page_size, layer.shape[1])[pages] = GUARD
        for layer in self.index_layers:
            layer[pages] = GUARD
        for part in self.states:
            part[:, self.requests.mamba_allocator.free_slots.numpy()] = GUARD

    def check(self, tokens):
        """Tokens of the prefix that a request continues, each byte of which is verified."""
        request = Request()
        asked = {"cow_mamba": True, "req": request} if self.states else {}
        slots = self.go_on(tokens, request, **asked)
        prefix, kv = tokens[: len(slots)], request.kv
        if len(slots):
            made = self.made_rows(prefix)
            back = self.rounded(made)
            for at, layer in enumerate(self.slot_layers):
                found = layer[slots.numpy()]
                same = (found == made[at]).all(axis=1) | (found == back[at]).all(axis=1)
                assert same.all(), f"layer {at}: other rows at tokens {np.flatnonzero(~same)}"
            for at, (layer, heads) in enumerate(zip(self.head_layers, self.made_heads(prefix), strict=True)):
                assert np.array_equal(layer[slots.numpy()], heads), f"keys or values of draft layer {at}"
            for at, (layer, keys) in enumerate(zip(self.index_layers, self.made_index(prefix), strict=True)):
                assert np.array_equal(layer[self._pages(slots)], keys), f"index keys of layer {at}"
        if self.states:
            source = kv.mamba_cow_src_index if kv.mamba_cow_src_index is not None else kv.mamba_pool_idx
            assert (source is None) == (not prefix)
            if source is not None:
                found = np.concatenate([part[:, int(source)].ravel() for part in self.states])
                assert np.array_equal(found, self.made_state(prefix)), "state"
            if kv.holds_mamba:
                self.requests.mamba_allocator.free(kv.mamba_pool_idx.unsqueeze(0))
        self.settle()
        return len(prefix)

    @property
    def host_pools(self):
        return [entry.host_pool for entry in self.controller.mem_pool_host.entries]

    @property
    def host_bytes(self):
        """Bytes of the tensors of all host pools."""
        found = {}
        for pool in self.host_pools:
            for name in ("kv_buffer", "_buffer", "index_k_with_scale_buffer"):
                tensor = getattr(pool, name, None)
                if isinstance(tensor, torch.Tensor):
                    found[tensor.data_ptr()] = tensor.nbytes
        return sum(found.values())


def build(kind, args, process_group, layout, host_layout, page_size, pages, slots, tree):
    """The model of a kind: pools, then tree and host tier as `build_kv_cache` of SGLang builds them."""
    from sglang.srt.mem_cache import kv_cache_builder
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.hicache_auto_size import auto_size_hicache
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.speculative.base_spec_worker import HiCacheDraftMode, HiCacheDraftPlan

    from sgl_kvpool.transfer.host_options import HostTierOptions

    tokens, requests = pages * page_size, None
    options = {"host_tier": HostTierOptions(layout="same" if host_layout == layout else host_layout)}
    if kind.hybrid:
        requests = hybrid_tier.request_pool("kda", slots)

    def pool_of(draft=None):
        layers = 1 if draft else 2
        if draft == "hybrid" or (draft is None and kind.hybrid):
            return hybrid_tier.hybrid_pool(
                layout, requests.mamba_pool, page_size=page_size, tokens=tokens, sparse=kind.sparse,
                layers=[0] if draft else hybrid_tier.ROW_LAYERS, **options,
            )  # fmt: skip
        if draft == "heads":
            from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

            return MHATokenToKVPool(
                size=tokens, page_size=page_size, dtype=torch.bfloat16, head_num=4, head_dim=64, layer_num=1,
                device="cpu", enable_memory_saver=False,
            )  # fmt: skip
        if kind.sparse:
            skip = {} if draft else {"skip_topk_layers": [False, True, False]}
            return dsa_pools.dsa_pool(
                layout, options=options, size=tokens, page_size=page_size, start_layer=0,
                layer_num=1 if draft else 3, **skip,
            )  # fmt: skip
        return device_pool(
            layout, page_size=page_size, pages=pages + 1, layers=layers, start_layer=0, **options
        )

    pool = pool_of()
    packed = tuple(pool_of(draft) for draft in kind.packed)
    own = (pool_of(kind.own),) if kind.own else ()
    allocator = PagedTokenToKVPoolAllocator(
        pool.size, page_size=page_size, dtype=pool.dtype, device="cpu", kvcache=pool, need_sort=False
    )
    components = (ComponentType.FULL, ComponentType.MAMBA) if kind.hybrid else (ComponentType.FULL,)
    params = CacheInitParams(
        disable=False, req_to_token_pool=requests or SimpleNamespace(size=4), page_size=page_size,
        token_to_kv_pool_allocator=allocator, tp_cache_group=process_group,
        enable_mamba_extra_buffer=kind.hybrid, tree_components=components, tree_core_backend=tree,
        mtp_draft_device_pools=packed,
    )  # fmt: skip
    plan = None
    if packed or own:
        plan = HiCacheDraftPlan(HiCacheDraftMode.SIDECAR if own else HiCacheDraftMode.PACKED, own or packed)
    with auto_size_hicache(params, plan, enabled=True):
        cache = UnifiedRadixCache(params)
        cache.init_hicache(args, params)
        if plan is not None:
            kv_cache_builder.maybe_register_hicache_draft(tree_cache=cache, draft_plan=plan)
    cache.load_back_threshold = 1
    assert isinstance(cache.load_cache_event, type(threading.Event()))
    pools = [getattr(each, "full_kv_pool", each) for each in (pool, *packed, *own)]
    return EveryByte(cache, pool, page_size, requests, pools, host_layout)
