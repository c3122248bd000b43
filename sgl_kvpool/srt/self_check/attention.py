"""A small decode over rows of a real pool, compared with attention in float64 over the codec's values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from sgl_kvpool.attention.decode_config import rounds_values
from sgl_kvpool.memory.arrangement import global_slots
from sgl_kvpool.srt.self_check.pages import Difference, decoded, encoded, slots_of_rank

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention

#: Relative and absolute error by type of device: those of tests/srt/attention/test_backend.py, and of
#: tests/gpu/test_cuda_backend_gpu.py. Queries, weights and results are bf16.
TOLERANCES = {"cpu": (1e-2, 4e-3), "cuda": (2e-2, 1e-2)}

#: Sequence lengths of the requests, if the pool has enough rows.
_LENGTHS = (1, 24, 37)
#: Maximum distance of the slots from an end of the pool.
_NEAR = 4096


@dataclass(frozen=True)
class _Requests:
    """Requests with random keys at random slots."""

    lengths: list[int]  # of sequences
    slots: torch.Tensor  # [tokens] int64, one request after the other, on the pool's device
    keys: torch.Tensor  # [tokens, R + P] bf16
    q: torch.Tensor  # [requests, heads, R + P] bf16

    @classmethod
    def at_random(cls, pool: Any, heads: int, most_requests: int, most_rows: int) -> _Requests:
        rows, generator = pool.row_pool, torch.Generator().manual_seed(28)
        near = min(_NEAR, rows.size // 2)
        room = 2 * near
        lengths = [
            min(length, room // 3, most_rows) for length in _LENGTHS[-min(most_requests, len(_LENGTHS)) :]
        ]
        some = torch.randperm(room, generator=generator)[: sum(lengths)]
        # Slots at both ends of the pool, without the first page, which SGLang reserves.
        slots = rows.page_size + torch.where(some < near, some, some - room + rows.size)
        width = pool.row_format.head_dim
        return cls(
            lengths,
            slots.to(rows.device),
            torch.randn(sum(lengths), width, generator=generator).bfloat16().to(rows.device),
            torch.randn(len(lengths), heads, width, generator=generator).bfloat16().to(rows.device),
        )

    def lists(self, pool: Any) -> torch.Tensor:
        """`[requests, rows * ranks]` int32: slots of each request, padded with -1.

        With several ranks (`--dcp-size`), a list has slots of each in turn, which are wrong rows on others.
        """
        ranks = pool.dcp_size
        lists = self.slots.new_full((len(self.lengths), max(self.lengths) * ranks), -1, dtype=torch.int32)
        turns = torch.arange(ranks, device=lists.device)
        for own, slots in zip(lists, self.slots.split(self.lengths), strict=True):
            every = torch.where(turns == pool.dcp_rank, slots[:, None], slots[:1])
            own[: len(slots) * ranks] = global_slots(every, turns, ranks).flatten()
        return lists

    def attended(self, pool: Any, layer_id: int, scale: float) -> torch.Tensor:
        """`[requests, heads, R]` float64 on the CPU: expected output of attention over the rows."""
        fmt, k_scale = pool.row_format, pool.k_scale(layer_id)
        rows = encoded(self.keys.cpu(), fmt, k_scale)
        values = decoded(rows, fmt, k_scale, torch.float32).double()
        if self.slots.is_cuda and rounds_values(fmt, self.q.shape[1]):
            values = values.bfloat16().double()
        out = []
        for q, own in zip(self.q.cpu().double(), values.split(self.lengths), strict=True):
            weights = torch.softmax(scale * q @ own.T, dim=-1)
            out.append(weights @ own[:, : fmt.kv_lora_rank])
        return torch.stack(out)


@contextmanager
def _restored(*parts: tuple[torch.Tensor, Any]) -> Iterator[None]:
    """Restore parts of tensors at the end; a part is a tensor and an index."""
    before = [tensor[index].clone() for tensor, index in parts]
    try:
        yield
    finally:
        for (tensor, index), former in zip(parts, before, strict=True):
            tensor[index] = former


def check_backend(backend: Any, layer: RadixAttention) -> str:
    """Decode one token of a few requests as SGLang's model does: plan the batch, store the keys, attend.

    Returns what was checked. Rows of the pool and of the request table are restored afterwards. No batch may
    run meanwhile; the next batch makes a new plan.
    """
    pool, table = backend.token_to_kv_pool, backend.req_to_token_pool.req_to_token
    rank = pool.row_format.kv_lora_rank
    # Row 0 of the table is for padding; backends have room for `size` requests.
    most = min(backend.req_to_token_pool.size, len(table) - 1)
    ranks = pool.dcp_size
    requests = _Requests.at_random(pool, layer.tp_q_head_num, most, table.shape[1] // ranks)
    count, device = len(requests.lengths), requests.slots.device
    own = torch.arange(count, 0, -1, device=device)
    rows, lists = pool.get_row_buffer(layer.layer_id).squeeze(1), requests.lists(pool)
    listed = (own, slice(0, lists.shape[1]))
    with torch.no_grad(), _restored((rows, pool.slot_to_row(requests.slots)), (table, listed)):
        table[listed] = lists.to(table.dtype)
        ends = torch.tensor(requests.lengths, device=device).cumsum(0) - 1
        earlier = torch.ones(len(requests.slots), dtype=torch.bool, device=device)
        earlier[ends] = False
        _store(pool, layer, requests.slots[earlier], requests.keys[earlier])
        lengths, new = [length * ranks for length in requests.lengths], requests.slots[ends]
        batch = batch_of("DECODE", lengths, own, slots_of_rank(pool, new))
        backend.init_forward_metadata(batch)
        keys = requests.keys[ends].unsqueeze(1)
        q = requests.q.reshape(count, -1)
        out = backend.forward_decode(q, keys, keys[..., :rank], layer, batch)
        out = out if ranks == 1 else out[0]
        found = out.view(count, -1, rank).cpu()
    return _compare(found, requests, pool, layer.layer_id, layer.scaling)


def batch_of(mode: str, lengths: list[int], requests: torch.Tensor, slots: torch.Tensor) -> ForwardBatch:
    """A batch as SGLang's backends get it, in the ForwardMode with this name.

    `lengths` are the requests' sequence lengths, `requests` their rows in SGLang's request table, and `slots`
    those of the new tokens; both int64.
    """
    seq_lens = torch.tensor(lengths)
    return ForwardBatch(
        forward_mode=ForwardMode[mode],
        batch_size=len(lengths),
        input_ids=torch.zeros_like(slots),
        req_pool_indices=requests,
        seq_lens=seq_lens.to(slots.device),
        out_cache_loc=slots,
        seq_lens_sum=sum(lengths),
        seq_lens_cpu=seq_lens,
    )


def check_lists(
    pool: Any, layer_id: int, heads: int, scale: float, attend: Callable[..., tuple[torch.Tensor, ...]]
) -> str:
    """Attend lists of slots with a kernel, without an attention backend.

    `attend` is as `SparseReader.attend`, with SGLang's slots, also of other ranks; unused entries are -1.
    """
    requests = _Requests.at_random(pool, heads, len(_LENGTHS), max(_LENGTHS))
    rows = pool.get_row_buffer(layer_id)
    with torch.no_grad(), _restored((rows, pool.slot_to_row(requests.slots))):
        _store(pool, SimpleNamespace(layer_id=layer_id), requests.slots, requests.keys)
        kv_lens = torch.tensor(requests.lengths, dtype=torch.int32, device=rows.device) * pool.dcp_size
        found = attend(requests.q, rows, requests.lists(pool), kv_lens, scale)[0].cpu()
    return _compare(found, requests, pool, layer_id, scale)


def _store(pool: Any, layer: Any, slots: torch.Tensor, keys: torch.Tensor) -> None:
    keys, rank = keys.unsqueeze(1), pool.row_format.kv_lora_rank
    rope = keys[..., rank:] if pool.row_format.qk_rope_head_dim else None
    pool.set_mla_kv_buffer(layer, KVWriteLoc(slots_of_rank(pool, slots)), keys[..., :rank], rope)


def _compare(found: torch.Tensor, requests: _Requests, pool: Any, layer_id: int, scale: float) -> str:
    expected = requests.attended(pool, layer_id, scale)
    relative, absolute = TOLERANCES[requests.slots.device.type]
    error = (found.double() - expected).abs()
    excess = error - relative * expected.abs()
    # The comparison is false for NaN, so a NaN is a difference.
    if not bool((excess <= absolute).all()):
        largest = excess.nan_to_num(nan=torch.inf).argmax()
        request, head, value = place = tuple(map(int, torch.unravel_index(largest, excess.shape)))
        raise Difference(
            f"attention over rows of {pool.row_format.layout}, layer {layer_id}: value {value} of head "
            f"{head} for {requests.lengths[request]} tokens is {float(found[place]):.4g}, expected "
            f"{float(expected[place]):.4g} within {absolute:g} and {relative:.0%}"
        )
    return f"attention of {len(requests.lengths)} requests with a largest error of {float(error.max()):.1e}"
