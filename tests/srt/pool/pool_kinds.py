"""Kinds of pools: factories with page sizes, arrangements and geometries, and what their bytes have to be."""

from functools import partial

import codec_oracle as oracle
import torch
from pools import at, device_pool, dsa_pool, guard, hybrid_pool, layer, layer_ids, rows, values

LAYOUTS, PACKED = oracle.LAYOUTS, oracle.PACKED
#: Page size -> size of the pool, and slots: the last one, the first of a page and its neighbours. Not slot 0,
#: which SGLang's own writers skip.
PAGES = {
    1: (15, [15, 3, 6, 1]),
    2: (14, [15, 2, 6, 1]),
    4: (12, [15, 4, 7, 1]),
    61: (122, [182, 61, 60, 1]),
    64: (128, [191, 64, 63, 1]),
}


def of_pages(page_size, make=device_pool, **extra):
    return make, {"page_size": page_size, "size": PAGES[page_size][0], **extra}


#: The second of three layers reuses the first one's top-k, and has no index keys.
SHARED = [False, True, False]
#: Factory and arguments; page sizes and arrangements decide where a row is, geometries where its parts are.
KINDS = {
    "dense": of_pages(1),
    "dense-256-64": of_pages(4, kv_lora_rank=256),
    "dense-128-0": of_pages(1, kv_lora_rank=128, qk_rope_head_dim=0),
    **{f"{arrangement}-{page_size}": of_pages(page_size, arrangement=arrangement)
       for arrangement in ("token_major", "page_major") for page_size in (1, 2, 61)},
    "dsa": (dsa_pool, {"skip_topk_layers": SHARED}),
    "dsa-512-0": (dsa_pool, {"rope": 0}),
    "dsa-256-0": (dsa_pool, {"rank": 256, "rope": 0}),
    "hybrid": of_pages(4, hybrid_pool),
    "hybrid-512-0": of_pages(4, hybrid_pool, qk_rope_head_dim=0),
    "hybrid-token_major": of_pages(4, hybrid_pool, arrangement="token_major", start_layer=1),
    "hybrid-page_major": of_pages(61, hybrid_pool, arrangement="page_major"),
    "hybrid-sparse": (hybrid_pool, {"sparse": True, "skip_topk_layers": SHARED, "start_layer": 1}),
}  # fmt: skip
METHODS = ["set_mla_kv_buffer", "set_kv_buffer"]


class Pool:
    """A pool of a kind with k_scales for its first and last layers, and what its bytes have to be."""

    def __init__(self, kind, layout, **extra):
        make, arguments = KINDS[kind]
        self.is_sparse, self.is_hybrid = "dsa" in kind or "sparse" in kind, kind.startswith("hybrid")
        self.aligned = 1 if self.is_sparse else 16
        self.rank = arguments.get("kv_lora_rank", arguments.get("rank", 512))
        self.rope = arguments.get("qk_rope_head_dim", arguments.get("rope", 64))
        first, *_, last = layer_ids(make(layout, **arguments))
        self.pool = make(layout, k_scales={first: 0.25, last: 3.0}, **arguments, **extra)
        self.layers = layer_ids(self.pool)
        self.scales = [0.25, 1.0, 3.0] if layout == "fp8" else [1.0] * 3
        self.layout, self.page_size, self.start = layout, self.pool.page_size, arguments.get("start_layer", 0)
        self.has_keys = self.is_sparse or (
            layout not in PACKED and ("page_major" not in kind or self.page_size == 1)
        )
        self.slots, self.row_bytes = PAGES[self.page_size][1], self.row_bytes_of(layout)
        guard(self.pool)

    def row_bytes_of(self, layout):
        return oracle.row_bytes(layout, self.rank, self.rope, self.aligned)

    def values(self, tokens=4, seed=0):
        return values(tokens, self.rank, self.rope, seed)

    def encoded(self, place, nope, rope):
        parts = nope.squeeze(1), rope.squeeze(1) if self.rope else None
        return oracle.encode(*parts, self.layout, self.rank, self.rope, self.row_bytes, self.scales[place])

    def write(self, method, layer_object, loc, nope, rope, **extra):
        """Write through a layer object with a wrong k_scale, as in SGLang's prefill."""
        if layer_object is not None:
            layer_object.k_scale, layer_object.k_scale_float = None, 99.0
        if method == "set_kv_buffer":
            combined = torch.cat([nope, rope], -1)
            self.pool.set_kv_buffer(layer_object, loc, combined, combined[..., : self.rank], **extra)
        else:
            self.pool.set_mla_kv_buffer(layer_object, loc, nope, rope if self.rope else None, **extra)

    def stored(self):
        """Write rows of values to `slots` of each layer without the pool's methods; returns them by layer."""
        found = {}
        for place, layer_id in enumerate(self.layers):
            found[layer_id] = self.encoded(place, *self.values(seed=place))
            rows(self.pool)[place][at(self.pool, self.slots)] = found[layer_id]
        return found

    def waits_for(self, layer_id):
        """What a reader of a layer waits for: the counter of a hybrid model counts its other layers too."""
        if self.is_hybrid:
            return layer_id - self.start
        return self.layers.index(layer_id)

    def readers(self, layer_id):
        """A call of each method that reads a layer."""
        found = [
            lambda: self.pool.get_row_buffer(layer_id),
            lambda: self.pool.get_mla_kv_buffer(layer(layer_id), torch.tensor([1]), torch.bfloat16),
        ]
        if self.has_keys:
            found.append(lambda: self.pool.get_key_buffer(layer_id))
        if self.has_keys and self.layout not in PACKED:
            found.append(lambda: self.pool.get_value_buffer(layer_id))
        return found

    def writers(self, layer_id):
        given = layer(layer_id), torch.tensor([1]), *self.values(1)
        return [partial(self.write, method, *given) for method in METHODS]
