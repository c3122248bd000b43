"""One of three processes whose ranks share a host tier: SGLang's tree, controller and store in each.

`python sharing_ranks.py RANK FOLDER CASE ...`, with pytest's path, goes through cases together with the other
ranks, over gloo, and writes what it saw. A rank that waits for others in vain ends after a minute.
"""

import json
import sys
import threading
import time
from array import array
from collections import Counter
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from host_tier import ARRANGEMENTS, GUARD, LAYERS, LAYOUTS, device_pool, rows
from hybrid_tier import Request
from test_hybrid_stores import fetch, files, stored
from test_hybrid_tree import break_backups, prompt

from sgl_kvpool.transfer.host_options import HostTierOptions

RANKS, PAGE_SIZE, TOKENS = 3, 4, 128
SHORT, LONGER, OTHER = prompt(8), prompt(28), prompt(20, 500)
#: Of mixtures, and their length.
SEEDS, STEPS = range(3), 150
#: Seconds that a slow rank takes longer for a transfer.
SLOW = 0.2


class Model:
    """A tree with a host tier over rows alone, and what each prefix has been given."""

    def __init__(self, cache, pool):
        self.cache, self.pool, self.page_size = cache, pool, pool.page_size

    @property
    def controller(self):
        return self.cache.cache_controller

    @property
    def tier(self):
        return self.controller.mem_pool_host.anchor_entry.host_pool

    def key(self, tokens):
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(array("q", tokens))

    def row_bytes_of(self, tokens):
        """Rows of a prompt, `[layers, tokens, row_bytes]`: as a model's, they depend on all tokens before.

        Encoded from values, so that a narrower host layout has something to round.
        """
        from sgl_kvpool.codec import encode_rows

        found = []
        for layer in range(LAYERS):
            made = []
            for end in range(1, len(tokens) + 1):
                generator = np.random.default_rng([layer, *tokens[:end]])
                made.append(generator.standard_normal(576).astype(np.float32))
            values = torch.from_numpy(np.stack(made))
            found.append(
                encode_rows(values[:, :512], values[:, 512:], self.pool.row_format)
                .view(torch.uint8)
                .view(len(tokens), -1)
                .numpy()
            )
        return np.stack(found)

    def put(self, tokens):
        """Compute a prompt: new rows behind what the tree has."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams

        key = self.key(tokens)
        match = self.cache.match_prefix(MatchPrefixParams(key=key))
        had = self.cache.path_device_indices(match.last_device_node)
        new = self.cache.token_to_kv_pool_allocator.alloc(len(tokens) - len(had))
        assert new is not None
        for layer, made in zip(rows(self.pool), self.row_bytes_of(tokens), strict=True):
            flat = np.array(layer)  # arranged rows are views with other strides
            flat.reshape(-1, flat.shape[-1])[new.numpy()] = made[len(had) :]
            layer[...] = flat
        self.cache.insert(InsertParams(key=key, value=torch.cat([had, new]), prev_prefix_len=len(had)))
        self.settle()

    def settle(self):
        """Submit backups and take their acknowledgements, as a scheduler's step does."""
        self.cache.check_hicache_events()
        self.cache.check_hicache_events()

    def evict(self):
        """Push all rows off the device, and put guard bytes in their places."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.cache.evict(EvictParams(num_tokens=1000))
        free = self.cache.token_to_kv_pool_allocator.free_pages.numpy()
        for layer in rows(self.pool):
            layer[free] = GUARD

    def forget(self):
        """Push all pages off the host."""
        while self.cache.evict_host(1000):
            pass

    def found(self, tokens):
        """Rows that a request for these tokens goes on from, `[layers, found, row_bytes]`."""
        from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, MatchPrefixParams

        request = Request()
        match = self.cache.match_prefix(MatchPrefixParams(key=self.key(tokens)))
        request.last_node = node = match.last_device_node
        request.host_hit_length, length = match.host_hit_length, match.device_prefix_len
        if match.host_hit_length > 0:
            lock = self.cache.inc_lock_ref(node)
            loaded, node = self.cache.init_load_back(
                InitLoadBackParams(
                    best_match_node=match.best_match_node, host_hit_length=match.host_hit_length, req=request
                )
            )
            self.cache.dec_lock_ref(match.last_device_node, lock.to_dec_params())
            length += loaded
        self.cache.ready_to_load_host_cache()
        slots = self.cache.path_device_indices(node)[:length].numpy()
        found = np.stack([np.array(layer).reshape(-1, layer.shape[-1])[slots] for layer in rows(self.pool)])
        self.settle()
        return found

    def check(self, tokens):
        """Tokens found: with the bytes that were computed or, from a narrower host, with their rounding."""
        found = self.found(tokens)
        length = found.shape[1]
        if not length:
            return 0
        made = self.row_bytes_of(tokens[:length])
        if not np.array_equal(found, made):
            assert np.array_equal(found, self.rounded(made)), "other bytes than were stored"
        return length

    def rounded(self, made):
        """What rows are once they were on a host with a narrower layout."""
        from sgl_kvpool.codec import decode_rows, encode_rows

        wide, narrow = self.pool.row_format, self.tier.row_format
        values = decode_rows(torch.from_numpy(made.reshape(-1, made.shape[-1])), wide)
        values = decode_rows(encode_rows(values[:, :512], values[:, 512:], narrow), narrow)
        again = encode_rows(values[:, :512], values[:, 512:], wide).view(torch.uint8)
        return again.view(made.shape).numpy()


class Rank:
    """This process."""

    def __init__(self, rank, folder):
        self.rank, self.folder, self.failures, self.details = rank, folder, Counter(), {}
        meet = dist.FileStore(str(folder / "meet"), RANKS)
        dist.init_process_group(
            "gloo", store=meet, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
        )
        alone = [dist.new_group([one]) for one in range(RANKS)][rank]
        #: What SGLang gives a tree for its ranks (`kv_cache_builder.py:402`), with --tp-size 3.
        self.groups = {
            "tp_cache_group": dist.group.WORLD, "attn_tp_cache_group": dist.group.WORLD,
            "attn_cp_cache_group": alone, "pp_cache_group": alone,
        }  # fmt: skip

    def model(
        self,
        layout="fp4",
        arrangement="layer_major",
        host="same",
        page_size=PAGE_SIZE,
        store=None,
        ratio=1.0,
    ):
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
        from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
        from sglang.srt.server_args import ServerArgs

        args = ServerArgs(
            model_path="dummy", device="cpu", enable_hierarchical_cache=True, page_size=page_size,
            hicache_ratio=ratio, hicache_storage_backend=store and "file", served_model_name="model",
            hicache_storage_backend_extra_config=store and '{"prefetch_threshold": 1}',
            hicache_storage_prefetch_policy="wait_complete", tp_size=RANKS,
        )  # fmt: skip
        get_parallel().clear_stamp()
        publish(args, role="scheduler", ranks=SpawnRanks(self.rank, None, 0))
        self.patch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(store))
        pool = device_pool(
            layout, arrangement, page_size=page_size, pages=TOKENS // page_size + 1,
            start_layer=0, host_tier=HostTierOptions(host, sharing="node"),
        )  # fmt: skip
        allocator = PagedTokenToKVPoolAllocator(
            pool.size, page_size=page_size, dtype=pool.dtype, device="cpu", kvcache=pool, need_sort=False
        )
        params = CacheInitParams(
            disable=False, req_to_token_pool=SimpleNamespace(size=4), token_to_kv_pool_allocator=allocator,
            page_size=page_size, tree_components=(ComponentType.FULL,), **self.groups,
        )  # fmt: skip
        cache = UnifiedRadixCache(params)
        cache.init_hicache(args, params)
        cache.load_back_threshold = 1
        assert isinstance(cache.load_cache_event, type(threading.Event()))
        return Model(cache, pool)

    def run(self, case):
        """What a case returns on this rank, and what was counted."""
        from sgl_kvpool import metrics

        self.failures.clear()
        with pytest.MonkeyPatch.context() as self.patch:
            self.patch.setattr(metrics, "failed", self.failed)
            found = CASES[case](self)
        dist.barrier()
        return {**found, "failures": dict(self.failures)}

    def failed(self, kind, detail=None, **_):
        self.failures[kind] += 1
        self.details[kind] = detail

    def is_slow_at(self, model, direction):
        """Transfers of this rank take longer."""
        for channel in getattr(model.tier._channels, direction):
            run = channel.run

            def slow(*args, _run=run, **kwargs):
                time.sleep(SLOW)
                _run(*args, **kwargs)

            self.patch.setattr(channel, "run", slow)

    def counts_stored_pages(self, model):
        """A list that gets the host pages of each backup of this rank."""
        kept = []
        for channel in model.tier._channels.to_host:
            run = channel.run

            def counted(device_pages, host_pages, *rest, _run=run):
                kept.extend(int(page) for page in host_pages)
                _run(device_pages, host_pages, *rest)

            self.patch.setattr(channel, "run", counted)
        return kept


def there_and_back(layout, arrangement, host="same", page_size=PAGE_SIZE):
    def case(ranks):
        model = ranks.model(layout, arrangement, host, page_size)
        kept = ranks.counts_stored_pages(model)
        lengths = []
        for tokens in (SHORT, LONGER, OTHER):
            model.put(tokens)
        for tokens in (SHORT, LONGER, OTHER):
            lengths.append(model.check(tokens))
        model.evict()
        for tokens in (OTHER, LONGER, SHORT):
            lengths.append(model.check(tokens))
        return {"lengths": lengths, "kept": kept, "tokens": model.tier.size, "alone": model.pool.size}

    return case


def slow(rank, direction):
    """One rank is slow while the others go on as far as the agreements let them."""

    def case(ranks):
        model = ranks.model()
        if ranks.rank == rank:
            ranks.is_slow_at(model, direction)
        lengths = []
        for number in range(4):
            tokens = prompt(28, 100 * number)
            model.put(tokens)
            model.evict()
            lengths.append(model.check(tokens))
        return {"lengths": lengths}

    return case


def lost(rank):
    def case(ranks):
        model = ranks.model()
        model.put(SHORT)
        with pytest.MonkeyPatch.context() as patched:
            if ranks.rank == rank:
                break_backups(model.tier, patched)
            model.put(LONGER)
        model.evict()
        lengths = [model.check(LONGER), model.check(SHORT)]
        model.put(LONGER)  # computed again
        lengths.append(model.check(LONGER))
        # Its pages given to others, and stored well by all.
        model.evict()
        model.forget()
        model.put(OTHER)
        model.evict()
        lengths.append(model.check(OTHER))
        return {"lengths": lengths}

    return case


def refused_backup(rank):
    """One rank finds bad device slots in a list that all are to store."""

    def case(ranks):
        model = ranks.model()
        with pytest.MonkeyPatch.context() as patched:
            if ranks.rank == rank:
                patched.setattr(model.tier, "device_slots_problem", lambda slots: "bad on purpose")
            model.put(LONGER)
        model.put(OTHER)
        model.evict()
        return {"lengths": [model.check(LONGER), model.check(OTHER)], "free": model.tier.available_size()}

    return case


def moved(rank):
    """One rank's allocator gives out other pages."""

    def case(ranks):
        model = ranks.model()
        model.put(SHORT)
        if ranks.rank == rank:
            model.tier.alloc(PAGE_SIZE)
        kept = ranks.counts_stored_pages(model)
        model.put(LONGER)
        model.put(OTHER)
        model.evict()
        lengths = [model.check(tokens) for tokens in (OTHER, LONGER, SHORT)]
        return {"lengths": lengths, "kept": kept, "detail": ranks.details.get("tier_disagreement")}

    return case


