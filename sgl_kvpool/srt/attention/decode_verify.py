"""Batches of fixed query length: decode, verification of drafts, and a draft's extend.

`mla_decode` reads their indices in SGLang's own request table. Only the number of rows that each query
attends is computed per step, from lengths on the device: in a CUDA graph, as part of the graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.runtime_context import get_buffer, get_exec

from sgl_kvpool.attention.decode import DecodeWorkspace, mla_decode, sm_count_of, workspace_bytes

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    from sgl_kvpool.layout import RowFormat
    from sgl_kvpool.srt.pool.row_pool import RowPool


#: Lists that a deterministic server attends at a time: with 16 heads and 16 splits, their partial results are
#: 134 MB.
DETERMINISTIC_LISTS = 256


def has_fixed_query_length(mode: ForwardMode) -> bool:
    """Whether every request of a batch in this mode has the same small number of new tokens."""
    return mode.is_decode_or_idle() or mode.is_target_verify() or mode.is_draft_extend_v2()


@dataclass
class DecodeBatch:
    """A batch of fixed query length; each query attends the first `kv_lens` rows of its request's list.

    `kv_lens` is `[requests * queries_per_request]` and `lists`, rows of the request table, `[requests]`; both
    are int32 or int64.
    """

    kv_lens: torch.Tensor
    lists: torch.Tensor
    queries_per_request: int = 1


def decode_tail(forward_batch: ForwardBatch, most: int) -> DecodeBatch | None:
    """The requests at the end of a prefill batch with one new token each, as a decode batch; at most `most`.

    While another data-parallel rank prefills, SGLang turns a decode batch into an extend of one token per
    request (with prefill graphs, `dp_attn.py:777`). With `--enable-mixed-chunk` it appends running requests
    to the requests of a prefill. As prefill, the whole prefix of each such request would be gathered and, if
    the batch is attended in chunks, read once per head.

    None unless the last request has exactly one.
    """
    lengths = forward_batch.extend_seq_lens_cpu
    count = 0
    while count < min(len(lengths), most) and lengths[-1 - count] == 1:
        count += 1
    if not count:
        return None
    decodes = slice(len(lengths) - count, len(lengths))
    return DecodeBatch(forward_batch.seq_lens[decodes], forward_batch.req_pool_indices[decodes])


def is_deterministic() -> bool:
    """Whether a server's answers must not depend on its batches (--enable-deterministic-inference)."""
    return bool(get_exec().deterministic.enable_deterministic_inference)


def tokens_as_lists(forward_batch: ForwardBatch) -> DecodeBatch:
    """Every token of a prefill or decode as a request of its own.

    With one list per token, `mla_decode` computes a token's result in the same way in any batch and for any
    boundary of chunks, in a prefill as in a decode. The new tokens' rows have to be stored before.
    """
    lists, lens = forward_batch.req_pool_indices, forward_batch.seq_lens
    if forward_batch.forward_mode.is_decode_or_idle():
        return DecodeBatch(lens, lists)
    prefixes = forward_batch.extend_prefix_lens.long()
    new, tokens = lens - prefixes, sum(forward_batch.extend_seq_lens_cpu)
    each = torch.arange(len(new), device=new.device)
    request = torch.repeat_interleave(each, new, output_size=tokens)  # of each token
    place = torch.arange(tokens, device=new.device) - (new.cumsum(0) - new)[request]
    return DecodeBatch(prefixes[request] + place + 1, lists[request])


