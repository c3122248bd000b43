"""Norms, matrix products, experts and rotary embeddings of SGLang's model classes, with the kernels' checks.

Those of `OPERATORS` get tensors of the CPU from the dispatcher, the others tensors of the device.
"""

import functools
import inspect
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from emulated_cuda import launches


def _product(name: str) -> Callable[..., torch.Tensor]:
    """`torch.mm` or `torch.bmm`, whose `out_dtype` CUDA alone has.

    bfloat16 is summed in float32, as on a GPU, which on CPUs without instructions for it is faster, too.
    """
    multiply = getattr(torch.ops.aten, name).default

    def call(a: torch.Tensor, b: torch.Tensor, out_dtype: Any = None, *, out: Any = None) -> torch.Tensor:
        wide = torch.float32 if a.dtype == torch.bfloat16 else out_dtype or a.dtype
        found = multiply(a.to(wide), b.to(wide)).to(out_dtype or a.dtype)
        return found if out is None else out.copy_(found)

    return call


def _fused_a_gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    assert a.dtype == b.dtype == torch.bfloat16
    assert 1 <= len(a) <= 16
    assert a.shape[1] % 256 == b.shape[1] % 16 == 0
    assert (a.is_contiguous(), b.stride(0)) == (True, 1)
    return a @ b


def _tiny_gemm(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, most: int, n_split: int) -> None:
    assert len(x) <= most
    assert (x.dtype, x.stride(-1), w.is_contiguous()) == (torch.bfloat16, 1, True)
    out.copy_(x.float() @ w.float().T)


def _topk_deepseek(scores, bias, groups, kept_groups, topk, scale, values, indices, pdl) -> None:
    """Experts by biased scores, out of the groups whose best two are highest, and their unbiased weights."""
    assert scores.dtype == bias.dtype == values.dtype == torch.float32
    assert indices.dtype == torch.int32
    assert all(tensor.is_contiguous() for tensor in (scores, values, indices))
    count, experts = scores.shape
    assert experts % groups == 0
    assert topk <= min(8, kept_groups * groups)
    probabilities = scores.sigmoid()
    biased = (probabilities + bias).view(count, groups, -1)
    if groups > 1:
        best = biased.topk(2, -1).values.sum(-1).topk(kept_groups, -1).indices
        kept = torch.zeros(count, groups, dtype=torch.bool).scatter_(1, best, True)
        biased = biased.masked_fill(~kept[..., None], -math.inf)
    chosen = biased.view(count, -1).topk(topk, -1).indices
    weights = probabilities.gather(1, chosen)
    indices.copy_(chosen)
    values.copy_(weights / (weights.sum(-1, keepdim=True) + 1e-20) * scale)


