"""The indexer of sparse attention, with the kernels' checks: e4m3 keys and queries, scores, top-k lists.

A page of index keys has 128 bytes of e4m3 for each of its tokens, then a float32 scale for each.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from emulated_cuda import launches

_PAGE, _KEY, _ROPE, _SCALE_BYTES = 64, 128, 64, 4
_KEY_BYTES = _KEY + _SCALE_BYTES
#: Queries that are scored at a time.
_QUERIES = 64


def _rotated(x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Interleaved pairs of the first `_ROPE` of `_KEY` values, rotated."""
    cos, sin = cos_sin[positions.long()].chunk(2, -1)
    while cos.dim() < x.dim():
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    one, other = x[..., 0:_ROPE:2], x[..., 1:_ROPE:2]
    turned = torch.stack([one * cos - other * sin, one * sin + other * cos], -1).flatten(-2)
    return torch.cat([turned, x[..., _ROPE:]], -1)


def _to_e4m3(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 values, and a scale `[..., 1]` for the last dimension."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def _normed_key(x, weight, bias, cos_sin, positions, eps) -> torch.Tensor:
    assert (x.dtype, x.dim(), x.shape[-1], x.stride(-1)) == (torch.bfloat16, 2, _KEY, 1)
    assert weight.dtype == bias.dtype == cos_sin.dtype == torch.float32
    assert cos_sin.shape[1] == _ROPE
    values = torch.nn.functional.layer_norm(x.float(), (_KEY,), weight, bias, eps)
    return _rotated(values, cos_sin, positions).bfloat16()


def _key(x, out, weight, bias, cos_sin, positions, eps) -> None:
    out.copy_(_normed_key(x, weight, bias, cos_sin, positions, eps))


def _key_and_store(x, cache, slots, weight, bias, cos_sin, positions, eps) -> None:
    assert (cache.dtype, cache.is_contiguous(), slots.dtype) == (torch.uint8, True, torch.int64)
    assert cache.numel() % (_KEY_BYTES * _PAGE) == 0

    def run(x, cache, slots, weight, bias, cos_sin, positions):
        values, scale = _to_e4m3(_normed_key(x, weight, bias, cos_sin, positions, eps).float())
        pages = cache.view(-1, _KEY_BYTES * _PAGE)
        keys = pages[:, : _KEY * _PAGE].unflatten(1, (_PAGE, _KEY))
        scales = pages[:, _KEY * _PAGE :].unflatten(1, (_PAGE, _SCALE_BYTES))
        keys[slots // _PAGE, slots % _PAGE] = values.view(torch.uint8)
        scales[slots // _PAGE, slots % _PAGE] = scale.contiguous().view(torch.uint8)

    launches.launch("index keys", run, [x, cache, slots, weight, bias, cos_sin, positions], writes=[1])


def _query(q, out, weight, weights_out, factor, cos_sin, positions) -> None:
    assert (q.dim(), q.shape[-1], q.is_contiguous()) == (3, _KEY, True)
    assert (q.dtype, weight.dtype, weights_out.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    values, scale = _to_e4m3(_rotated(q.float(), cos_sin, positions).bfloat16().float())
    out.copy_(values)
    weights_out.copy_((weight.float() * factor)[..., None] * scale)


def _scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """float32 `[queries, keys]`: over the heads, the weighted sum of products that are positive."""
    products = torch.einsum("qhd,kd->qhk", q.float(), keys.float()).relu()
    return torch.einsum("qhk,qh->qk", products, weights.float())


def _mqa_logits(q, keys, scales, weights, starts, ends, clean=False, longest=0) -> torch.Tensor:
    assert q.dtype == keys.dtype == torch.float8_e4m3fn
    assert weights.dtype == scales.dtype == torch.float32
    assert starts.dtype == ends.dtype == torch.int32
    assert q.shape[1] in (32, 64)
    assert len(q) == len(weights) == len(starts) == len(ends)
    assert (keys.is_contiguous(), bool(clean), bool(longest)) == (True, False, False)
    width = -(-len(keys) // 256) * 256
    out = torch.full((len(q), width), math.nan)
    for first in range(0, len(q), _QUERIES):
        part = slice(first, first + _QUERIES)
        out[part, : len(keys)] = _scores(q[part], keys, weights[part]) * scales.view(1, -1)
    column = torch.arange(width)
    out[(column < starts[:, None]) | (column >= ends[:, None])] = math.nan
    return out[:, : len(keys)]


def _paged_mqa_logits(
    q, cache, weights, lengths, pages, schedule, longest, clean=False, indices=None
) -> torch.Tensor:  # fmt: skip
    assert (q.dtype, weights.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert lengths.dtype == pages.dtype == torch.int32
    assert (cache.shape[1:], indices, bool(clean)) == ((_PAGE, 1, _KEY_BYTES), None, False)
    batch, nexts = q.shape[:2]
    assert nexts in (1, 2)
    assert (weights.shape, len(pages)) == ((batch * nexts, q.shape[2]), batch)
    out = torch.full((batch * nexts, -(-longest // 256) * 256), math.nan)
    flat = cache.view(torch.uint8).reshape(len(cache), -1)
    for number in range(batch * nexts):
        request, place = divmod(number, nexts)
        own = lengths.reshape(batch, -1)[request]
        length = int(own[place]) if own.numel() == nexts else int(own[0]) - nexts + 1 + place
        if length <= 0:
            continue
        mine = flat[pages[request, : -(-length // _PAGE)].long()]
        keys = mine[:, : _PAGE * _KEY].contiguous().view(torch.float8_e4m3fn).view(-1, _KEY)[:length]
        scales = mine[:, _PAGE * _KEY :].contiguous().view(torch.float32).view(-1)[:length]
        out[number, :length] = (_scores(q[request, place][None], keys, weights[number][None]) * scales)[0]
    return out[:, :longest]


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Columns of the highest scores; all, in order, if there are no more."""
    return scores.topk(count).indices if len(scores) > count else torch.arange(len(scores))


def _topk_plan(lengths: torch.Tensor, plan: torch.Tensor, threshold: int) -> None:
    assert lengths.dtype == plan.dtype == torch.int32
    assert plan.shape == (len(lengths) + 1, 2)
    plan.zero_()


def _check_lists(scores: torch.Tensor, *lists: torch.Tensor) -> None:
    assert (scores.dtype, scores.stride(1), scores.stride(0) % 4) == (torch.float32, 1, 0)
    assert {tensor.dtype for tensor in lists} == {torch.int32}


def _topk_paged(scores, lengths, pages, out, page_size, plan, raw=None) -> None:
    """Lists of slots."""
    _check_lists(scores, lengths, out)
    assert (raw, len(plan)) == (None, len(scores) + 1)

    def run(scores, lengths, pages, out, plan):
        out.fill_(-1)
        for row, length in enumerate(lengths.tolist()):
            assert length >= 0
            own = _best(scores[row, :length], out.shape[1])
            out[row, : len(own)] = (pages[row][own // page_size] * page_size + own % page_size).int()

    launches.launch("topk paged", run, [scores, lengths, pages, out, plan], writes=[3])


def _topk_ragged(scores, lengths, starts, offsets, out) -> None:
    """Lists of rows of the gathered keys."""
    _check_lists(scores, lengths, offsets, out)

    def run(scores, lengths, offsets, out, starts=None):
        out.fill_(-1)
        for row, length in enumerate(lengths.tolist()):
            first = 0 if starts is None else int(starts[row])
            own = _best(scores[row, first : first + length], out.shape[1])
            out[row, : len(own)] = (own + offsets[row]).int()

    tensors = [scores, lengths, offsets, out, *([] if starts is None else [starts])]
    launches.launch("topk ragged", run, tensors, writes=[3])


def _topk_of_requests(scores, lengths, out, slots, queries, starts=None) -> None:
    """Lists of slots, by a table with a row per request, which has the queries between two of `queries`."""
    assert (scores.dtype, scores.stride(1)) == (torch.float32, 1)
    assert lengths.dtype == out.dtype == slots.dtype == queries.dtype == torch.int32
    assert (len(out), out.is_contiguous()) == (len(scores), True)  # sgl_kernel checks the width
    assert len(lengths) == len(scores) >= len(slots) == len(queries) - 1
    requests = torch.arange(len(scores))
    if starts is not None or len(slots) < len(scores):
        assert queries[-1] == len(scores)
        requests = torch.searchsorted(queries[1:], requests, right=True)
    out.fill_(-1)
    for row, length in enumerate(lengths.tolist()):
        first = 0 if starts is None else int(starts[row])
        own = _best(scores[row, first : first + length], out.shape[1])
        out[row, : len(own)] = slots[requests[row]][own]


#: Operator of the dispatcher -> what is called instead, with tensors of the CPU.
OPERATORS: dict[str, Callable[..., Any]] = {
    "sgl_kernel::fast_topk_transform_fused": _topk_of_requests,
    "deep_gemm::fp8_mqa_logits": _mqa_logits,
    "deep_gemm::fp8_paged_mqa_logits": _paged_mqa_logits,
}
#: Operator -> arguments that it writes although its schema does not mark them.
WRITES = {"sgl_kernel::fast_topk_transform_fused": ("dst_page_table",)}
#: Module of `load_jit` -> its functions, whose names say nothing.
MODULES: dict[str, dict[str, Callable[..., None]]] = {
    "dpsk_v32_k_indexer_norm_rope": {"forward": _key},
    "dpsk_v32_k_indexer_norm_rope_store_p64": {"forward": _key_and_store},
    "dpsk_v4_main_q_indexer_rope_first_quant": {"forward": _query},
    "main_q_indexer_rope_first_quant": {"forward": _query},
}
#: Function of a module of `load_jit` -> what is called instead, with tensors of the device.
EXPORTS: dict[str, Callable[..., None]] = {
    "topk_plan": _topk_plan,
    "topk_transform_paged": _topk_paged,
    "topk_transform_ragged": _topk_ragged,
}
