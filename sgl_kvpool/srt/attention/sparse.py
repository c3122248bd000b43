"""Rows that SGLang's sparse attention (DSA) cannot read itself: decoded where its readers ask for them.

Decode, verification and a draft's extend attend the rows of each query's top-k list by `mla_decode`; extends
gather and decode the rows of their requests once per layer, for SGLang's kernel over 16-bit keys. Needs no
SGLang; `sgl_kvpool.sglang_plugin.hooks.dsa` puts these where SGLang reads.
"""

from __future__ import annotations

import logging

import torch

from sgl_kvpool.attention.decode import DecodeWorkspace, mla_decode, sm_count_of, workspace_bytes
from sgl_kvpool.attention.decode_config import decode_kernel_of
from sgl_kvpool.codec import gather_rows
from sgl_kvpool.layout import RowFormat

__all__ = ["SparseReader", "decoded_rows", "sparse_workspace_bytes"]

logger = logging.getLogger(__name__)


def sparse_workspace_bytes(fmt: RowFormat, heads: int, top_k: int, device: torch.device | str) -> int:
    """Bytes that decoding needs beside its arguments, whatever the batch.

    Each query has a list of its own, and with more lists than a GPU runs programs at a time a list is not
    split: there is a largest workspace (9 MB for 16 heads on an H100, 17 for 32 and more), which no batch
    outgrows, padded or not.

    Parameters
    ----------
    fmt : RowFormat
    heads : int
        Query heads of this rank.
    top_k : int
        Width of the lists.
    device : torch.device or str
        Its multiprocessors decide how a list is split.
    """
    return workspace_bytes(fmt, heads, _MOST_QUERIES, top_k, sm_count=sm_count_of(torch.device(device)))


#: More than any GPU runs programs for, twice.
_MOST_QUERIES = 1 << 16


class SparseReader:
    """Attends rows of one pool format by lists of slots.

    Parameters
    ----------
    fmt : RowFormat
    workspace : DecodeWorkspace
        Of `sparse_workspace_bytes`.
    """

    def __init__(self, fmt: RowFormat, workspace: DecodeWorkspace) -> None:
        self.fmt = fmt
        self._workspace = workspace
        logger.info("sparse attention decodes %s with the %s kernel", fmt.layout, decode_kernel_of(fmt))

    def attend(
        self,
        q: torch.Tensor,
        rows: torch.Tensor,
        slots: torch.Tensor,
        counts: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        """Absorbed queries over the rows of their lists.

        Parameters
        ----------
        q : Tensor [T, H, R + P]
        rows : Tensor [slots, 1, row_bytes], uint8
            Of one layer.
        slots : Tensor [T, K], int32
            SGLang's `page_table_1`: the top-k of each query; -1 is none.
        counts : Tensor [T or more], int32, or None
            How many entries of each list to look at. For another number of queries they are not those of
            this batch, as SGLang's own kernel takes it, and the lists' -1 say it alone.
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
    """Keys of some slots, in order: `[tokens, 1, R + P]` bfloat16 from rows `[slots, 1, row_bytes]` uint8."""
    return gather_rows(rows.squeeze(1), slots, fmt).unsqueeze(1)
