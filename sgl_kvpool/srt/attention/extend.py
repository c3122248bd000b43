"""Absorbed prefill over stored rows on CUDA: rows are decoded and attended in bounded chunks, then merged.

The stored prefixes of a batch form one list of rows, one request after the other. If this list and the new
tokens fit into the workspace together, one call of FlashInfer's MLA kernel attends both, as in SGLang's own
backend, with the workspace as pages. Otherwise, or if FlashInfer refuses the batch, the list is split into
chunks of at most the workspace's size: each chunk is decoded, attended by SGLang's Triton kernel for extends,
and merged by log-sum-exp. The new tokens are attended together with the last chunk, from keys that the caller
passes.

Chunks and bounds are computed once per batch, on the host, from lengths that SGLang has there. Row numbers
are listed once per batch, on the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sgl_kvpool.codec import gather_rows
from sgl_kvpool.layout import RowFormat

logger = logging.getLogger(__name__)

#: Maximum number of rows decoded at a time: 65536 rows of 576 bf16 values are 75 MB.
WORKSPACE_TOKENS = 65536


@dataclass(frozen=True)
class PrefixChunk:
    """Consecutive stored rows of a batch that fit into the workspace."""

    #: Position of the chunk's rows in the list of stored rows.
    start: int
    count: int
    #: Requests with rows in the chunk, or all requests in the last chunk; `last_request` is exclusive.
    first_request: int
    last_request: int
    #: Position of these requests' queries among the batch's tokens; `last_query` is exclusive.
    first_query: int
    last_query: int
    #: End of the first request's queries if that request has rows in earlier chunks, else `first_query`. No
    #: other request of the chunk can have rows in earlier chunks, except in the last chunk, which covers all
    #: requests and is merged as a whole.
    continued_until: int
    #: `[last_request - first_request + 1]` int32: bounds of each request's rows within the chunk.
    kv_indptr: torch.Tensor


@dataclass(frozen=True)
class ExtendBatch:
    """Plan of a batch, the same for every layer."""

    #: Number of stored rows and of queries of all requests, and of queries of the longest request.
    prefix_tokens: int
    query_tokens: int
    longest_query: int
    #: `[prefix_tokens]` row numbers of the stored rows, one request after the other.
    kv_indices: torch.Tensor
    #: `[requests + 1]` int32: bounds of the requests' queries.
    qo_indptr: torch.Tensor
    #: Chunks of the stored rows. The last one is attended together with the new tokens and therefore covers
    #: all requests.
    prefix_chunks: tuple[PrefixChunk, ...]
    #: Whether FlashInfer attends stored rows and new tokens in one call; there is only one chunk then.
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
        first_query, last_query = int(query_bounds[first]), int(query_bounds[last])
        until = int(query_bounds[first + 1 if prefix_bounds[first] < start else first])
        chunks.append(
            PrefixChunk(start, end - start, first, last, first_query, last_query, until, inside.int())
        )
    return chunks


def rows_of_requests(prefix_lens: Sequence[int], query_lens: Sequence[int]) -> torch.Tensor:
    """Workspace rows of each request, its stored ones first; the workspace begins with those of all."""
    prefix, query = (torch.tensor(lengths, dtype=torch.int64) for lengths in (prefix_lens, query_lens))
    length = prefix + query
    total = int(length.sum())
    begin = (length.cumsum(0) - length).repeat_interleave(length)
    place = torch.arange(total) - begin  # position within the request
    stored = prefix.repeat_interleave(length)
    first_stored = (prefix.cumsum(0) - prefix).repeat_interleave(length)
    first_new = (query.cumsum(0) - query).repeat_interleave(length) + int(prefix.sum())
    return torch.where(place < stored, first_stored + place, first_new + place - stored).int()


def plan_extend(
    prefix_lens: Sequence[int],
    query_lens: Sequence[int],
    list_rows: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor],
    reader: ExtendReader,
    scale: float,
) -> ExtendBatch:
    """Compute how a batch with `prefix_lens` stored rows and `query_lens` new tokens per request is attended.

    `list_rows` gets the stored rows' lengths and bounds on the device (`[requests]` and `[requests + 1]`
    int32) and their number, and returns their row numbers.
    """
    device = reader.workspace.device
    prefix_bounds, query_bounds = bounds(prefix_lens), bounds(query_lens)
    stored, queries = int(prefix_bounds[-1]), int(query_bounds[-1])
    chunks = split_prefixes(prefix_bounds, query_bounds, reader.workspace_tokens)
    fits = queries > 0 and reader.wrapper is not None and stored + queries <= reader.workspace_tokens
    # One copy to the device for all small integers of the batch; a pinned source makes it asynchronous.
    parts = [query_bounds, prefix_bounds.diff(), prefix_bounds, *(chunk.kv_indptr for chunk in chunks)]
    host = torch.cat([part.int() for part in parts])
    on_device = (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
    split = on_device.split([len(part) for part in parts])
    kv_indices = list_rows(split[1], split[2], stored)
    one_call = fits and reader.plan_wrapper(prefix_lens, query_lens, query_bounds, scale)
    return ExtendBatch(
        prefix_tokens=stored,
        query_tokens=queries,
        longest_query=max(query_lens, default=0),
        kv_indices=kv_indices,
        qo_indptr=split[0],
        prefix_chunks=tuple(
            replace(p, kv_indptr=inside) for p, inside in zip(chunks, split[3:], strict=True)
        ),
        one_call=one_call,
    )


def keep_pinned(wrapper: Any) -> None:
    """Keep the pinned memory of FlashInfer's last plan from reuse until its copy to the GPU has run."""
    if hasattr(wrapper, "_pin_memory_int_workspace_buffer"):  # of FlashInfer's fa2 and fa3
        # torch's allocator knows of torch's own copies only; this one runs behind FlashInfer's.
        wrapper._pin_memory_int_workspace_buffer[:1].to(wrapper.device, non_blocking=True)


