"""Batches of fixed query length: decode, verification of drafts, and a draft's extend.

`mla_decode` reads their indices in SGLang's own request table. Only the number of rows that each query
attends is computed per step, from lengths on the device: in a CUDA graph, as part of the graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sgl_kvpool.attention.decode import sm_count_of, workspace_bytes

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    from sgl_kvpool.layout import RowFormat


#: Lists that a deterministic server attends at a time: with 16 heads and 16 splits, their partial results are
#: 134 MB.
DETERMINISTIC_LISTS = 256


def has_fixed_query_length(mode: ForwardMode) -> bool:
    """Whether every request of a batch in this mode has the same small number of new tokens."""
    return mode.is_decode_or_idle() or mode.is_target_verify() or mode.is_draft_extend_v2()


@dataclass
class DecodeBatch:
    """A batch of fixed query length; each query attends `kv_lens` rows, `[requests * queries_per_request]`
    int32 or int64.
    """

    kv_lens: torch.Tensor
    queries_per_request: int


def decode_tail(forward_batch: ForwardBatch, most: int) -> tuple[DecodeBatch, torch.Tensor] | None:
    """The requests at the end of a prefill batch with one new token each, as a decode batch; at most `most`.

    While another data-parallel rank prefills, SGLang turns a decode batch into an extend of one token per
    request (with prefill graphs, `dp_attn.py:777`). With `--enable-mixed-chunk` it appends running requests
    to the requests of a prefill. As prefill, the whole prefix of each such request would be gathered and, if
    the batch is attended in chunks, read once per head.

    Returns the batch and its rows in the request table; None unless the last request has exactly one.
    """
    lengths = forward_batch.extend_seq_lens_cpu
    count = 0
    while count < min(len(lengths), most) and lengths[-1 - count] == 1:
        count += 1
    if not count:
        return None
    first, end = len(lengths) - count, len(lengths)
    kv_lens, lists = forward_batch.seq_lens[first:end], forward_batch.req_pool_indices[first:end]
    if first:
        # Copies are aligned to 16 bytes, like the arguments that the kernels were compiled for.
        kv_lens, lists = kv_lens.clone(), lists.clone()
    return DecodeBatch(kv_lens, 1), lists


def is_deterministic() -> bool:
    """Whether a server's answers must not depend on its batches (--enable-deterministic-inference)."""
    from sglang.srt.runtime_context import get_exec

    return bool(get_exec().deterministic.enable_deterministic_inference)


