"""Compiled operators of other packages that are replaced, at their lowest level, with their argument checks.

Kernels access memory of the device in the order of the current stream. The last column is what the real
operator accesses in another order after it has returned. The replacement accesses the same, so that memory
which is used again too early is found. torch's allocator is told of no copy but torch's own.

| package | replaced | by | accessed late |
|---|---|---|---|
| sgl_kernel | `sgl_kernel::merge_state_v2` | `_merge_state_v2` | nothing |
| flash_mla | `flash_mla_legacy::get_mla_decoding_metadata` | `_decoding_metadata` | nothing |
| flash_mla | `flash_mla_legacy::sparse_decode_fwd` | `_sparse_decode` | nothing |
| flash_mla | `flash_mla_legacy::sparse_prefill_fwd` | `_sparse_prefill` | nothing |
| sgl_kernel | `sgl_kernel::weak_ref_tensor` | `graphs.unowned` | the tensor, by users of the result |
| deep_gemm | `deep_gemm::get_num_sms` | the described number | nothing |
| deep_gemm | `deep_gemm::get_paged_mqa_logits_metadata` | `_paged_mqa_schedule` | nothing |
| flashinfer | `flashinfer.norm._rmsnorm_impl` | `_rms_norm` | nothing |
| flashinfer | module of `BatchMLAPagedAttentionWrapper` | `CompiledMla` | pinned memory of each `plan` |
| flashinfer | module of `BatchPrefillWithRaggedKVCacheWrapper` | `CompiledRagged` | pinned memory of `plan` |
| sglang | `sglang::reg_*`, `sglang::inplace_all_reduce` of process groups | `_collective` | nothing |
| sglang | `PyNcclCommunicator.change_state`, by which captures enable one | nothing | nothing |
| sglang.kernels | modules of `load_jit` in `jit_kernels.EXPORTS` | the functions there | nothing |
| sglang.kernels | kernels of the canary | SGLang's own reference in torch | nothing |
| sglang | `SimplePhaseChecker.update` of the canary | `_check_phase` | nothing |
| NCCL | process groups of torch.distributed | gloo's, on the CPU | tensors, until `Work.wait` |

`models` has those of SGLang's model classes, in a table of its own.
"""

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from emulated_cuda import graphs, order
from emulated_cuda.memory import ALLOCATOR


def _merge_state_v2(v_a, s_a, v_b, s_b, v, s) -> None:
    assert all(tensor.is_contiguous() for tensor in (v_a, s_a, v_b, s_b, v, s))
    a, b = s_a.double(), s_b.double()
    highest = torch.maximum(a, b)
    weight_a, weight_b = (a - highest).exp(), (b - highest).exp()
    total = weight_a + weight_b
    share_a, share_b = (weight_a / total)[..., None], (weight_b / total)[..., None]
    v.copy_(v_a.double() * share_a + v_b.double() * share_b)
    s.copy_(total.log() + highest)


#: Rows of FlashMLA's V3.2 format: 512 e4m3 values, a float32 scale for 128 of them, 64 bf16 values.
_V32_BYTES, _V32_LATENT, _V32_TILE = 656, 512, 128


def _decoding_metadata(lengths, queries_per_head_k, heads_k, heads_q, is_fp8, topk) -> list[torch.Tensor]:
    assert (lengths.dtype, is_fp8, heads_k, topk % 64) == (torch.int32, True, 1, 0)
    return [torch.zeros(132, 8, dtype=torch.int32), torch.zeros(len(lengths) + 1, dtype=torch.int32)]


