"""Reads rows that SGLang's sparse attention (DSA) cannot read itself.

Decode, verification and a draft's extend attend the rows of each query's top-k list by `mla_decode`. This
module does not import SGLang; `sgl_kvpool.sglang_plugin.hooks.dsa` calls it where SGLang reads rows. There,
extends gather and decode the rows of their requests once per layer, for SGLang's kernel over 16-bit keys.
"""

import logging

import torch

from sgl_kvpool.attention.decode import DecodeWorkspace, mla_decode, sm_count_of, workspace_bytes
from sgl_kvpool.attention.decode_config import decode_kernel_of
from sgl_kvpool.layout import RowFormat

logger = logging.getLogger(__name__)


def sparse_workspace_bytes(fmt: RowFormat, heads: int, top_k: int, device: torch.device | str) -> int:
    """Bytes of workspace that decoding needs for a batch of any size.

    Each query has its own list, and lists are not split if there are more of them than a GPU runs programs at
    a time. Therefore the workspace has a maximum (on an H100, 9 MB for 8 heads and at most 35 MB for more),
    whatever the batch size and padding.
    """
    return workspace_bytes(fmt, heads, _MOST_QUERIES, top_k, sm_count=sm_count_of(torch.device(device)))


#: Number of queries that needs the maximum workspace: at least twice the programs that a GPU runs at a time.
_MOST_QUERIES = 1 << 16


class SparseReader:
    """Attends rows of one format by lists of slots (top-k lists); workspace: `sparse_workspace_bytes`."""

    def __init__(self, fmt: RowFormat, workspace: DecodeWorkspace) -> None:
        self.fmt = fmt
        self._workspace = workspace
        logger.info("sparse attention decodes %s with kernels in %s", fmt.layout, decode_kernel_of(fmt))

    def attend(
        self,
        q: torch.Tensor,
        rows: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_lens: torch.Tensor | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of absorbed queries `[T, H, R + P]` over rows of their lists, as `mla_decode` returns it.

        `rows` is a layer `[rows, 1, ...]` in any dtype, and `kv_indices` `[T, K]` int32 is SGLang's
        `page_table_1`: the top-k rows of each query, -1 for unused entries. `kv_lens` `[T]` int32 is the
        number of entries to attend. If it is None or has another length, which SGLang ignores before its own
        kernel too, all entries but -1 are attended.
        """
        if kv_lens is None or len(kv_lens) != len(q):
            kv_lens = kv_indices.new_full((len(q),), kv_indices.shape[1])
        rows = rows.view(torch.uint8).squeeze(1)
        return mla_decode(q, rows, kv_indices, kv_lens, self.fmt, scale, workspace=self._workspace)

    def reads(self, keys: torch.Tensor) -> bool:
        """Whether SGLang passes stored rows, and not keys that it has gathered in 16 bits."""
        return keys.shape[-1] * keys.itemsize == self.fmt.row_bytes