def tokens_as_lists(forward_batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of rows that each token of a prefill or decode attends, and its row in the request table.

    With one list per token, `mla_decode` computes a token's result in the same way in any batch and for any
    boundary of chunks, in a prefill as in a decode. The new tokens' rows have to be stored before.
    """
    lists, lens = forward_batch.req_pool_indices, forward_batch.seq_lens
    if forward_batch.forward_mode.is_decode_or_idle():
        return lens, lists
    prefixes = forward_batch.extend_prefix_lens.long()
    new, tokens = lens - prefixes, sum(forward_batch.extend_seq_lens_cpu)
    each = torch.arange(len(new), device=new.device)
    request = torch.repeat_interleave(each, new, output_size=tokens)  # of each token
    place = torch.arange(tokens, device=new.device) - (new.cumsum(0) - new)[request]
    return prefixes[request] + place + 1, lists[request]


class KVLens:
    """Computes how many rows each query of a batch attends, in one static buffer.

    Of `ranks` ranks of decode context parallelism, this is `rank`, which attends its own rows.
    """

    def __init__(
        self,
        requests: int,
        most_queries: int,
        device: torch.device | str,
        draft_step: int = 0,
        *,
        rank: int = 0,
        ranks: int = 1,
    ):
        self.draft_step, self.rank, self.ranks = draft_step, rank, ranks
        self.buffer = torch.zeros(requests * most_queries, dtype=torch.int32, device=device)
        self._ordinals = torch.arange(1, most_queries + 1, dtype=torch.int32, device=device)

    def require(self, tokens: int) -> None:
        """Refuse CUDA graphs for batches that exceed the buffer."""
        if tokens > len(self.buffer):
            raise ValueError(
                f"CUDA graphs of {tokens} tokens requested, but this server was sized for {len(self.buffer)} "
                "queries; lower --cuda-graph-max-bs-decode, or raise --max-running-requests"
            )

    def of(self, forward_batch: ForwardBatch) -> DecodeBatch:
        """A batch with a view of its kv_lens: the buffer, or SGLang's lengths for a plain decode on one rank.

        Computes nothing and reads no lengths; `fill` computes those in the buffer. When SGLang replays a
        graph, it passes a padded number of requests with unpadded tensors, so the number of queries per
        request is taken from `spec_info`. ValueError for more queries than the server was sized for.
        """
        requests, mode, declared = forward_batch.batch_size, forward_batch.forward_mode, 1
        if not mode.is_decode_or_idle():
            spec = forward_batch.spec_info
            if spec is None:  # a warm-up batch
                declared = len(self._ordinals)
            else:
                declared = spec.draft_token_num if mode.is_target_verify() else spec.num_tokens_per_req
        queries = int(declared)
        tokens = requests * queries
        if not 1 <= queries <= len(self._ordinals) or tokens > len(self.buffer):
            raise ValueError(
                f"{requests} requests of {queries} queries in {forward_batch.forward_mode.name}: this server "
                f"was sized for {len(self._ordinals)} per request and {len(self.buffer)} in all"
            )
        if forward_batch.forward_mode.is_decode_or_idle() and not self._computes_decodes:
            return DecodeBatch(forward_batch.seq_lens[:requests], queries)
        return DecodeBatch(self.buffer[:tokens], queries)

    def fill(self, batch: DecodeBatch, forward_batch: ForwardBatch) -> None:
        """Compute a batch's kv_lens with operations on static tensors only, which a graph can record."""
        mode = forward_batch.forward_mode
        if mode.is_decode_or_idle():
            if self._computes_decodes:
                lengths = forward_batch.seq_lens[: forward_batch.batch_size]
                torch.add(lengths, self.draft_step, out=batch.kv_lens)
                self._keep_own(batch.kv_lens)
            return
        queries = batch.queries_per_request
        lengths = forward_batch.seq_lens[: forward_batch.batch_size, None]  # [requests, 1]
        torch.add(lengths, self._ordinals[:queries], out=batch.kv_lens.view(-1, queries))
        if mode.is_draft_extend_v2():
            # A draft extend's lengths already include the new tokens; those of a verification do not.
            batch.kv_lens.sub_(queries)
        self._keep_own(batch.kv_lens)

    @property
    def _computes_decodes(self) -> bool:
        """Whether the kv_lens of a plain decode are other numbers than SGLang's lengths."""
        return self.draft_step > 0 or self.ranks > 1

    def _keep_own(self, kv_lens: torch.Tensor) -> None:
        """Of positions 0 to kv_lens - 1, count those of this rank: rank, rank + ranks, ..."""
        if self.ranks > 1:
            kv_lens.add_(self.ranks - 1 - self.rank).floor_divide_(self.ranks)


def decode_workspace_bytes(
    fmt: RowFormat, heads: int, requests: int, max_rows: int, most_queries: int, device: torch.device | str
) -> int:
    """Bytes of workspace that `mla_decode` needs for up to `requests` requests of up to `most_queries`
    queries.

    `max_rows` is the width of SGLang's request table; the device decides how a list is split. A deterministic
    server attends up to `DETERMINISTIC_LISTS` at a time.
    """
    sms = sm_count_of(torch.device(device))
    if is_deterministic():
        return workspace_bytes(fmt, heads, DETERMINISTIC_LISTS, max_rows, sm_count=sms, batch_invariant=True)
    return max(
        workspace_bytes(fmt, heads, requests * queries, max_rows, queries_per_list=queries, sm_count=sms)
        for queries in range(1, most_queries + 1)
    )
