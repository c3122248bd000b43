"""A small dense model over one pool of rows: records the rows of each prefix, checks what is read back."""

import numpy as np
import torch
from host_tier import GUARD, LAYERS, rows
from tree_model import Request, TreeModel


class DenseModel(TreeModel):
    """A tree with a host tier of rows only; row values change when a narrower layout rounds them.

    The layers of packed drafts, one per draft pool, follow the target's layers.
    """

    def __init__(self, cache, pool, page_size, drafts=()):
        super().__init__(cache, pool, page_size)
        self.drafts = drafts

    def row_layers(self):
        return [layer for pool in (self.pool, *self.drafts) for layer in rows(pool)]

    @property
    def tier(self):
        return self.controller.mem_pool_host.anchor_entry.host_pool

    def row_bytes_of(self, tokens):
        """Rows of a prompt, `[layers, tokens, row_bytes]`; each row depends on all tokens before it.

        Encoded from values, so that a narrower host layout rounds them.
        """
        from sgl_kvpool.codec import encode_rows

        found = []
        for layer in range(LAYERS + len(self.drafts)):
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
        """Compute a prompt: new rows behind the prefix that the tree holds."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        slots, had = self.put_rows(tokens)
        self.cache.insert(InsertParams(key=self.key(tokens), value=slots, prev_prefix_len=had))
        self.settle()

    def evict(self):
        """Evict all rows from the device, and fill their slots with guard bytes."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.cache.evict(EvictParams(num_tokens=1000))
        free = self.cache.token_to_kv_pool_allocator.free_pages.numpy()
        for layer in self.row_layers():
            layer[free] = GUARD

    def forget(self):
        """Evict all pages from the host."""
        while self.cache.evict_host(1000):
            pass

    def check(self, tokens):
        """Number of tokens found; their bytes must be as computed or, from a narrower host, rounded."""
        slots = self.go_on(tokens, Request())
        found, length = self.row_bytes(slots), len(slots)
        self.settle()
        if not length:
            return 0
        made = self.row_bytes_of(tokens[:length])
        if not np.array_equal(found, made):
            assert np.array_equal(found, self.rounded(made)), "other bytes than were stored"
        return length

    def rounded(self, made):
        """Rows after a round trip through a host tier with a narrower layout."""
        from sgl_kvpool.codec import decode_rows, encode_rows

        wide, narrow = self.pool.row_format, self.tier.row_format
        values = decode_rows(torch.from_numpy(made.reshape(-1, made.shape[-1])), wide)
        values = decode_rows(encode_rows(values[:, :512], values[:, 512:], narrow), narrow)
        again = encode_rows(values[:, :512], values[:, 512:], wide).view(torch.uint8)
        return again.view(made.shape).numpy()