def _sparse_decode(
    q, kv, indices, topk_length, attn_sink, metadata, splits, extra_kv, extra_indices, extra_length, d_v,
    scale, kv_format=None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    assert (kv.shape[1:], kv.is_contiguous()) == ((64, 1, _V32_BYTES), True)
    assert kv.dtype in (torch.float8_e4m3fn, torch.int8, torch.uint8)
    assert kv_format in (None, "V32")
    assert splits.shape == (len(q) + 1,)
    assert all(x is None for x in (topk_length, attn_sink, extra_kv, extra_indices, extra_length))
    used, lists = torch.unique(indices, return_inverse=True)
    lists = torch.where(indices < 0, indices, lists).int()
    rows = kv.view(torch.uint8).view(-1, _V32_BYTES)[used.clamp(min=0).long()]
    end = _V32_LATENT + 4 * _V32_LATENT // _V32_TILE
    values = rows[:, :_V32_LATENT].contiguous().view(torch.float8_e4m3fn).float()
    scales = rows[:, _V32_LATENT:end].contiguous().view(torch.float32)
    latent = (values.view(len(rows), -1, _V32_TILE) * scales[..., None]).view(len(rows), -1)
    keys = torch.cat([latent.bfloat16(), rows[:, end:].contiguous().view(torch.bfloat16)], 1)
    out, _, lse = _attend_to_lists(q.flatten(0, 1), keys, lists.flatten(0, 1), scale, d_v, q.shape[1])
    out, lse = out.view(*q.shape[:3], d_v), lse.view(q.shape[:3])
    return out, lse.transpose(1, 2).contiguous(), metadata, splits


def _sparse_prefill(
    q, kv, indices, scale, d_v, attn_sink=None, topk_length=None, base_2=False, with_sums=True
) -> list[torch.Tensor]:
    assert (attn_sink, kv.dtype) == (None, torch.bfloat16)
    assert indices.shape[1] == kv.shape[1] == 1
    lists = indices[:, 0].clone()
    if topk_length is not None:
        lists[torch.arange(lists.shape[1]) >= topk_length[:, None]] = -1
    out, highest, lse = _attend_to_lists(q, kv[:, 0], lists, scale, d_v)
    unit = math.log(2) if base_2 else 1.0
    return [out, highest / unit, lse / unit] if with_sums else [out]


def _attend_to_lists(q, keys, lists, scale, d_v, together=16) -> tuple[torch.Tensor, ...]:
    """Attention of each query `[queries, heads, width]` to the keys of its list, in which -1 is nothing.

    `together` queries, whose lists have keys in common, are multiplied with all of their keys.
    """
    assert q.shape[1:] in ((64, 576), (128, 576))
    assert (q.dtype, lists.dtype, lists.shape[1] % 64) == (torch.bfloat16, torch.int32, 0)
    # Heads of zeros are padding; one is computed for all of them.
    own = (q != 0).flatten(2).any(2).any(0).nonzero()[:, 0].tolist()
    padding = [head for head in range(q.shape[1]) if head not in own]
    heads = own + padding[:1]
    out = torch.zeros(len(q), len(heads), d_v, dtype=torch.bfloat16)
    highest, lse = torch.full(out.shape[:2], -math.inf), torch.full(out.shape[:2], math.inf)
    for first in range(0, len(q), together):
        part = slice(first, first + together)
        used, number = torch.unique(lists[part], return_inverse=True)
        times = torch.zeros(len(number), len(used)).scatter_add_(1, number, torch.ones(number.shape))
        chosen, times = keys[used[used >= 0].long()].float(), times[:, used >= 0]
        found = times.any(1)
        if not found.any():
            continue
        scores = torch.einsum("qhd,kd->qhk", q[part][found][:, heads].float() * scale, chosen)
        top = scores.masked_fill(times[found, None] == 0, -math.inf).amax(-1)
        scores += times[found, None].log()
        out[part][found] = torch.einsum("qhk,kd->qhd", scores.softmax(-1), chosen[:, :d_v]).bfloat16()
        highest[part][found], lse[part][found] = top, scores.logsumexp(-1)
    place = [heads.index(head if head in own else padding[0]) for head in range(q.shape[1])]
    return out[:, place], highest[:, place], lse[:, place]


def _paged_mqa_schedule(context_lens, block_kv, sms, indices=None) -> torch.Tensor:
    """For each multiprocessor: the request, and its part of 256 keys, with which it begins."""
    assert (context_lens.dtype, context_lens.is_contiguous()) == (torch.int32, True)
    assert (block_kv, indices) == (64, None)
    lengths = context_lens.reshape(len(context_lens), -1)[:, -1]
    ends = ((lengths + 255) // 256).cumsum(0)
    parts = int(ends[-1]) if len(ends) else 0
    starts = torch.tensor([n * (parts // sms) + min(n, parts % sms) for n in range(sms + 1)])
    request = torch.searchsorted(ends, starts, right=True)
    before = torch.cat([ends.new_zeros(1), ends])[request]
    return torch.stack([request, starts - before], -1).int()


def _rms_norm(out, x, weight, eps, enable_pdl) -> None:
    assert {(tensor.device.type, tensor.stride(-1)) for tensor in (out, x, weight)} == {("cuda", 1)}
    assert (x.shape, weight.shape) == (out.shape, x.shape[-1:])
    values = x.float()
    scale = torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    out.copy_((values * scale * weight.float()).to(out.dtype))


def _collective(method: str) -> Callable[..., None]:
    """A collective of SGLang's GroupCoordinator, on the memory of the CPU."""

    def carry_out(*arguments: Any) -> None:
        from sglang.srt.distributed import parallel_state

        *tensors, group_name = arguments
        getattr(parallel_state._groups[group_name](), method)(*tensors)

    return carry_out


#: Operator of the dispatcher -> what is called with tensors of the CPU instead.
OPERATORS: dict[str, Callable[..., Any]] = {
    "sgl_kernel::merge_state_v2": _merge_state_v2,
    "flash_mla_legacy::get_mla_decoding_metadata": _decoding_metadata,
    "flash_mla_legacy::sparse_decode_fwd": _sparse_decode,
    "flash_mla_legacy::sparse_prefill_fwd": _sparse_prefill,
    "sgl_kernel::weak_ref_tensor": graphs.unowned,
    "sglang::inplace_all_reduce": _collective("_all_reduce_in_place"),
    "sglang::reg_all_gather_into_tensor": _collective("_all_gather_into_tensor"),
    "sglang::reg_all_to_all_single": _collective("_all_to_all_single"),
    "sglang::reg_reduce_scatter_tensor": _collective("_reduce_scatter_tensor"),
    "deep_gemm::get_num_sms": lambda: torch.cuda.get_device_properties(0).multi_processor_count,
    "deep_gemm::get_paged_mqa_logits_metadata": _paged_mqa_schedule,
}

#: Operator -> arguments that it writes although its schema does not mark them.
WRITES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("c10d::allreduce_", "c10d::broadcast_", "c10d::recv_"), ("tensors",)),
    **dict.fromkeys(("c10d::_allgather_base_", "c10d::_reduce_scatter_base_"), ("output_tensor",)),
    "c10d::allgather_": ("output_tensors",),
    "c10d::alltoall_base_": ("output",),
}
_nccl: list[order.Stream] = []  # no stream or one, since a second stream makes all accesses slower


@contextlib.contextmanager
def stream_of(func: Any, args: Any) -> Iterator[None]:
    """The stream of an operator: NCCL's own for operations that the caller waits for by `Work.wait`."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
    if not func._schema.name.startswith("c10d::") or not given.get("async_op", True):
        yield
        return
    _nccl[:] = _nccl or [order.Stream()]
    _nccl[0].wait_stream(order.current_stream())
    with _nccl[0]:
        yield
    for block in {ALLOCATOR.of(x) for x in tree_flatten(args)[0] if isinstance(x, torch.Tensor)} - {None}:
        block.recorded.add(_nccl[0])  # NCCL's Work keeps its tensors


def _plan(int_workspace: torch.Tensor, pinned: torch.Tensor, *parts: torch.Tensor) -> list[int]:
    """Write a plan to the pinned buffer, and copy it to the workspace from there; its length."""
    from emulated_cuda.runtime import RUNTIME

    numbers = torch.cat([part.int() for part in parts])
    pinned.view(torch.int32)[: len(numbers)].copy_(numbers)
    ends, stream = (int_workspace.data_ptr(), pinned.data_ptr()), order.current_stream()
    RUNTIME.cudaMemcpyAsync(*ends, 4 * len(numbers), 1, stream.cuda_stream)
    return [len(numbers)]


def _masked(scores: torch.Tensor) -> torch.Tensor:
    """Scores `[heads, queries, keys]` of the last positions, without later keys."""
    queries, count = scores.shape[1:]
    position = torch.arange(queries) + count - queries
    return scores.masked_fill(torch.arange(count) > position[:, None], float("-inf"))


class CompiledMla:
    """FlashInfer's module of MLA kernels: arguments are checked, attention is computed in torch."""

    def plan(
        self, float_workspace, int_workspace, pinned, qo_indptr, kv_indptr, kv_lens, heads, latent, causal
    ):
        assert {(x.device.type, x.dtype) for x in (qo_indptr, kv_indptr, kv_lens)} == {("cpu", torch.int32)}
        assert float_workspace.device.type == int_workspace.device.type == "cuda"
        plan = _plan(int_workspace, pinned, qo_indptr, kv_indptr[:-1], kv_lens)
        return [*plan, len(kv_lens), int(causal)]

    def run(
        self, float_workspace, int_workspace, plan, q_nope, q_pe, ckv, kpe, kv_indices, out, lse, mask, heads,
        page_size, scale, base_e, *more,
    ):  # fmt: skip
        from emulated_cuda import launches

        _, requests, causal = plan
        assert {x.device.type for x in (q_nope, q_pe, ckv, kpe, kv_indices, out)} == {"cuda"}
        assert {x.stride(-1) for x in (q_nope, q_pe, ckv, kpe)} == {1}
        assert (page_size, kv_indices.dtype) == (1, torch.int32)

        def attend(numbers, q_nope, q_pe, ckv, kpe, kv_indices, out):
            qo_indptr, kv_begin, kv_lens = numbers.split([requests + 1, requests, requests])
            for request in range(requests):
                first, last = int(qo_indptr[request]), int(qo_indptr[request + 1])
                begin = int(kv_begin[request])
                rows = kv_indices[begin : begin + int(kv_lens[request])].long()
                latent, rope = ckv[rows, 0].float(), kpe[rows, 0].float()
                scores = torch.einsum("qhd,kd->hqk", q_nope[first:last].float(), latent)
                scores = (scores + torch.einsum("qhd,kd->hqk", q_pe[first:last].float(), rope)) * scale
                scores = _masked(scores) if causal else scores
                out[first:last] = torch.einsum("hqk,kd->qhd", scores.softmax(-1), latent).to(out.dtype)

        arguments = [int_workspace.view(torch.int32)[: plan[0]], q_nope, q_pe, ckv, kpe, kv_indices, out]
        launches.launch("flashinfer MLA", attend, arguments, writes=[6])


class CompiledRagged:
    """FlashInfer's module of kernels for the MHA form, with a logarithm of base 2 as FlashInfer's."""

    def plan(self, float_workspace, int_workspace, pinned, qo_indptr, kv_indptr, *more):
        return _plan(int_workspace, pinned, qo_indptr, kv_indptr)

    def ragged_run(
        self, float_workspace, int_workspace, plan, q, k, v, qo_indptr, kv_indptr, out, lse, mask, *more
    ):
        from emulated_cuda import launches

        assert {tensor.device.type for tensor in (q, k, v, qo_indptr, kv_indptr, out)} == {"cuda"}
        scale, causal = more[10], mask == 1

        def attend(numbers, q, k, v, out, lse=None):
            qo_indptr, kv_indptr = numbers.chunk(2)
            for request in range(len(qo_indptr) - 1):
                own = slice(int(qo_indptr[request]), int(qo_indptr[request + 1]))
                keys = slice(int(kv_indptr[request]), int(kv_indptr[request + 1]))
                scores = torch.einsum("qhd,khd->hqk", q[own].float(), k[keys].float()) * scale
                scores = _masked(scores) if causal else scores
                weights = scores.softmax(-1) if scores.shape[2] else scores
                out[own] = torch.einsum("hqk,khd->qhd", weights, v[keys].float()).to(out.dtype)
                if lse is not None:
                    lse[own] = (scores.logsumexp(-1) / math.log(2)).T

        numbers = int_workspace.view(torch.int32)[: plan[0]]
        arguments = [numbers, q, k, v, out, *([] if lse is None else [lse])]
        launches.launch("flashinfer ragged prefill", attend, arguments, writes=[4, 5])


def install() -> None:
    """Replace what is not an operator of the dispatcher; packages that are not installed are left out."""
    try:
        from flashinfer.mla._batch_mla._backends import _fa_common, fa2_backend, fa3_backend
    except ImportError:
        return
    for module in (_fa_common, fa2_backend, fa3_backend):
        module.get_batch_mla_module = lambda *key: CompiledMla()
    import flashinfer.norm
    import flashinfer.prefill

    flashinfer.norm._rmsnorm_impl = _rms_norm

    flashinfer.prefill.get_batch_prefill_module = lambda backend, *key: CompiledRagged()


def disable_nccl() -> None:
    """Keep SGLang's NCCL communicator disabled: graph captures enable it, and this device has no NCCL."""
    from sglang.srt.distributed.device_communicators.pynccl import PyNcclCommunicator

    PyNcclCommunicator.change_state = lambda self, enable=None: contextlib.nullcontext()


def keep_no_host_memory() -> None:
    """Let host tiers take what SGLang keeps free, 10 GB, which the servers of other tests may have taken."""
    from sglang.srt.mem_cache.pool_host import base

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


def _check_phase(self: Any, *, expect_phase: int, next_phase: int, caller_name: str = "") -> None:
    assert not self._enable_assert_device or self._phase == expect_phase, (caller_name, self._phase)
    self._phase.fill_(int(next_phase))


def check_phases_in_torch() -> None:
    """Check the order of the canary's steps without a kernel, whose assertions the emulator does not know."""
    from sglang.srt.utils.phase_checker import SimplePhaseChecker

    SimplePhaseChecker.update = _check_phase


def use_torch_in_canary() -> None:
    """Let SGLang compute its canary's hashes as on a device without kernels for them."""
    from sglang.kernels.ops.kv_canary import _dispatch

    _dispatch.use_torch_reference = lambda device: True


def install_process_groups() -> None:
    """Make gloo groups where NCCL groups are asked for; both are then groups of the CPU for torch."""
    from torch import distributed
    from torch.distributed import distributed_c10d

    def with_gloo(function: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(function)

        def make(*args: Any, **options: Any) -> Any:
            given = parameters.bind(*args, **options)
            if given.arguments.get("backend") == "nccl":
                given.arguments["backend"] = "gloo"
            return function(*given.args, **given.kwargs)

        return make

    wait = distributed.Work.wait

    def wait_in_order(self: Any, *args: Any, **options: Any) -> Any:
        for stream in _nccl:  # for all operations, also those of other groups
            order.current_stream().wait_stream(stream)
        return wait(self, *args, **options)

    distributed.Work.wait = wait_in_order
    for name in ("init_process_group", "new_group"):
        function = with_gloo(getattr(distributed_c10d, name))
        for module in (distributed, distributed_c10d):
            setattr(module, name, function)
