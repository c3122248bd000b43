"""Models as SGLang's tree sees them: prompts are computed, evicted and continued, and every byte is verified.

Real pools, tree, controller and host tier, made by SGLang with our hooks.
"""

import functools
import hashlib
import threading
from array import array
from types import SimpleNamespace

import codec_oracle as oracle
import numpy as np
import pools
import torch
from codec_oracle import ROW_BYTES
from host_tier import allocator_of
from pools import GUARD
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache import base_prefix_cache, kv_cache_builder
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hicache_auto_size import auto_size_hicache
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.base_spec_worker import HiCacheDraftMode, HiCacheDraftPlan

RANK, ROPE = 512, 64


def _made(of, size):
    return np.frombuffer(hashlib.shake_128(of).digest(size), dtype=np.uint8)


def _encoded(values, layout):
    return oracle.encode(values[:, :RANK], values[:, RANK:], layout, RANK, ROPE, ROW_BYTES[layout])


@functools.lru_cache(maxsize=256)
def _made_rows(tokens, layers, layout):
    values = np.empty((len(tokens), layers, RANK + ROPE), dtype=np.float32)
    for end in range(1, len(tokens) + 1):
        seed = int.from_bytes(_made(array("q", tokens[:end]).tobytes(), 8).tobytes(), "little")
        values[end - 1] = np.random.default_rng(seed).standard_normal((layers, RANK + ROPE), np.float32)
    flat = torch.from_numpy(values.reshape(-1, RANK + ROPE)).to(torch.bfloat16)
    return _encoded(flat, layout).reshape(len(tokens), layers, -1).transpose(1, 0, 2)


class Request:
    """The attributes of a request that SGLang's tree reads."""

    def __init__(self, rid="r"):
        self.rid, self.kv, self.session = rid, ReqKvInfo(), None
        self.last_node = self.best_match_node = None
        self.host_hit_length = self.swa_host_hit_length = self.mamba_host_hit_length = 0


