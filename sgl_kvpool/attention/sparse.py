"""Rows that SGLang's sparse attention (DSA) cannot read itself: decoded where its readers ask for them.

Decode, verification and a draft's extend attend the rows of each query's top-k list by `mla_decode`; extends
gather and decode the rows of their requests once per layer, for SGLang's kernel over 16-bit keys. Needs no
SGLang; `sgl_kvpool.sglang_plugin.dsa` puts these where SGLang reads.
"""

from __future__ import annotations

import torch

from sgl_kvpool.attention.decode import DecodeWorkspace, mla_decode, sm_count_of, workspace_bytes
from sgl_kvpool.codec import gather_rows
from sgl_kvpool.layout import RowFormat

__all__ = ["SparseReader", "decoded_rows", "sparse_workspace_bytes"]


def sparse_workspace_bytes(
    fmt: RowFormat, heads: int, max_tokens: int, top_k: int, device: torch.device | str
) -> int:
    """Bytes that decoding needs beside its arguments, whatever the batch.

    Parameters
    ----------
    fmt : RowFormat
    heads : int
        Query heads of this rank.
    max_tokens : int
        Queries of the largest batch, of which each has a list of its own.
    top_k : int
        Width of the lists.
    device : torch.device or str
        Its multiprocessors decide how a list is split.
    """
    return workspace_bytes(fmt, heads, max_tokens, top_k, sm_count=sm_count_of(torch.device(device)))


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
