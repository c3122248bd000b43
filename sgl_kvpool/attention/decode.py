"""`mla_decode`: attention of a few queries over lists of stored rows, and its workspace."""

from functools import cache

import numpy as np
import torch

from sgl_kvpool.attention import cpu, decode_checks
from sgl_kvpool.attention.decode_config import (
    DEFAULT_SM_COUNT,
    INVARIANT_LISTS,
    MAX_PROGRAMS_PER_SM,
    MAX_ROUNDS,
    DecodeConfig,
    decode_config,
    partial_elements,
)
from sgl_kvpool.codec import checks
from sgl_kvpool.layout import RowFormat
from sgl_kvpool.refusal import whole_number


def workspace_bytes(
    fmt: RowFormat,
    heads: int,
    max_tokens: int,
    max_rows: int,
    *,
    queries_per_list: int = 1,
    sm_count: int = DEFAULT_SM_COUNT,
    batch_invariant: bool = False,
) -> int:
    """Bytes of a `DecodeWorkspace` for all batches of up to `max_tokens` queries.

    `heads`: Query heads of one rank.
    `max_tokens`: Queries of the largest batch.
    `max_rows`: Largest width of a call's `kv_indices`.
    `queries_per_list`: Value passed to `mla_decode`. A workspace for several values needs the maximum of
      their sizes.
    `sm_count`: Streaming multiprocessors of the device.
    `batch_invariant`: Value passed to `mla_decode`.

    ValueError if `heads`, `queries_per_list` or `sm_count` is not a positive integer, or `max_tokens` or
    `max_rows` is negative.
    """
    heads, sm_count = whole_number("heads", heads), whole_number("sm_count", sm_count)
    most = 0
    max_tokens, max_rows = whole_number("max_tokens", max_tokens, 0), whole_number("max_rows", max_rows, 0)
    lists = max(1, max_tokens // whole_number("queries_per_list", queries_per_list))
    if batch_invariant:
        config = decode_config(fmt, heads, queries_per_list, INVARIANT_LISTS, max_rows, sm_count)
        return partial_elements(fmt, lists * queries_per_list, heads, config.splits) * torch.float32.itemsize
    # Larger batches need no check: if there are more lists than programs in `MAX_ROUNDS` rounds, no list is
    # split.
    for count in range(1, min(lists, MAX_ROUNDS * MAX_PROGRAMS_PER_SM * sm_count) + 1):
        config = decode_config(fmt, heads, queries_per_list, count, max_rows, sm_count)
        most = max(most, partial_elements(fmt, count * queries_per_list, heads, config.splits))
    return most * torch.float32.itemsize


class DecodeWorkspace:
    """Memory for partial results of splits: allocated once, shared by all calls on a stream.

    `size_bytes`: Result of `workspace_bytes`.
    """

    def __init__(self, size_bytes: int, device: torch.device | str) -> None:
        if size_bytes < 0:
            raise ValueError(f"size_bytes={size_bytes} is negative; take it from workspace_bytes")
        self.buffer = torch.empty(-(-size_bytes // 4), dtype=torch.float32, device=device)

    @property
    def size_bytes(self) -> int:
        return self.buffer.numel() * self.buffer.element_size()


def mla_decode(
    q: torch.Tensor,
    row_buffer: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_lens: torch.Tensor,
    fmt: RowFormat,
    scale: float,
    k_scale: float = 1.0,
    *,
    q_rope: torch.Tensor | None = None,
    list_index: torch.Tensor | None = None,
    queries_per_list: int = 1,
    page: tuple[int, int] | tuple[int, int, int] | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: DecodeWorkspace | None = None,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of absorbed MLA queries over stored rows, which are read once and decoded in registers.

    Query t attends the first ``kv_lens[t]`` entries of one list of rows: with ``queries_per_list`` = n,
    queries b * n to b * n + n - 1 share list ``list_index[b]``. Scores are ``scale * q . row``; the values
    are the latent part of the rows. On CUDA, launches depend on shapes only, nothing waits for the device,
    and nothing is allocated if `out`, `lse` and `workspace` are given. Therefore a call can be captured in a
    CUDA graph and replayed for other lists.

    `q` [T, H, R + P]: bfloat16 or float16, on a CPU also float32; or [T, H, R] with `q_rope`. All strides
      except the last are free. The kernel multiplies in bfloat16 and rounds float16 queries to it.
    `row_buffer` [S, fmt.row_bytes], uint8: The rows of a layer, with any stride; on CUDA, address and stride
      are multiples of 16. Only rows in the lists are read.
    `kv_indices` [N, M], int32 or int64: Row numbers, any strides. Negative entries are skipped, at any
      position.
    `kv_lens` [T], int32 or int64: Number of entries of its list that each query attends, clamped to 0..M.
      Queries that share a list also share its rows: a NaN in a row that one of them attends reaches all of
      them.
    `k_scale`: k_scale with which the rows were encoded; layouts without k_scale ignore it.
    `q_rope` [T, H, P]: Rotary part of the queries, in q's dtype.
    `list_index` [T / queries_per_list], int32 or int64: List of each group of queries; list b for group b by
      default.
    `page`: If given, entries of `kv_indices` are slots, of which it gives the rows.
    `out` [T, H, R], q's dtype: Written and returned; all strides except the last are free.
    `lse` [T, H], float32: Written and returned; any strides.
    `workspace`: Memory for partial results; allocated for this call by default.
    `batch_invariant`: Whether the bits of a query's result must not depend on the other lists of the call:
      lists are then split as in a batch of `INVARIANT_LISTS`. With one query per list, calls of the same M
      give a query the same bits in any batch.
    Returns [T, H, R], q's dtype, 0 for a query without rows, and [T, H], float32, the natural logarithm of
      the sum of exponentials of the scores, -inf for a query without rows.
    IndexError: for a row number of S or more, or a list that does not exist, on a CPU. On CUDA such entries
      and lists are skipped.
    TypeError, ValueError: for dtypes, shapes, strides or sizes that do not fit, tensors on different devices,
      or a workspace that is too small.
    RuntimeError: on a GPU before Hopper.
    """
    checks.row_buffer(row_buffer, fmt, "row_buffer")
    q_nope, q_rope = decode_checks.queries(q, q_rope, row_buffer, fmt)
    tokens, heads, rank = q_nope.shape
    groups = decode_checks.tokens_per_list(queries_per_list, tokens)
    decode_checks.lists(kv_indices, list_index, groups, row_buffer)
    decode_checks.index(kv_lens, "kv_lens", (tokens,), row_buffer)
    page = decode_checks.page(page)
    scale = decode_checks.scale(scale)
    k_scale = checks.scale(k_scale, fmt)
    if out is None:
        out = q.new_empty((tokens, heads, rank))
    else:
        checks.output(out, "out", (tokens, heads, rank), q.dtype, row_buffer)
    if lse is None:
        lse = q.new_empty((tokens, heads), dtype=torch.float32)
    else:
        checks.output(lse, "lse", (tokens, heads), torch.float32, row_buffer, dense=False)

    params = decode_checks.DecodeParams(
        q=q_nope, q_rope=q_rope, row_buffer=row_buffer, kv_indices=kv_indices, kv_lens=kv_lens,
        list_index=list_index, fmt=fmt, scale=scale, k_scale=k_scale, queries_per_list=queries_per_list,
        page=page, out=out, lse=lse,
    )  # fmt: skip
    if not row_buffer.is_cuda:
        _decode_on_cpu(params, batch_invariant)
        return out, lse

    from sgl_kvpool.attention.decode_launch import launch  # machines without a GPU may lack Triton

    decode_checks.rows_on_cuda(row_buffer, fmt)
    split_for, width = INVARIANT_LISTS if batch_invariant else groups, kv_indices.shape[1]
    config = decode_config(fmt, heads, queries_per_list, split_for, width, sm_count_of(row_buffer.device))
    partial = partial_results(workspace, config, fmt, tokens, heads, row_buffer.device)
    launch(params, partial, config)
    return out, lse


@cache
def sm_count_of(device: torch.device) -> int:
    """Number of streaming multiprocessors of a GPU; `DEFAULT_SM_COUNT` for other devices."""
    if device.type != "cuda":
        return DEFAULT_SM_COUNT
    return torch.cuda.get_device_properties(device).multi_processor_count


def partial_results(
    workspace: DecodeWorkspace | None,
    config: DecodeConfig,
    fmt: RowFormat,
    tokens: int,
    heads: int,
    device: torch.device,
) -> torch.Tensor:
    """Memory for the results of a call's splits, float32; ValueError if the workspace is too small."""
    needed = partial_elements(fmt, tokens, heads, config.splits)
    if workspace is None:
        return torch.empty(needed, dtype=torch.float32, device=device)
    buffer = workspace.buffer
    if buffer.device != device or buffer.numel() < needed:
        raise ValueError(
            f"the workspace has {workspace.size_bytes} bytes on {buffer.device}; this call of {tokens} "
            f"queries and {config.splits} splits needs {needed * 4} on {device}, size it with workspace_bytes"
        )
    return buffer


def _decode_on_cpu(params: decode_checks.DecodeParams, batch_invariant: bool) -> None:
    # numpy makes the lists: with cold caches an operation of torch takes 20 to 80 us, of 3 ms for 65,536 rows
    # and one head.
    p, each = params, params.queries_per_list
    kv_lens = p.kv_lens.long().clamp(0, p.kv_indices.shape[1])
    count, groups = len(p.kv_indices), np.arange(p.lists)
    chosen = groups if p.list_index is None else p.list_index.numpy().astype(np.int64)
    absent = (chosen < 0) | (chosen >= count)
    if absent.any() and (absent := absent & kv_lens.numpy().reshape(-1, each).any(1)).any():
        group = absent.argmax()
        raise IndexError(
            f"list_index[{group}] is {chosen[group]}, kv_indices has {count} lists; pass another"
        )
    elements = chosen * p.kv_indices.stride(0)
    lists = torch.from_numpy(np.stack([elements, groups * each, np.full_like(groups, each)], axis=1))
    cpu.attend_lists(
        p.out, p.lse, p.q, p.q_rope, p.row_buffer, p.kv_indices, lists, kv_lens, p.fmt, p.scale, p.k_scale,
        p.page, batch_invariant=batch_invariant,
    )  # fmt: skip
