"""SGLang's real DSA backend on the CPU: its metadata, its dispatch, real pools, request tables and batches.

SGLang's constructor asks for a GPU, so the object is made without calling it. FlashMLA's kernel over 16-bit
keys needs a GPU too: float64 attention over the kernel's arguments replaces it.
"""

import sys
from types import SimpleNamespace

import batches
import codec_oracle as oracle
import numpy as np
import torch
from batches import forward_batch
from pools import dsa_pool

RANK, ROPE, HEADS, LAYER, SCALE = 512, 64, 4, 6, 0.05
TOP_K, PAGE, TOKENS = 16, 64, 256
DRAFTS = 3


def make_pool(layout, *, stock=False, device="cpu", spans=1):
    """A pool of two layers, full of NaN; SGLang's own class with `stock`, a draft's over `spans` ranks."""
    pool = dsa_pool(
        layout, RANK, ROPE, stock=stock, size=spans * TOKENS, page_size=spans * PAGE, layer_num=2,
        start_layer=LAYER - 1, device=device, dcp_replicated=spans > 1,
    )  # fmt: skip
    for tensor in pool.kv_buffer:
        tensor.view(torch.uint8).fill_(0xFF)  # NaN where an encoding has one: must not be read
    return pool


def make_backend(pool, prefill, decode, **attributes):
    """A backend with the attributes that SGLang's constructor would set on Hopper, and with our hooks."""
    from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend
    from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    from sgl_kvpool.srt.attention import dsa_backend as dsa

    backend = object.__new__(DeepseekSparseAttnBackend)
    table = ReqToTokenPool(8, 128, "cpu", False)
    values = {
        "token_to_kv_pool": pool, "dsa_kv_cache_store_fp8": pool.dsa_kv_cache_store_fp8,
        "kv_cache_dim": pool.kv_cache_dim, "req_to_token_pool": table, "req_to_token": table.req_to_token,
        "dsa_prefill_impl": prefill, "enable_auto_select_prefill_impl": prefill == "flashmla_auto",
        "dsa_decode_impl": decode, "dsa_topk_backend": DSATopKBackend.TORCH, "use_fused_topk": False,
        "dsa_index_topk": TOP_K, "dsa_index_kpool": 1, "physical_page_size": PAGE, "num_q_heads": HEADS,
        "speculative_num_draft_tokens": DRAFTS, "num_splits": 0, "dcp_size": 1, "device": "cpu",
        "hisparse_coordinator": None, "_kv_shard_pool": None, "supports_mha_one_shot": True, "use_mha": False,
        "_sink_pad_cache": {}, "_arange_buf": torch.arange(1024, dtype=torch.int32),
        "_is_in_breakable_cuda_graph": lambda: True,  # switches dense attention of short prompts off
        "_is_in_tc_piecewise_cuda_graph": lambda: False, "device_sm_major": 9, "_get_device_sm": lambda: 90,
        "_is_blackwell": lambda: False,
    }  # fmt: skip
    vars(backend).update(values | attributes)
    dsa.attach(backend)
    return backend


class SparseKernel:
    """Replaces FlashMLA's `flash_mla_sparse_fwd`: attends in float64 and records the dtype of its keys."""

    def __init__(self, monkeypatch):
        self.dtypes = []
        # Importing the module would load CUDA's libraries.
        name = "sglang.kernels.ops.attention.flash_mla_interface"
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(flash_mla_sparse_fwd=self))

    def __call__(self, q, kv, indices, sm_scale, d_v, attn_sink=None, topk_length=None):
        self.dtypes.append(kv.dtype)
        if kv.dtype != torch.bfloat16 or kv.shape[-1] != q.shape[-1]:
            raise TypeError(f"16-bit keys of {q.shape[-1]} values, not {kv.shape[-1]} of {kv.dtype}")
        out = torch.zeros(*q.shape[:2], d_v, dtype=torch.float64)
        for t, places in enumerate(indices[:, 0].tolist()):
            if topk_length is not None:
                places = places[: int(topk_length[t])]
            chosen = [p for p in places if p >= 0]
            out[t] = attend(q[t].double(), kv[chosen, 0].double(), d_v, sm_scale)
        return out.to(q.dtype), None, None


def attend(q, keys, rank, scale):
    """Attention of one query's heads over `keys`; 0 without keys."""
    if not len(keys):
        return q.new_zeros(len(q), rank)
    return torch.softmax(scale * q @ keys.T, -1) @ keys[:, :rank]


