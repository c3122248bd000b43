"""Reads rows that SGLang's sparse attention (DSA) cannot read itself.

Decode, verification and a draft's extend attend the rows of each query's top-k list by `mla_decode`. Extends
gather and decode the rows of their requests once per layer, for SGLang's kernel over 16-bit keys. This module
does not import SGLang; `sgl_kvpool.sglang_plugin.hooks.dsa` calls it where SGLang reads rows.
"""

from __future__ import annotations

import logging

import torch

from sgl_kvpool.attention.decode import DecodeWorkspace, mla_decode, sm_count_of, workspace_bytes
from sgl_kvpool.attention.decode_config import kernels_in_words
from sgl_kvpool.codec import gather_rows
from sgl_kvpool.layout import RowFormat

__all__ = ["SparseReader", "decoded_rows", "sparse_workspace_bytes"]

logger = logging.getLogger(__name__)


def sparse_workspace_bytes(fmt: RowFormat, heads: int, top_k: int, device: torch.device | str) -> int:
    """Bytes of workspace that decoding needs for a batch of any size.

    Each query has its own list, and lists are not split if there are more of them than a GPU runs programs at
    a time. Therefore the workspace has a maximum (on an H100, 9 MB for 8 heads and at most 17 MB for more),
    whatever the batch size and padding.

    Parameters
    ----------
    fmt : RowFormat
    heads : int
        Query heads of this rank.
    top_k : int
        Width of the top-k lists.
    device : torch.device or str
        Device whose number of multiprocessors decides how a list is split.
    """
    return workspace_bytes(fmt, heads, _MOST_QUERIES, top_k, sm_count=sm_count_of(torch.device(device)))


#: Number of queries that needs the maximum workspace: at least twice the programs that a GPU runs at a time.
_MOST_QUERIES = 1 << 16


class SparseReader:
    """Attends rows of one pool format by lists of slots, such as top-k lists.

    Parameters
    ----------
    fmt : RowFormat
    workspace : DecodeWorkspace
        Workspace of `sparse_workspace_bytes`.
    """

    def __init__(self, fmt: RowFormat, workspace: DecodeWorkspace) -> None:
        self.fmt = fmt
        self._workspace = workspace
        logger.info("sparse attention decodes %s with %s", fmt.layout, kernels_in_words(fmt))

    def attend(
        self,
        q: torch.Tensor,
        rows: torch.Tensor,
        slots: torch.Tensor,
        counts: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        """Attention of absorbed queries over the rows of their lists.

        Parameters
        ----------
        q : Tensor [T, H, R + P]
        rows : Tensor [slots, 1, row_bytes], uint8
            Rows of one layer.
        slots : Tensor [T, K], int32
            SGLang's `page_table_1`: the top-k slots of each query; -1 marks unused entries.
        counts : Tensor [T], int32, or None
            Number of entries of each list to attend. Counts for another number of queries are ignored, as
            SGLang does before its own kernel; then all entries but -1 are attended.
        scale : float

        Returns
        -------
        Tensor [T, H, R]
        """
        if counts is None or len(counts) != len(q):
            counts = slots.new_full((len(q),), slots.shape[1])
        out, _ = mla_decode(q, rows.squeeze(1), slots, counts, self.fmt, scale, workspace=self._workspace)
        return out


def decoded_rows(rows: torch.Tensor, slots: torch.Tensor, fmt: RowFormat) -> torch.Tensor:
    """Keys of the given slots: `[tokens, 1, R + P]` bfloat16 from rows `[slots, 1, row_bytes]` uint8."""
    return gather_rows(rows.squeeze(1), slots, fmt).unsqueeze(1)
