"""A model as SGLang's tree sees it: prompts are computed, evicted and continued."""

from array import array

import numpy as np
import torch
from host_tier import rows


class Request:
    """The attributes of a request that SGLang's tree reads."""

    def __init__(self, rid="r"):
        from sglang.srt.managers.schedule_batch import ReqKvInfo

        self.rid, self.kv, self.session = rid, ReqKvInfo(), None
        self.last_node = self.best_match_node = None
        self.host_hit_length = self.swa_host_hit_length = self.mamba_host_hit_length = 0


class TreeModel:
    """A tree with a host tier over row pools, used as the scheduler uses it."""

    def __init__(self, cache, pool, page_size):
        self.cache, self.pool, self.page_size = cache, pool, page_size

    @property
    def controller(self):
        return self.cache.cache_controller

    def row_layers(self):
        """Rows of all layers."""
        return rows(self.pool)

    def key(self, tokens):
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(array("q", tokens))

    def put_rows(self, tokens):
        """Write rows behind the cached prefix of a prompt; returns its slots and the prefix length."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        match = self.cache.match_prefix(MatchPrefixParams(key=self.key(tokens)))
        had = self.cache.path_device_indices(match.last_device_node)
        new = self.cache.token_to_kv_pool_allocator.alloc(len(tokens) - len(had))
        assert new is not None
        for layer, made in zip(self.row_layers(), self.row_bytes_of(tokens), strict=True):
            flat = np.array(layer)  # arranged rows are views with other strides
            flat.reshape(-1, flat.shape[-1])[new.numpy()] = made[len(had) :]
            layer[...] = flat
        return torch.cat([had, new]), len(had)

    def row_bytes(self, slots):
        """Rows of slots, `[layers, tokens, row_bytes]`."""
        return np.stack(
            [np.array(layer).reshape(-1, layer.shape[-1])[slots.numpy()] for layer in self.row_layers()]
        )

    def settle(self):
        """Submit backups and take their acknowledgements, as a scheduler's step does."""
        self.cache.check_hicache_events()
        self.cache.check_hicache_events()

    def go_on(self, tokens, request, **asked):
        """Slots of the prefix that a request for these tokens continues, loaded as the scheduler does."""
        from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, MatchPrefixParams

        match = self.cache.match_prefix(MatchPrefixParams(key=self.key(tokens), **asked))
        request.last_node, length = match.last_device_node, match.device_prefix_len
        request.host_hit_length, request.mamba_host_hit_length = (
            match.host_hit_length,
            match.mamba_host_hit_length,
        )
        if match.host_hit_length > 0 or match.mamba_host_hit_length > 0:
            lock = self.cache.inc_lock_ref(request.last_node)
            request.host_loaded_length, request.last_node = self.cache.init_load_back(
                InitLoadBackParams(
                    best_match_node=match.best_match_node, host_hit_length=match.host_hit_length, req=request
                )
            )
            self.cache.dec_lock_ref(match.last_device_node, lock.to_dec_params())
            length += request.host_loaded_length
        self.cache.ready_to_load_host_cache()
        return self.cache.path_device_indices(request.last_node)[:length]