class Case:
    """Requests with random keys at random slots; `prefixes` of their `lengths` tokens are already stored.

    Each token of a batch attends a random selection of its request's tokens up to itself, at most `top_k`.
    """

    device, top_k = "cpu", TOP_K

    def __init__(self, layout, lengths, prefixes, prefill, decode, *, stock=False, ranks=1, spans=1, **more):
        self.layout, self.lengths, self.prefixes = layout, lengths, prefixes
        self.pool = make_pool(layout, stock=stock, device=self.device, spans=spans)
        self.backend = self.make_backend(prefill, decode, **more)
        self.layer = radix_attention()
        generator = torch.Generator().manual_seed(7)
        # The first page is reserved.
        slots = torch.randperm(ranks * TOKENS, generator=generator)[: sum(lengths)] + ranks * PAGE
        self.slots = [part.to(self.device) for part in slots.split(lengths)]
        keys = (torch.randn(n, 1, RANK + ROPE, generator=generator).bfloat16() for n in lengths)
        self.keys = [part.to(self.device) for part in keys]
        self.rows = [5, 2, 7, 1][: len(lengths)]  # in the request table
        for row, own in zip(self.rows, self.slots, strict=True):
            self.backend.req_to_token[row, : len(own)] = own.int()
        for own, keys, prefix in zip(self.slots, self.keys, prefixes, strict=True):
            if prefix:
                self.store(own[:prefix], keys[:prefix])

    def make_backend(self, prefill, decode, **attributes):
        return make_backend(self.pool, prefill, decode, **attributes)

    def store(self, slots, keys):
        self.pool.set_mla_kv_buffer(self.layer, slots, keys[..., :RANK], keys[..., RANK:])

    def batch(self, mode):
        # In a verification, SGLang's seq_lens exclude the tokens that are verified.
        lengths = self.prefixes if mode == "TARGET_VERIFY" else self.lengths
        batch = forward_batch(mode, self.slots, self.prefixes, lengths, self.rows)
        if batch.extend_seq_lens_cpu is not None:
            batch.extend_prefix_lens = torch.tensor(batch.extend_prefix_lens_cpu, device=self.device)
            batch.extend_seq_lens = torch.tensor(batch.extend_seq_lens_cpu, device=self.device)
        return batch

    def chosen(self):
        """`[tokens, top_k]` positions within a request that each token attends, padded with -1."""
        generator = torch.Generator().manual_seed(9)
        lists = []
        for length, prefix in zip(self.lengths, self.prefixes, strict=True):
            for position in range(prefix, length):
                places = torch.randperm(position + 1, generator=generator)[: self.top_k]
                lists.append(torch.nn.functional.pad(places, (0, self.top_k - len(places)), value=-1))
        return torch.stack(lists).int()

    def run(self, mode, *, planned_as=None):
        """Output `[tokens, HEADS, RANK]` of one layer; metadata is planned for mode `planned_as` if given."""
        self.backend.init_forward_metadata(self.batch(planned_as or mode))
        batch = self.batch(mode)
        keys = torch.cat([k[p:] for k, p in zip(self.keys, self.prefixes, strict=True)])
        generator = torch.Generator().manual_seed(8)
        self.q = torch.randn(len(keys), HEADS, RANK + ROPE, generator=generator).bfloat16().to(self.device)
        forward = self.backend.forward_decode if mode == "DECODE" else self.backend.forward_extend
        found = forward(
            self.q[..., :RANK].reshape(len(keys), -1), keys[..., :RANK], keys[..., :RANK], self.layer, batch,
            q_rope=self.q[..., RANK:], k_rope=keys[..., RANK:], topk_indices=self.chosen().to(self.device),
        )  # fmt: skip
        out, self.lse = found if isinstance(found, tuple) else (found, None)
        return out.view(len(keys), HEADS, RANK)

    def stored(self, keys):
        """Values of keys after the oracle's encoding and decoding."""
        keys = keys.cpu()
        nope, rope = keys[:, 0, :RANK], keys[:, 0, RANK:]
        row_bytes = self.pool.kv_buffer[0][0].nbytes
        rows = oracle.encode(nope, rope, self.layout, RANK, ROPE, row_bytes, 1.0)
        return torch.from_numpy(oracle.decode(rows, self.layout, RANK, ROPE, 1.0).astype(np.float64))

    def in_pool(self, slots):
        """Values of the rows that `slots` hold now, decoded by the oracle."""
        rows = self.pool.kv_buffer[1][slots, 0].view(torch.uint8).numpy()
        return torch.from_numpy(oracle.decode(rows, self.layout, RANK, ROPE, 1.0).astype(np.float64))

    def wanted(self, *, fresh_as_computed=False, from_pool=False):
        """Expected output in float64, over rows as stored or, for `fresh_as_computed`, over unrounded keys.

        `from_pool` decodes the pool's bytes instead: SGLang's own writer, which is not under test and runs in
        Triton's interpreter, wrote them.
        """
        out, chosen, t, queries = [], self.chosen(), 0, self.q.cpu()
        for keys, slots, prefix in zip(self.keys, self.slots, self.prefixes, strict=True):
            values = keys[:, 0].cpu().double() if fresh_as_computed else self.stored(keys)
            values = self.in_pool(slots) if from_pool else values
            for _ in range(len(keys) - prefix):
                places = [p for p in chosen[t].tolist() if p >= 0]
                out.append(attend(queries[t].double(), values[places], RANK, SCALE))
                t += 1
        return torch.stack(out)


def radix_attention():
    return batches.radix_attention(HEADS, RANK, ROPE, layer_id=LAYER, scaling=SCALE)


def in_forward(backend):
    """SGLang's context of a running forward pass."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    return forward_context(ForwardContext(SimpleNamespace(token_to_kv_pool=backend.token_to_kv_pool)))
