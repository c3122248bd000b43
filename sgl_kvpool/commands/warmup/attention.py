"""Batches of short requests through our attention backend on CUDA, as SGLang's `ForwardBatch`.

The pool, the request table and the backend are those of a server, so that the same kernels are launched with
the same constants compiled into them. Values are zeros, and results are ignored.
"""

from functools import cached_property
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch

from sgl_kvpool.attention.decode import DecodeWorkspace, sm_count_of
from sgl_kvpool.attention.decode_config import MAX_PROGRAMS_PER_SM, MAX_ROUNDS, decode_config
from sgl_kvpool.codec import gather_rows, store_rows
from sgl_kvpool.commands import rehearsal
from sgl_kvpool.commands.warmup.served import Served
from sgl_kvpool.layout import MLAKVCacheLayout, RowFormat

#: Slots of one prefill: a stored prefix, and the new tokens behind it.
_PREFIX, _NEW = 40, 5
#: Slots of the pool of sparse rows.
_SPARSE_SLOTS = 64


def publish(served: Served, device: str) -> None:
    rehearsal.publish(
        device,
        tp_size=served.tensor_parallel,
        dcp_size=served.dcp_size,
        page_size=served.page_size_tokens,
        speculative_num_draft_tokens=served.draft_tokens or None,
    )


def _split_and_whole(fmt: RowFormat, heads: int, queries: int, width: int, device: str) -> list[int]:
    """Smallest batches with split and with whole lists, or one if the same kernel takes both."""
    index = torch.cuda.current_device() if device == "cuda" else None
    sm_count = sm_count_of(torch.device(device, index))
    first: dict[bool, int] = {}
    for lists in range(1, MAX_ROUNDS * MAX_PROGRAMS_PER_SM * sm_count + 2):
        config = decode_config(fmt, heads, queries, lists, width, sm_count)
        first.setdefault(config.splits > 1, lists)
    return sorted(first.values())