def _moe_align(ids, buckets, block, sorted_ids, expert_ids, count, cumsum, pad=True, ignore=False) -> None:
    """Entries of a top-k list by expert, each expert's padded to whole blocks; bucket 0 has no expert."""
    assert (ids.dtype, ids.is_contiguous(), bool(pad), bool(ignore)) == (torch.int32, True, True, False)
    flat = ids.reshape(-1)
    sorted_ids.fill_(flat.numel())
    at = 0
    for bucket in range(buckets):
        own = (flat == bucket - 1).nonzero()[:, 0]
        blocks = -(-len(own) // block)
        sorted_ids[at : at + len(own)] = own.int()
        expert_ids[at // block : at // block + blocks] = bucket - 1
        at += blocks * block
    count[0] = at


def _moe_sum_reduce(x: torch.Tensor, output: torch.Tensor, scale: float = 0) -> None:
    assert (x.dim(), output.shape) == (3, (x.shape[0], x.shape[-1]))
    output.copy_(x.float().sum(1) * scale)


def fused_moe(kernel: Callable[..., None]) -> Callable[..., None]:
    """`invoke_fused_moe_kernel`, whose emulation would take half of a server's time, without quantisation."""
    plain = inspect.signature(kernel)

    @functools.wraps(kernel)
    def call(*args: Any, **options: Any) -> None:
        given = plain.bind(*args, **options)
        given.apply_defaults()
        of = SimpleNamespace(**given.arguments)
        names = (
            *("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "a_use_tma", "b_use_tma"),
            *("c_sorted", "fuse_sum_all_reduce", "fuse_add_to_output", "mask_output", "fuse_swiglu"),
        )
        if any(given.arguments[name] for name in names) or of.bias is not None:
            raise NotImplementedError(f"fused_moe_kernel with one of {', '.join(names)}, or a bias")
        assert of.A.dtype == of.B.dtype == of.C.dtype == torch.bfloat16
        assert (of.A.shape[1], of.C.shape[-1]) == (of.B.shape[2], of.B.shape[1])
        assert of.C.is_contiguous()
        block, entries = of.config["BLOCK_SIZE_M"], of.topk_ids.numel()

        def run(a, b, c, weights, order, experts, count) -> None:
            """Of each block of entries, the products with its expert's weights; those of expert -1 are 0."""
            out, blocks = c.view(-1, c.shape[-1]), order[: count.item()].view(-1, block)
            experts = experts[: len(blocks)]
            for expert in experts.unique().tolist():
                own = blocks[experts == expert].flatten().long()
                own = own[own < entries]
                if expert == -1:
                    out[own] = 0
                    continue
                # In float64, so that a row does not depend on the others, as it does not on a GPU.
                product = a[own // of.top_k].double() @ b[expert].double().T
                if of.mul_routed_weight:
                    product *= weights.reshape(-1)[own, None]
                out[own] = product.bfloat16()

        values = (of.A, of.B, of.C, of.topk_weights, of.sorted_token_ids, of.expert_ids)
        launches.launch("fused_moe_kernel", run, (*values, of.num_tokens_post_padded), writes={2})

    return call


def _apply_rope(q, k, cos_sin, positions, is_neox, dim=0) -> None:
    assert cos_sin.dtype == torch.float32
    assert dim in (0, cos_sin.shape[-1])
    cos, sin = cos_sin[positions.long(), None].chunk(2, -1)
    for x in (q, k):
        assert (x.dim(), x.stride(-1), x.shape[-1]) == (3, 1, cos_sin.shape[-1])
        half = x.shape[-1] // 2
        halves = (slice(half), slice(half, None)) if is_neox else (slice(0, None, 2), slice(1, None, 2))
        one, other = (x[..., part].float() for part in halves)
        x[..., halves[0]], x[..., halves[1]] = one * cos - other * sin, other * cos + one * sin


#: Operator of the dispatcher -> what is called instead, with tensors of the CPU.
OPERATORS: dict[str, Callable[..., Any]] = {
    "aten::bmm": _product("bmm"),
    "aten::mm": _product("mm"),
    "sgl_kernel::moe_align_block_size": _moe_align,
    "sgl_kernel::moe_sum_reduce": _moe_sum_reduce,
    "sglang::apply_rope_inplace": _apply_rope,
    "sglang::fused_topk_deepseek": _topk_deepseek,
    "sglang::jit_dsv3_fused_a_gemm": _fused_a_gemm,
    "sglang::tiny_gemm_bf16": _tiny_gemm,
}
#: Arguments that an operator writes although its schema does not mark them.
WRITES = {"sgl_kernel::moe_sum_reduce": ("output",)}


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm in float32."""
    values = x.float()
    return values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def _rmsnorm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float) -> None:
    assert (x.dim(), x.shape, weight.shape) == (2, out.shape, x.shape[-1:])
    assert x.stride(-1) == weight.stride(-1) == out.stride(-1) == 1
    out.copy_(normed(x, weight, eps))


def _fused_add_rmsnorm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    assert (x.shape, weight.shape) == (residual.shape, x.shape[-1:])
    assert x.stride(-1) == residual.stride(-1) == weight.stride(-1) == 1
    total = x.float() + residual.float()
    residual.copy_(total)
    x.copy_(normed(total, weight, eps))


def fused_add_rmsnorm_cute(x, residual, weight, eps, weight_bias=0.0, enable_pdl=False) -> None:
    assert weight_bias == 0
    _fused_add_rmsnorm(x, residual, weight, eps)


def layernorm(out, x, gamma, beta, eps) -> None:
    assert (x.dim(), x.shape) == (2, out.shape)
    assert gamma.dtype == beta.dtype == torch.float32
    out.copy_(torch.nn.functional.layer_norm(x.float(), x.shape[-1:], gamma, beta, eps))


def _run_activation(x: torch.Tensor, out: torch.Tensor, name: str) -> None:
    assert (name, x.shape[-1]) == ("silu", 2 * out.shape[-1])
    gate, up = x.float().chunk(2, -1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def _hadamard(x: torch.Tensor, out: torch.Tensor, scale: float) -> None:
    values, width = x.float(), 1
    while width < x.shape[-1]:
        first, second = values.unflatten(-1, (-1, 2, width)).unbind(-2)
        values = torch.stack([first + second, first - second], -2).flatten(-3)
        width *= 2
    out.copy_(values * scale)


#: Function of a module of `load_jit` -> what is called instead, with tensors of the device.
EXPORTS: dict[str, Callable[..., None]] = {
    "fused_add_rmsnorm": _fused_add_rmsnorm,
    "hadamard_transform": _hadamard,
    "rmsnorm": _rmsnorm,
    "run_activation": _run_activation,
}
