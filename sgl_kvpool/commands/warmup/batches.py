"""Batch sizes for which `mla_decode` launches different kernels."""

from __future__ import annotations

import torch

from sgl_kvpool.attention.decode import sm_count_of
from sgl_kvpool.attention.decode_config import MAX_PROGRAMS_PER_SM, MAX_ROUNDS, decode_config
from sgl_kvpool.layout import RowFormat

__all__ = ["split_and_whole"]


def split_and_whole(fmt: RowFormat, heads: int, queries: int, width: int, device: str) -> list[int]:
    """Smallest batches whose lists are cut into several splits and into one split, which use two kernels.

    Parameters
    ----------
    fmt : RowFormat
    heads : int
        Query heads per rank.
    queries : int
        Queries that share a list.
    width : int
        Entries of a list.
    device : str

    Returns
    -------
    list of int
        Number of lists of each batch; one entry if all batches use the same kernel.
    """
    index = torch.cuda.current_device() if device == "cuda" else None
    sm_count = sm_count_of(torch.device(device, index))
    first: dict[bool, int] = {}
    for lists in range(1, MAX_ROUNDS * MAX_PROGRAMS_PER_SM * sm_count + 2):
        config = decode_config(fmt, heads, queries, lists, width, sm_count)
        first.setdefault(config.splits > 1, lists)
    return sorted(first.values())