class Model:
    """Writes, evicts and verifies all bytes of prefixes; free slots of the device hold guard bytes.

    A host tier with narrower rows returns the codec's round trip, which the oracle computes. Layers of drafts
    come behind the target's. With `--dcp-size` this is one of the ranks, with its own rows of the target.
    """

    def __init__(self, cache, pool, requests=None, drafts=()):
        self.cache, self.pool, self.page_size, self.requests = cache, pool, cache.page_size, requests
        self.rank = get_parallel().attn_dcp_rank
        self.layout, host = pool.kv_cache_layout.value, pool.host_tier.layout
        self.host_layout = self.layout if host == "same" else host
        of_rows = [each for each in (pool, *drafts) if not hasattr(each, "k_buffer")]
        self.row_layers = [layer for each in of_rows for layer in pools.rows(each)]
        self.head_layers = [
            layer.view(-1, self.page_size, layer[0].numel()).view(torch.uint8).numpy()
            for each in drafts
            if each not in of_rows
            for layer in (*each.k_buffer, *each.v_buffer)
        ]
        spread = [each.dcp_size for each in of_rows for _ in pools.rows(each)]
        self.ranks = spread + [1] * len(self.head_layers)
        # With `--dcp-size` a page of the tree has several pages of index keys, which all ranks have.
        self.index_layers = [
            layer.reshape(each.size // each.page_size + 1, -1)
            for each in of_rows
            for layer in pools.index_pages(each)
            if len(layer)
        ]
        self.states = [] if requests is None else pools.state_tensors(requests.mamba_pool)
        for host_pool in self.host_pools:
            host_pool.pin_memory = False  # SGLang's own pools pin the pages that they pass to a store

    # ---------------------------------------------------------------- what SGLang has

    @property
    def controller(self):
        return self.cache.cache_controller

    @property
    def host_pools(self):
        return [entry.host_pool for entry in self.controller.mem_pool_host.entries]

    @property
    def tier(self):
        """Host tier of rows."""
        return self.controller.mem_pool_host.anchor_entry.host_pool

    @property
    def tiers(self):
        """Host tiers of rows and of states."""
        entries = self.controller.mem_pool_host.entry_map
        return [entries[name].host_pool for name in (PoolName.KV, PoolName.MAMBA)]

    def free(self):
        """Free slots of the device: of rows, and of states."""
        found = [self.cache.token_to_kv_pool_allocator.available_size()]
        return found if self.requests is None else [*found, self.requests.mamba_allocator.available_size()]

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

    # ---------------------------------------------------------------- what a prompt's tokens have

    def rows_of(self, tokens):
        """Rows of all layers, `[layers, tokens, row_bytes]`; each depends on all tokens before it."""
        return _made_rows(tuple(tokens), len(self.row_layers), self.layout)

    def index_of(self, tokens):
        """Index keys of all layers, `[layers, pages, bytes]`."""
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return self._made_of(b"index", tokens, ends, self.index_layers)

    def heads_of(self, tokens):
        """Keys and values of a draft with heads, `[layers, tokens, bytes]`."""
        return self._made_of(b"heads", tokens, range(1, len(tokens) + 1), self.head_layers)

    def _made_of(self, what, tokens, ends, layers):
        starts = [array("q", tokens[:end]).tobytes() for end in ends]
        return [
            [_made(b"%d %s" % (n, what) + start, layer.shape[-1]) for start in starts]
            for n, layer in enumerate(layers)
        ]

    def state_of(self, tokens):
        """The state after a prompt, in the order of SGLang's stores: ssm of all layers, then convolutions."""
        size = sum(part[:, 0].size for part in self.states)
        return _made(b"state" + array("q", tokens).tobytes(), size)

    def rounded(self, rows):
        """Rows after a round trip through the host's layout."""
        flat = np.ascontiguousarray(rows).reshape(-1, rows.shape[-1])
        for source, target in ((self.layout, self.host_layout), (self.host_layout, self.layout)):
            flat = _encoded(oracle.cast(oracle.decode(flat, source, RANK, ROPE), torch.bfloat16), target)
        return flat.reshape(rows.shape)

    # ---------------------------------------------------------------- what a scheduler does

    def key(self, tokens):
        return RadixKey(array("q", tokens))

    def match(self, tokens, **asked):
        return self.cache.match_prefix(base_prefix_cache.MatchPrefixParams(key=self.key(tokens), **asked))

    def put(self, *prompts, settle=True):
        """Compute prompts behind the device's prefixes, and give the tree their rows and states.

        Without `settle`, their backups are not acknowledged, and lock them.
        """
        for tokens in prompts:
            self._compute(tokens)
            if settle:
                self.settle()

    def returned(self, *prompts):
        """Lengths that requests continue of prompts that were computed and evicted."""
        self.put(*prompts)
        self.evict()
        return [self.check(tokens) for tokens in prompts]

    def _compute(self, tokens):
        match = self.match(tokens)
        had = self.cache.path_device_indices(match.last_device_node)
        new = self.cache.token_to_kv_pool_allocator.alloc(len(tokens) - len(had))
        assert new is not None
        made = [*self.rows_of(tokens), *self.heads_of(tokens)]
        for layer, ranks, part in zip([*self.row_layers, *self.head_layers], self.ranks, made, strict=True):
            own, place = self._stored(new, ranks)
            if len(new):
                layer[place] = np.asarray(part[len(had) :])[own]
        for layer, keys in zip(self.index_layers, self.index_of(tokens), strict=True):
            for page, part in zip(self._pages(new), keys[len(had) // self.page_size :], strict=True):
                layer[page] = part
        state = None
        if self.states:
            state = self.requests.mamba_allocator.alloc(1)
            assert state is not None
            raw = self.state_of(tokens)
            for part in self.states:
                part[:, int(state)] = raw[: part[:, 0].size].reshape(part[:, 0].shape)
                raw = raw[part[:, 0].size :]
        given = {"value": torch.cat([had, new]), "mamba_value": state, "prev_prefix_len": len(had)}
        result = self.cache.insert(base_prefix_cache.InsertParams(key=self.key(tokens), **given))
        if state is not None and result.mamba_exist:
            self.requests.mamba_allocator.free(state)

    def settle(self):
        """Submit backups and take their acknowledgements, as a scheduler's step does."""
        self.cache.check_hicache_events()
        self.cache.check_hicache_events()

    def _stored(self, slots, ranks):
        """Which of some tokens this rank stores of a layer spread over `ranks`, and where."""
        tokens = np.flatnonzero(slots.numpy() % ranks == self.rank % ranks)
        return tokens, np.divmod(slots.numpy()[tokens] // ranks, self.page_size // ranks)

    def _pages(self, slots):
        return slots.numpy()[:: self.page_size] // self.page_size

    def evict(self, tokens=10_000, states=0):
        """Evict rows (with the states of their ends) or states from the device; overwrite what is free."""
        self.cache.evict(base_prefix_cache.EvictParams(num_tokens=tokens, mamba_num=states))
        pages = self.cache.token_to_kv_pool_allocator.free_pages.numpy()
        for layer in (*self.row_layers, *self.head_layers, *self.index_layers):
            layer[pages] = GUARD
        for part in self.states:
            part[:, self.requests.mamba_allocator.free_slots.numpy()] = GUARD

    def forget(self):
        """Evict all pages from the host."""
        while self.cache.evict_host(1000):
            pass

    def go_on(self, tokens, request):
        """Slots of the prefix that a request for these tokens continues, loaded as the scheduler does."""
        asked = {"cow_mamba": True, "req": request} if self.states else {}
        match = self.match(tokens, **asked)
        request.last_node, length = match.last_device_node, match.device_prefix_len
        request.host_hit_length = match.host_hit_length
        request.mamba_host_hit_length = match.mamba_host_hit_length
        if match.host_hit_length > 0 or match.mamba_host_hit_length > 0:
            lock = self.cache.inc_lock_ref(request.last_node)
            request.host_loaded_length, request.last_node = self.cache.init_load_back(
                base_prefix_cache.InitLoadBackParams(
                    best_match_node=match.best_match_node, host_hit_length=match.host_hit_length, req=request
                )
            )
            self.cache.dec_lock_ref(match.last_device_node, lock.to_dec_params())
            length += request.host_loaded_length
        self.cache.ready_to_load_host_cache()
        return self.cache.path_device_indices(request.last_node)[:length]

    def check(self, tokens, length=None):
        """Length of the prefix that a request continues; each of its bytes is verified."""
        request = Request()
        slots, kv = self.go_on(tokens, request), request.kv
        prefix = tokens[: len(slots)]
        if prefix:
            self.verify(prefix, slots)
        if self.states:
            source = kv.mamba_cow_src_index if kv.mamba_cow_src_index is not None else kv.mamba_pool_idx
            assert (source is None) == (not prefix)
            if source is not None:
                found = np.concatenate([part[:, int(source)].ravel() for part in self.states])
                assert np.array_equal(found, self.state_of(prefix)), "state"
            if kv.holds_mamba:
                self.requests.mamba_allocator.free(kv.mamba_pool_idx.unsqueeze(0))
        self.settle()
        if length is not None:
            assert len(prefix) == length
        return len(prefix)

    def verify(self, prefix, slots):
        """Compare all bytes of slots with those of a prefix, computed or from the host."""
        made = self.rows_of(prefix)
        back = made if self.host_layout == self.layout else self.rounded(made)
        for n, layer in enumerate(self.row_layers):
            own, place = self._stored(slots, self.ranks[n])
            found = layer[place]
            same = (found == made[n][own]).all(axis=1) | (found == back[n][own]).all(axis=1)
            assert same.all(), f"layer {n}: other rows at tokens {own[~same]}"
        _, place = self._stored(slots, 1)
        for n, (layer, heads) in enumerate(zip(self.head_layers, self.heads_of(prefix), strict=True)):
            assert np.array_equal(layer[place], heads), f"keys or values of draft layer {n}"
        for n, (layer, keys) in enumerate(zip(self.index_layers, self.index_of(prefix), strict=True)):
            assert np.array_equal(layer[self._pages(slots)], keys), f"index keys of layer {n}"


def build(args, groups, pool, requests=None, packed=(), own=(), tree=None):
    """The model of pools, whose tree and host tier are made as `build_kv_cache` of SGLang makes them.

    `groups` are the process groups and the pipeline stage of the tree.
    """
    allocator = allocator_of(pool)
    components = (ComponentType.FULL,) if requests is None else (ComponentType.FULL, ComponentType.MAMBA)
    params = CacheInitParams(
        disable=False, req_to_token_pool=requests or SimpleNamespace(size=4), page_size=allocator.page_size,
        token_to_kv_pool_allocator=allocator, enable_mamba_extra_buffer=requests is not None,
        tree_components=components, tree_core_backend=tree, mtp_draft_device_pools=tuple(packed), **groups,
    )  # fmt: skip
    plan = None
    if packed or own:
        plan = HiCacheDraftPlan(HiCacheDraftMode.SIDECAR if own else HiCacheDraftMode.PACKED, own or packed)
    world = SimpleNamespace(cpu_group=groups["tp_cache_group"])
    with get_parallel().override(world_group=world), auto_size_hicache(params, plan, enabled=True):
        cache = UnifiedRadixCache(params)
        cache.init_hicache(args, params)
        if plan is not None:
            kv_cache_builder.maybe_register_hicache_draft(tree_cache=cache, draft_plan=plan)
    cache.load_back_threshold = 1
    assert isinstance(cache.load_cache_event, type(threading.Event()))
    return Model(cache, pool, requests, (*packed, *own))