def flushed(ranks):
    """SGLang's /flush_cache clears tree and tier."""
    model = ranks.model()
    model.put(LONGER)
    model.cache.reset()
    model.put(OTHER)
    model.evict()
    return {"lengths": [model.check(LONGER), model.check(OTHER)]}


def from_store(rank):
    """Two servers, one after the other; only the first rank of the second reads the store."""

    def case(ranks):
        store = ranks.folder / f"store-{rank}"
        stored(ranks.model(store=store), SHORT, LONGER)
        dist.barrier()
        model = ranks.model(store=store)
        backend, reads = model.controller.storage_backend, []
        get, bad = backend.get, files(store, False)[4].name.partition("_")[0]

        def counted(key, *args, **kwargs):
            reads.append(key)
            if ranks.rank == rank and key == bad:
                raise OSError(5, "unreadable on purpose")
            return get(key, *args, **kwargs)

        backend.get = counted
        fetch(model, LONGER)
        lengths = [model.check(LONGER)]
        model.controller.detach_storage_backend()
        return {"lengths": lengths, "reads": len(set(reads)), "files": len(files(store, False))}

    return case


def mixture(seed):
    """Many prompts in a small host tier, faults of any rank now and then, in the same order on every rank."""

    def case(ranks):
        model = ranks.model("fp4", "token_major", ratio=0.25)
        generator = np.random.default_rng(seed)
        prompts = [prompt(PAGE_SIZE * int(n), 1000 * int(k)) for n in range(2, 9) for k in (1, 2, 3, 4)]
        lengths, empty = [], model.tier.available_size()
        for _ in range(STEPS):
            tokens = prompts[generator.integers(len(prompts))]
            what, who = generator.integers(10), generator.integers(RANKS)
            allocator = model.cache.token_to_kv_pool_allocator
            if what < 5:
                if allocator.available_size() < len(tokens):
                    model.evict()
                with pytest.MonkeyPatch.context() as patched:
                    if what == 0 and ranks.rank == who:
                        break_backups(model.tier, patched)
                    model.put(tokens)
            elif what < 9:
                model.evict()
                lengths.append(model.check(tokens))
            elif generator.integers(10) == 0:
                model.cache.reset()
        model.evict()
        model.forget()
        return {"lengths": lengths, "leaked": empty - model.tier.available_size()}

    return case


