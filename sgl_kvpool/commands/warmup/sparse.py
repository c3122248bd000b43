"""Our kernels for models with sparse attention (DSA) on CUDA: writes, and reads of top-k lists."""

from __future__ import annotations

import torch

from sgl_kvpool.attention.decode import DecodeWorkspace
from sgl_kvpool.codec import store_rows
from sgl_kvpool.commands.warmup.batches import split_and_whole
from sgl_kvpool.commands.warmup.served import Served
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.srt.attention.sparse import SparseReader, decoded_rows, sparse_workspace_bytes

__all__ = ["SparseRows"]

_SLOTS = 64


class SparseRows:
    """Writes and reads of rows of one layout.

    Parameters
    ----------
    served : Served
        A model with sparse attention.
    layout : MLAKVCacheLayout
    device : str
    """

    def __init__(self, served: Served, layout: MLAKVCacheLayout, device: str) -> None:
        if served.top_k is None:
            raise ValueError(f"{served.name} has no sparse attention")
        self.served, self.layout, self.device, self.top_k = served, layout, device, served.top_k
        self.fmt = layout.pool_row_format(served.kv_lora_rank, served.qk_rope_head_dim, is_dsa=True)
        self.rows = torch.zeros((_SLOTS, 1, self.fmt.row_bytes), dtype=torch.uint8, device=device)

    def store(self) -> None:
        """New tokens."""
        keys = torch.zeros((2, self.fmt.head_dim), dtype=torch.bfloat16, device=self.device)
        rank = self.fmt.kv_lora_rank
        rope = keys[:, rank:] if self.fmt.rope is not None else None
        slots = torch.arange(2, dtype=torch.int64, device=self.device)
        store_rows(self.rows.squeeze(1), slots, keys[:, :rank], rope, self.fmt)

    def read(self) -> None:
        """Run `mla_decode` on split and whole top-k lists, and decode rows for extends."""
        heads = self.served.heads_per_rank
        size = sparse_workspace_bytes(self.fmt, heads, self.top_k, self.device)
        reader = SparseReader(self.fmt, DecodeWorkspace(size, self.device))
        for queries in self.batch_sizes():
            q = torch.zeros((queries, heads, self.fmt.head_dim), dtype=torch.bfloat16, device=self.device)
            lists = torch.zeros((queries, self.top_k), dtype=torch.int32, device=self.device)
            counts = torch.ones(queries, dtype=torch.int32, device=self.device)
            reader.attend(q, self.rows, lists, counts, self.served.scale)
        for dtype in (torch.int32, torch.int64):
            decoded_rows(self.rows, torch.arange(2, dtype=dtype, device=self.device), self.fmt)

    def batch_sizes(self) -> list[int]:
        """Batch sizes (queries) with split lists and with whole lists."""
        return split_and_whole(self.fmt, self.served.heads_per_rank, 1, self.top_k, self.device)
