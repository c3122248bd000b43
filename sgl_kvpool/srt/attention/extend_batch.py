"""Plan of an absorbed prefill batch: its stored rows in chunks, computed once, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["ExtendBatch", "PrefixChunk", "bounds", "rows_of_requests", "split_prefixes"]


@dataclass(frozen=True)
class PrefixChunk:
    """Consecutive stored rows of a batch that fit into the workspace.

    Attributes
    ----------
    start, count : int
        Position of the chunk's rows in the list of stored rows.
    first_request, last_request : int
        Requests with rows in the chunk, or all requests in the last chunk; `last_request` is exclusive.
    first_query, last_query : int
        Position of these requests' queries among the batch's tokens; `last_query` is exclusive.
    continued_until : int
        End of the first request's queries if that request has rows in earlier chunks, else `first_query`. No
        other request of the chunk can have rows in earlier chunks, except in the last chunk, which covers all
        requests and is merged as a whole.
    kv_indptr : torch.Tensor
        `[last_request - first_request + 1]` int32: bounds of each request's rows within the chunk.
    """

    start: int
    count: int
    first_request: int
    last_request: int
    first_query: int
    last_query: int
    continued_until: int
    kv_indptr: torch.Tensor


@dataclass(frozen=True)
class ExtendBatch:
    """Plan of a batch, the same for every layer.

    Attributes
    ----------
    prefix_tokens, query_tokens, longest_query : int
        Number of stored rows and of queries of all requests, and of queries of the longest request.
    kv_indices : torch.Tensor
        `[prefix_tokens]` row numbers of the stored rows, one request after the other.
    qo_indptr : torch.Tensor
        `[requests + 1]` int32: bounds of the requests' queries.
    prefix_chunks : tuple of PrefixChunk
        Chunks of the stored rows. The last one is attended together with the new tokens and therefore covers
        all requests.
    one_call : bool
        Whether FlashInfer attends stored rows and new tokens in one call; there is only one chunk then.
    """

    prefix_tokens: int
    query_tokens: int
    longest_query: int
    kv_indices: torch.Tensor
    qo_indptr: torch.Tensor
    prefix_chunks: tuple[PrefixChunk, ...]
    one_call: bool


def bounds(lengths: Sequence[int]) -> torch.Tensor:
    """Cumulative sums from 0, `[len + 1]` int64, on the CPU."""
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


def split_prefixes(
    prefix_bounds: torch.Tensor, query_bounds: torch.Tensor, chunk_tokens: int
) -> list[PrefixChunk]:
    """Split the list of stored rows into at least one chunk; the last chunk covers all requests."""
    requests = len(prefix_bounds) - 1
    total = int(prefix_bounds[-1])
    chunks = []
    for start in range(0, max(total, 1), chunk_tokens):
        end = min(start + chunk_tokens, total)
        if end == total:
            first, last = 0, requests
        else:
            first = int(torch.searchsorted(prefix_bounds, start, right=True)) - 1
            last = int(torch.searchsorted(prefix_bounds, end, right=False))
        inside = prefix_bounds[first : last + 1].clamp(start, end) - start
        chunks.append(
            PrefixChunk(
                start,
                end - start,
                first,
                last,
                int(query_bounds[first]),
                int(query_bounds[last]),
                int(query_bounds[first + 1 if prefix_bounds[first] < start else first]),
                inside.int(),
            )
        )
    return chunks


def rows_of_requests(prefix_lens: Sequence[int], query_lens: Sequence[int]) -> torch.Tensor:
    """Workspace rows of each request, one request after the other: stored rows, then new tokens.

    The workspace holds the stored rows of all requests first, then the new tokens.
    """
    prefix, query = (torch.tensor(lengths, dtype=torch.int64) for lengths in (prefix_lens, query_lens))
    length = prefix + query
    total = int(length.sum())
    begin = (length.cumsum(0) - length).repeat_interleave(length)
    place = torch.arange(total) - begin  # position within the request
    stored = prefix.repeat_interleave(length)
    first_stored = (prefix.cumsum(0) - prefix).repeat_interleave(length)
    first_own = (query.cumsum(0) - query).repeat_interleave(length) + int(prefix.sum())
    return torch.where(place < stored, first_stored + place, first_own + place - stored).int()