def no_memory(rank):
    """One rank of the machine has not the memory for its part."""

    def case(ranks):
        from sglang.srt.mem_cache.pool_host import base

        if ranks.rank == rank:
            ranks.patch.setattr(base, "host_memory_budget_bytes", lambda _: 1000)
        with pytest.raises(ValueError, match="the host tier needs") as refused:
            ranks.model()
        return {"error": str(refused.value)}

    return case


NARROWER = {"bf16": "fp4", "fp8": "fp4_fp8_rope", "fp8_block_scale": "fp4"}
CASES = {
    **{f"{layout}-{arrangement}": there_and_back(layout, arrangement)
       for layout in LAYOUTS for arrangement in ARRANGEMENTS},
    **{f"{layout}-on-{host}": there_and_back(layout, "token_major", host)
       for layout, host in NARROWER.items()},
    **{f"pages-of-{size}": there_and_back("fp4", "page_major", page_size=size) for size in (1, 2)},
    **{f"slow-{rank}-{direction}": slow(rank, direction)
       for rank in range(RANKS) for direction in ("to_host", "to_device")},
    **{f"lost-{rank}": lost(rank) for rank in range(RANKS)},
    **{f"refused-{rank}": refused_backup(rank) for rank in range(RANKS)},
    **{f"moved-{rank}": moved(rank) for rank in range(RANKS)},
    "flushed": flushed,
    **{f"mixture-{seed}": mixture(seed) for seed in SEEDS},
    **{f"store-{rank}": from_store(rank) for rank in (0, 2)},
    **{f"no-memory-{rank}": no_memory(rank) for rank in (0, 2)},
}  # fmt: skip


def main(rank, folder, *cases):
    from sglang.srt.mem_cache.pool_host import base

    from sgl_kvpool.sglang_plugin.hooks import host_tier, sharing
    from sgl_kvpool.srt.host.node_ranks import NodeRanks

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    host_tier.install()
    # Of a server's attention-TP group, which a process without a model does not have.
    sharing.sharing_ranks = lambda options: NodeRanks.of(dist.group.WORLD)
    this = Rank(rank, folder)
    for case in cases or CASES:
        (folder / f"{case}-{rank}.json").write_text(json.dumps(this.run(case)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