class KVLens:
    """Computes how many rows each query of a batch attends, in one static buffer.

    Of `dcp_size` ranks of decode context parallelism, this is `dcp_rank`, which attends its own rows.
    """

    def __init__(
        self,
        requests: int,
        most_queries: int,
        device: torch.device | str,
        draft_step: int = 0,
        *,
        dcp_rank: int = 0,
        dcp_size: int = 1,
    ):
        self.draft_step, self.dcp_rank, self.dcp_size = draft_step, dcp_rank, dcp_size
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
        lists = forward_batch.req_pool_indices[:requests]
        if forward_batch.forward_mode.is_decode_or_idle() and not self._computes_decodes:
            return DecodeBatch(forward_batch.seq_lens[:requests], lists)
        return DecodeBatch(self.buffer[:tokens], lists, queries)

    def fill(self, batch: DecodeBatch, forward_batch: ForwardBatch) -> None:
        """Compute a batch's kv_lens with operations on static tensors only, which a graph can record."""
        mode = forward_batch.forward_mode
        if mode.is_decode_or_idle():
            if self._computes_decodes:
                lengths = forward_batch.seq_lens[: forward_batch.batch_size]
                torch.add(lengths, self.draft_step, out=batch.kv_lens)
                self._keep_local(batch.kv_lens)
            return
        queries = batch.queries_per_request
        lengths = forward_batch.seq_lens[: forward_batch.batch_size, None]  # [requests, 1]
        torch.add(lengths, self._ordinals[:queries], out=batch.kv_lens.view(-1, queries))
        if mode.is_draft_extend_v2():
            # A draft extend's lengths already include the new tokens; those of a verification do not.
            batch.kv_lens.sub_(queries)
        self._keep_local(batch.kv_lens)

    @property
    def _computes_decodes(self) -> bool:
        """Whether the kv_lens of a plain decode are other numbers than SGLang's lengths."""
        return self.draft_step > 0 or self.dcp_size > 1

    def _keep_local(self, kv_lens: torch.Tensor) -> None:
        """Of positions 0 to kv_lens - 1, count those of this rank."""
        if self.dcp_size > 1:
            kv_lens.add_(self.dcp_size - 1 - self.dcp_rank).floor_divide_(self.dcp_size)


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


class ListReader:
    """Attends rows of a pool by the lists of SGLang's request table.

    With decode context parallelism a rank attends its own rows: every `dcp_size`-th entry of a list. `heads`
    is the number of query heads of one rank, and `requests` and `most_queries` bound a batch. Target, draft
    and draft steps run one after the other and share a workspace.
    """

    def __init__(
        self,
        pool: RowPool,
        req_to_token: torch.Tensor,
        heads: int,
        requests: int,
        most_queries: int,
        draft_step: int = 0,
    ):
        self.pool, self.req_to_token = pool, req_to_token
        self.dcp_size, self.dcp_rank = pool.dcp_size, pool.dcp_rank
        self._local_indices = req_to_token[:, self.dcp_rank :: self.dcp_size]
        device, decoded_heads = req_to_token.device, heads * self.dcp_size  # a rank decodes the heads of all
        self.kv_lens = KVLens(
            requests, most_queries, device, draft_step, dcp_rank=self.dcp_rank, dcp_size=self.dcp_size
        )
        self.deterministic = is_deterministic()
        tokens = max(requests * most_queries, DETERMINISTIC_LISTS if self.deterministic else 0)
        #: `[tokens, heads]` float32, natural: of the last call.
        self.lse = torch.empty((tokens, decoded_heads), dtype=torch.float32, device=device)
        needed = decode_workspace_bytes(
            pool.row_format, decoded_heads, requests, self._local_indices.shape[1], most_queries, device
        )
        self._workspace = get_buffer(f"kvpool_mla_decode_{needed}", lambda: DecodeWorkspace(needed, device))

    def attend(self, q, q_rope, layer: RadixAttention, batch: DecodeBatch, out: torch.Tensor) -> None:
        """Attend the queries of a batch, into `out` and the first rows of `lse`.

        `q` is `[tokens, heads, R + P]`, or `[tokens, heads, R]` beside `q_rope` `[tokens, heads, P]`.
        """
        if self.deterministic and len(out) > DETERMINISTIC_LISTS:
            for first in range(0, len(out), DETERMINISTIC_LISTS):
                some = slice(first, first + DETERMINISTIC_LISTS)
                part = DecodeBatch(batch.kv_lens[some], batch.lists[some])
                self.attend(q[some], None if q_rope is None else q_rope[some], layer, part, out[some])
            return
        pool, layer_id = self.pool, layer.layer_id
        mla_decode(
            q,
            pool.get_row_buffer(layer_id).squeeze(1),
            self._local_indices,
            batch.kv_lens,
            pool.row_format,
            layer.scaling,
            pool.k_scale(layer_id),
            q_rope=q_rope,
            list_index=batch.lists,
            queries_per_list=batch.queries_per_request,
            page=pool.page_stride,
            out=out,
            lse=self.lse[: len(out)],
            workspace=self._workspace,
            batch_invariant=self.deterministic,
        )