def extend_workspace(
    fmt: RowFormat, dtype: torch.dtype, device: torch.device | str, tokens: int = WORKSPACE_TOKENS
) -> torch.Tensor:
    """Memory for the decoded rows of one chunk, `[tokens, R + P]`."""
    if tokens < 1:
        raise ValueError(f"tokens={tokens} is not positive")
    return torch.empty((tokens, fmt.head_dim), dtype=dtype, device=device)


def extend_workspace_bytes(fmt: RowFormat, tokens: int = WORKSPACE_TOKENS) -> int:
    """Bytes of `extend_workspace` in bfloat16 or float16, for the memory budget."""
    return tokens * fmt.head_dim * torch.bfloat16.itemsize


class ExtendReader:
    """Attends the stored rows and the new tokens of a batch.

    `workspace` is from `extend_workspace`, in the dtype of queries and result; readers on one stream may
    share it. With FlashInfer's `wrapper`, batches that fit into it are attended in one call, else in chunks.
    """

    def __init__(self, fmt: RowFormat, heads: int, workspace: torch.Tensor, *, wrapper: Any = None):
        self.fmt, self.heads, self.workspace = fmt, heads, workspace
        self.workspace_tokens, self.dtype = len(workspace), workspace.dtype
        # FlashInfer's kernel requires rotary values.
        self.wrapper: Any = wrapper if fmt.qk_rope_head_dim else None
        self._refusal_logged = False
        if self.wrapper is not None:
            # A ValueError; malformed metadata raises ValueError itself, which propagates.
            from flashinfer.mla._batch_mla._backends._capabilities import _BackendPlanUnsupportedError

            self._refusal = _BackendPlanUnsupportedError

    def plan_wrapper(
        self, prefix_lens: Sequence[int], query_lens: Sequence[int], query_bounds: torch.Tensor, scale: float
    ) -> bool:
        """Plan FlashInfer's call for a batch whose rows `attend` puts into the workspace.

        Bounds and lengths stay on the host, where FlashInfer takes them, so nothing waits for the GPU.
        Returns False if FlashInfer's kernel refuses the batch, which is then attended in chunks: it refuses
        some lengths if the heads of a rank do not divide its tile of 64 or 128 (12, 20, 24, 40 heads), and
        more than 16384 work items.
        """
        lengths = [stored + new for stored, new in zip(prefix_lens, query_lens, strict=True)]
        rows = rows_of_requests(prefix_lens, query_lens).pin_memory()
        try:
            self.wrapper.plan(
                qo_indptr=query_bounds.int(),
                kv_indptr=bounds(lengths).int(),
                kv_indices=rows.to(self.workspace.device, non_blocking=True),
                kv_len_arr=torch.tensor(lengths, dtype=torch.int32),
                num_heads=self.heads,
                head_dim_ckv=self.fmt.kv_lora_rank,
                head_dim_kpe=self.fmt.qk_rope_head_dim,
                page_size=1,
                causal=True,
                sm_scale=scale,
                q_data_type=self.dtype,
                kv_data_type=self.dtype,
            )
        except self._refusal as refusal:
            if not self._refusal_logged:
                logger.warning(
                    "sgl-kvpool: FlashInfer refuses a prefill, which is attended in chunks: %s", refusal
                )
                self._refusal_logged = True
            return False
        keep_pinned(self.wrapper)
        return True

    def require(self, tokens: int) -> None:
        """Refuse batches of more new tokens than SGLang's prefill kernel addresses with 32-bit offsets."""
        most = (2**31 - 1) // (self.heads * self.fmt.head_dim)
        if tokens > most:
            raise ValueError(
                f"prefill batches have up to {tokens} tokens of {self.heads} heads, but SGLang's kernel "
                f"takes at most {most}; set --chunked-prefill-size to {most} or less"
            )

    def attend(
        self,
        q: torch.Tensor,
        q_rope: torch.Tensor,
        extend_kv: torch.Tensor,
        rows: torch.Tensor,
        batch: ExtendBatch,
        scale: float,
        *,
        k_scale: float = 1.0,
    ) -> torch.Tensor:
        """Causal attention of a batch over its stored rows and its own tokens: `[query_tokens, heads, R]`.

        `q` and `q_rope` are `[query_tokens, heads, R]` and `[query_tokens, heads, P]`, `extend_kv`
        `[query_tokens, R + P]` the keys of the new tokens in q's dtype, as is the result, and `rows` the
        pool's, `[slots, row_bytes]` uint8, with any row stride.
        """
        if batch.one_call:
            return self._in_one_call(q, q_rope, extend_kv, rows, batch, k_scale)
        self.require(len(q))
        q = torch.cat([q, q_rope], dim=-1)
        *earlier, last = batch.prefix_chunks
        kv = self._decode(rows, batch, earlier[0] if earlier else last, k_scale)
        if not earlier:
            return self._over_chunk(q, kv, batch, last, scale, extend_kv=extend_kv, with_lse=False)[0]
        merged = self._over_chunk(q, kv, batch, earlier[0], scale)
        for chunk in earlier[1:]:
            kv = self._decode(rows, batch, chunk, k_scale)
            self._add(merged, self._over_chunk(q, kv, batch, chunk, scale), chunk)
        kv = self._decode(rows, batch, last, k_scale)
        final = self._over_chunk(q, kv, batch, last, scale, extend_kv=extend_kv)
        # `final` includes the new tokens, so that every query attended at least one row.
        return _merge_state(merged, final)[0]

    def _decode(self, rows, batch: ExtendBatch, chunk: PrefixChunk, k_scale: float) -> torch.Tensor:
        """Decode the rows of a chunk into the workspace: `[count, R + P]`."""
        kv = self.workspace[: chunk.count]
        kv_indices = batch.kv_indices[chunk.start : chunk.start + chunk.count]
        gather_rows(rows, kv_indices, self.fmt, self.dtype, out=kv, k_scale=k_scale)
        return kv

    def _in_one_call(self, q, q_rope, extend_kv, rows, batch: ExtendBatch, k_scale: float) -> torch.Tensor:
        rank = self.fmt.kv_lora_rank
        stored, queries = batch.prefix_tokens, batch.query_tokens
        kv = self.workspace[: stored + queries]
        gather_rows(rows, batch.kv_indices, self.fmt, self.dtype, out=kv[:stored], k_scale=k_scale)
        kv[stored:].copy_(extend_kv)
        pages = kv.unsqueeze(1)  # [tokens, 1, R + P]: pages of one token
        out = torch.empty((queries, self.heads, rank), dtype=q.dtype, device=q.device)
        self.wrapper.run(
            q_nope=q, q_pe=q_rope, ckv_cache=pages[..., :rank], kpe_cache=pages[..., rank:], out=out
        )
        return out

    def _over_chunk(
        self, q, kv, batch: ExtendBatch, chunk: PrefixChunk, scale, *, extend_kv=None, with_lse=True
    ):
        """Output `[queries, heads, R]` and lse `[queries, heads]` over a chunk's rows and `extend_kv`."""
        from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

        rank = self.fmt.kv_lora_rank
        # The kernel indexes queries by their bounds in the whole batch and does not write the results of
        # other queries.
        out = torch.zeros((len(q), self.heads, rank), dtype=q.dtype, device=q.device)
        lse = None
        if with_lse:
            lse = torch.full((len(q), self.heads), float("-inf"), dtype=torch.float32, device=q.device)
        kv = kv.unsqueeze(1)
        new = kv[:0] if extend_kv is None else extend_kv.unsqueeze(1)
        qo_indptr = batch.qo_indptr[chunk.first_request : chunk.last_request + 1]
        # `batch.kv_indices` is not read: the rows are in order.
        extend_attention_fwd(
            q, new, new[..., :rank], out, kv, kv[..., :rank], qo_indptr, chunk.kv_indptr, batch.kv_indices,
            None, True, None, batch.longest_query, 1.0, 1.0, sm_scale=scale, lse_extend=lse,
            skip_extend=extend_kv is None, skip_prefix=chunk.count == 0, identity_kv_indices=True,
        )  # fmt: skip
        return out, lse

    @staticmethod
    def _add(merged, partial, chunk: PrefixChunk) -> None:
        """Merge a chunk's result for its queries into `merged`, the result for all queries, in place."""
        begin, end = chunk.first_query, chunk.continued_until
        if begin < end:
            # Merge only the first request's queries: two results without any rows would merge to NaN.
            result = _merge_state([t[begin:end] for t in merged], [t[begin:end] for t in partial])
            # Copy the result afterwards: in place, a thread of SGLang's kernel could overwrite a value that
            # another thread still reads.
            for whole, part in zip(merged, result, strict=True):
                whole[begin:end] = part
            begin = end
        for whole, part in zip(merged, partial, strict=True):
            whole[begin : chunk.last_query] = part[begin : chunk.last_query]


def _merge_state(one, other) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over two disjoint sets of rows, `(out, lse)` each."""
    from sglang.srt.layers.attention.merge_state import merge_state

    return merge_state(*one, *other)