class Attention:
    """Attention over rows of one layout; pool and backends are allocated at first use."""

    def __init__(self, served: Served, layout: MLAKVCacheLayout, device: str) -> None:
        self.served, self.layout, self.device = served, layout, device
        self.fmt = layout.pool_row_format(served.kv_lora_rank, served.qk_rope_head_dim, is_dsa=False)

    def batch_sizes(self, queries: int) -> list[int]:
        """Batch sizes (requests) with split lists and with whole lists."""
        served = self.served
        heads, width = self.decode_layer.tp_q_head_num, -(-served.table_width // served.dcp_size)
        return _split_and_whole(self.fmt, heads, queries, width, self.device)

    @cached_property
    def most_requests(self) -> int:
        queries = {1, self.served.draft_tokens or 1}
        return max(size for count in queries for size in self.batch_sizes(count))

    @cached_property
    def pool(self) -> Any:
        from sgl_kvpool.srt.pool.row_pool import PoolOptions

        served = self.served
        tokens = max(self.most_requests * max(served.draft_tokens, 1), _PREFIX + _NEW)
        size = -(-tokens // served.page_size_tokens) * served.page_size_tokens
        return rehearsal.make_pool(
            PoolOptions(self.layout, arrangement=served.arrangement), size=size,
            page_size=served.page_size_tokens, kv_lora_rank=served.kv_lora_rank,
            qk_rope_head_dim=served.qk_rope_head_dim, layer_num=served.layers, device=self.device,
        )  # fmt: skip

    @cached_property
    def layer(self) -> Any:
        """Absorbed attention of the first layer."""
        return self._absorbed(self.served.heads_per_rank)

    @cached_property
    def decode_layer(self) -> Any:
        """The same for a decode, of the heads of all ranks with decode context parallelism."""
        return self._absorbed(self.served.heads_per_rank * self.served.dcp_size)

    def _absorbed(self, heads: int) -> Any:
        return self._layer(heads, self.fmt.head_dim, self.served.kv_lora_rank, key_heads=1)

    def _layer(self, heads: int, head_dim: int, v_head_dim: int, key_heads: int) -> Any:
        from sglang.srt.layers.radix_attention import RadixAttention

        return RadixAttention(
            num_heads=heads, head_dim=head_dim, scaling=self.served.scaling,
            num_kv_heads=key_heads, layer_id=0, v_head_dim=v_head_dim,
        )  # fmt: skip

    @cached_property
    def backends(self) -> list[Any]:
        """Attention backends of a server's target model, of two ranks with decode context parallelism.

        Triton compiles for the alignment of a rank's lists: rank 1 begins 4 bytes behind rank 0.
        """
        from sglang.srt.runtime_context import get_parallel

        from sgl_kvpool.srt.attention.cuda import KVPoolMLACudaBackend

        backends = []
        for rank in range(min(self.served.dcp_size, 2)):
            with get_parallel().override(attn_dcp_rank=rank):
                backends.append(KVPoolMLACudaBackend(self.runner))
        return backends

    @cached_property
    def runner(self) -> Any:
        """The attributes of SGLang's ModelRunner that constructors of backends read."""
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

        served = self.served
        return SimpleNamespace(
            model_config=served, device=self.device, dtype=torch.bfloat16, page_size=served.page_size_tokens,
            token_to_kv_pool=self.pool, model=torch.nn.ModuleList([self.layer]), is_draft_worker=False,
            req_to_token_pool=ReqToTokenPool(self.most_requests, served.table_width, self.device, False),
            kv_index_translator=None,
        )  # fmt: skip

    def decode_or_verify(self, mode: str, queries: int) -> None:
        """Decode, verification of drafts or a draft's extend, once for each of `batch_sizes`."""
        for backend, requests in product(self.backends, self.batch_sizes(queries)):
            batch = self._batch(mode, [0] * requests, [queries] * requests)
            if mode == "TARGET_VERIFY":
                batch.seq_lens = torch.zeros_like(batch.seq_lens)  # excludes the verified tokens
            batch.spec_info = SimpleNamespace(draft_token_num=queries, num_tokens_per_req=queries)
            self._forward(batch, requests * queries, backend, self.decode_layer)

    def draft_step(self) -> None:
        """A step of a draft, whose lengths include the tokens drafted before."""
        from sgl_kvpool.srt.attention.cuda import KVPoolMLACudaBackend

        backend = KVPoolMLACudaBackend(self.runner, skip_prefill=True, draft_step=1)
        for requests in self.batch_sizes(1):
            batch = self._batch("DECODE", [0] * requests, [1] * requests)
            self._forward(batch, requests, backend, self.decode_layer)

    def prefill(self, *, in_chunks: bool) -> None:
        """Absorbed prefill after a stored prefix, in one FlashInfer call or in chunks."""
        backend = self.backends[0]
        reader = backend.absorbed_prefill.reader
        batch = self._batch("EXTEND", [_PREFIX, 0], [_NEW, _NEW])
        # Rows that SGLang gathers with decode context parallelism.
        rows = torch.zeros((_PREFIX, 1, self.fmt.head_dim), dtype=self.pool.dtype, device=self.device)
        batch.attn_dcp_metadata = SimpleNamespace(dcp_kv_buffer=rows)
        workspace_tokens, wrapper = reader.workspace_tokens, reader.wrapper
        if in_chunks:
            reader.workspace_tokens, reader.wrapper = _PREFIX // 3, None
        try:
            self._forward(batch, 2 * _NEW, backend, self.layer)
        finally:
            reader.workspace_tokens, reader.wrapper = workspace_tokens, wrapper

    def multi_head(self) -> None:
        """The MHA form, whose keys and values a model computes from the latent."""
        served, runner = self.served, self.backends[0].mha_chunk_kv_cache
        width = served.qk_nope_head_dim + served.qk_rope_head_dim
        layer = self._layer(served.heads_per_rank, width, served.v_head_dim, served.heads_per_rank)
        batch = self._batch("EXTEND", [0], [_NEW])
        batch.num_prefix_chunks, batch.mha_return_lse, batch.mha_one_shot = 0, False, False
        runner.update_wrapper(batch)
        q, k = (self._zeros(_NEW, served.heads_per_rank, width) for _ in range(2))
        runner.forward(q, k, self._zeros(_NEW, served.heads_per_rank, served.v_head_dim), layer, batch)

    def read_rows(self) -> None:
        """Read rows as keys, for prefixes that the MHA form attends."""
        for dtype in (torch.int32, torch.int64):
            slots = torch.arange(_NEW, dtype=dtype, device=self.device)
            self.pool.get_mla_kv_buffer(self.layer, slots, torch.bfloat16)

    def _batch(self, mode: str, prefixes: list[int], fresh: list[int]) -> Any:
        from sgl_kvpool.srt.self_check.attention import batch_of

        count = sum(fresh)
        # Every request uses row 0 of the table, whose slots are zeros, as in SGLang's padding.
        requests = torch.zeros(len(fresh), dtype=torch.int64, device=self.device)
        slots = torch.arange(count, dtype=torch.int64, device=self.device)
        batch = batch_of(mode, [p + n for p, n in zip(prefixes, fresh, strict=True)], requests, slots)
        batch.extend_num_tokens = count
        batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu = prefixes, fresh
        batch.extend_prefix_lens = torch.tensor(prefixes, device=self.device)
        return batch

    def _forward(self, batch: Any, tokens: int, backend: Any, layer: Any) -> None:
        served, heads = self.served, layer.tp_q_head_num
        rank, rope = served.kv_lora_rank, served.qk_rope_head_dim
        backend.init_forward_metadata(batch)
        extra = {}
        if rope:
            # Rotary parts are strided views into whole queries and keys, as in the model.
            q = self._zeros(tokens, heads, served.qk_nope_head_dim + rope)
            keys = self._zeros(tokens, 1, rank + rope)
            extra = {"q_rope": q[..., -rope:], "k_rope": keys[..., -rope:]}
        latent = self._zeros(tokens, 1, rank)
        # Strides as a batched product per head returns them.
        absorbed = self._zeros(heads, tokens, rank).transpose(0, 1)
        backend.forward(absorbed, latent, latent, layer, batch, **extra)

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16, device=self.device)


class SparseRows:
    """Our kernels for models with sparse attention (DSA) on CUDA: writes, and reads of top-k lists."""

    def __init__(self, served: Served, layout: MLAKVCacheLayout, device: str) -> None:
        assert served.top_k is not None
        self.served, self.layout, self.device, self.top_k = served, layout, device, served.top_k
        self.fmt = layout.pool_row_format(served.kv_lora_rank, served.qk_rope_head_dim, is_dsa=True)
        self.rows = torch.zeros((_SPARSE_SLOTS, 1, self.fmt.row_bytes), dtype=torch.uint8, device=device)

    def store(self) -> None:
        keys = torch.zeros((2, self.fmt.head_dim), dtype=torch.bfloat16, device=self.device)
        rank = self.fmt.kv_lora_rank
        rope = keys[:, rank:] if self.fmt.rope is not None else None
        slots = torch.arange(2, dtype=torch.int64, device=self.device)
        store_rows(self.rows.squeeze(1), slots, keys[:, :rank], rope, self.fmt)

    def read(self) -> None:
        """Run `mla_decode` on split and whole top-k lists, and decode rows for extends."""
        from sglang.kernels.ops.attention.dsa.transform_index import transform_index_page_table_dcp

        from sgl_kvpool.srt.attention.sparse import SparseReader, sparse_workspace_bytes

        ranks = self.served.dcp_size
        for rank in range(ranks if ranks > 1 else 0):  # of which each has a kernel to choose its entries
            lists = torch.zeros((1, self.top_k), dtype=torch.int32, device=self.device)
            transform_index_page_table_dcp(lists, ranks, rank)
        for heads in self.heads():
            size = sparse_workspace_bytes(self.fmt, heads, self.top_k, self.device)
            reader = SparseReader(self.fmt, DecodeWorkspace(size, self.device))
            for queries in self.batch_sizes(heads):
                q = torch.zeros((queries, heads, self.fmt.head_dim), dtype=torch.bfloat16, device=self.device)
                lists = torch.zeros((queries, self.top_k), dtype=torch.int32, device=self.device)
                counts = torch.ones(queries, dtype=torch.int32, device=self.device)
                reader.attend(q, self.rows, lists, counts, self.served.scaling)
        for dtype in (torch.int32, torch.int64):
            gather_rows(self.rows.squeeze(1), torch.arange(2, dtype=dtype, device=self.device), self.fmt)

    def heads(self) -> list[int]:
        """Heads of a target's queries, which have those of all `--dcp-size` ranks, and of a draft's."""
        own = self.served.heads_per_rank
        return sorted({own, own * self.served.dcp_size})

    def batch_sizes(self, heads: int) -> list[int]:
        return _split_and_whole(self.fmt, heads, 1, self.top_k, self.device)
