"""Compiled operators of SGLang's model classes that are replaced, and SGLang's Python that looks for CUDA's.

What one writes is marked by its schema, in `libraries.WRITES` or passed to `launches.launch`; each call is
checked. The real ones are kernels on the current stream, and access no memory of the caller in another order.

| package | replaced | by | writes | accessed late |
|---|---|---|---|---|
| torch | `aten::mm` with `out_dtype`, `aten::bmm` | `model_operators` | a new tensor | nothing |
| sgl_kernel | `sgl_kernel::moe_align_block_size` | `model_operators` | ids, experts, count | nothing |
| sgl_kernel | `sgl_kernel::moe_sum_reduce`, unmarked | `model_operators` | `output` | nothing |
| sglang.kernels | `sglang::jit_dsv3_fused_a_gemm` | `model_operators` | a new tensor | nothing |
| sglang.kernels | `sglang::tiny_gemm_bf16` | `model_operators` | `out` | nothing |
| sglang.kernels | `sglang::fused_topk_deepseek` | `model_operators` | weights, experts | nothing |
| sglang.kernels | `sglang::apply_rope_inplace` | `model_operators` | `q`, `k` | nothing |
| `load_jit` | `fused_add_rmsnorm` | `model_operators` | `x`, `residual` | nothing |
| `load_jit` | `rmsnorm`, `run_activation`, `hadamard_transform` | `model_operators` | `out` | nothing |
| `load_jit` | `fused_eh_norm` | `draft_operators` | `out` | nothing |
| `load_jit` | `build_tree_kernel_efficient` | `draft_operators` | mask, positions, links | nothing |
| `load_jit` | `verify_tree_greedy` | `draft_operators` | accepted tokens | nothing |
| `load_jit` | modules in `indexer_operators.MODULES` | `indexer_operators` | keys, queries | nothing |
| `load_jit` | `topk_plan`, `topk_transform_*` | `indexer_operators` | the plan, the lists | nothing |
| sgl_kernel | `sgl_kernel::fast_topk_*_fused`, unmarked | `indexer_operators` | `dst_page_table` | nothing |
| deep_gemm | `deep_gemm::fp8_*mqa_logits` | `indexer_operators` | new scores, NaN outside | nothing |
| flashinfer | `fused_add_rmsnorm_cute` | `model_operators` | `x`, `residual` | nothing |
| flashinfer | `layernorm_cute` | `model_operators` | `out` | nothing |
| sglang.kernels | `invoke_fused_moe_kernel` | `model_operators` | `C` | nothing |
| sglang | `CustomOpWrapper.real_impl` | their functions | as theirs | nothing |
| sglang.kernels | `get_max_active_clusters` | a number | | nothing |
| sglang | `_is_stream_capturing`, which asks cuda-python | `graphs.capturing` | | nothing |

Not replaced: FlashAttention 3, FlashMLA's dense decode, sgl_kernel's other transfers and top-k lists. Of
`load_jit`, `fused_metadata_copy*`, instead of which SGLang copies tensor by tensor, and
`kda_packed_decode_8`, which SGLang takes from 8 requests on.

Faults of SGLang 0.5.23 that the device finds with these classes (`test_prefill_graphs` expects two):

* Routed experts overwrite what shared experts read on another stream, an order fault in every decode graph:
  `_end_race_of_experts`.
* norm/__init__.py:173 makes a tensor on the other stream, which is dropped without `record_stream`, in eager
  runs before a capture alone; kimi_linear.py:187 does too. So is allocator/mamba.py's first list of slots.
* Kernels read `req_to_token` beyond a request's tokens, and use nothing of it: `launches._READ_AHEAD`.
"""

import functools
import sys
from typing import Any

from emulated_cuda import draft_operators, graphs, imports, indexer_operators, jit_kernels, model_operators
from emulated_cuda.libraries import OPERATORS, WRITES

#: Functions of modules of which others are replaced; no model here calls them.
_NOT_CALLED = (
    *(f"hadamard_transform_{n}n" for n in (12, 20, 28, 40)),
    "launch_all_lf_pf_staged",
    *("topk_transform_kpool", "topk_transform_kpool_ragged", "reconstruct_indices_from_tree_mask"),
    *("run_activation_with_rounding", "run_activation_with_rounding_input_inplace"),
    *("run_activation_filtered", "run_activation_sorted_filtered", "run_unary_activation"),
)
_EXPERTS = "sglang.kernels.ops.moe.fused_moe_triton_kernels"
_BREAKABLE = "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph"


def install() -> None:
    """Replace these operators, each as soon as its package is imported."""
    OPERATORS.update(model_operators.OPERATORS | indexer_operators.OPERATORS)
    WRITES.update(model_operators.WRITES | indexer_operators.WRITES)
    jit_kernels.MODULES.update(indexer_operators.MODULES)
    jit_kernels.EXPORTS.update({name: _missing(name) for name in _NOT_CALLED})
    for module in (model_operators, draft_operators, indexer_operators):
        jit_kernels.EXPORTS.update(module.EXPORTS)
    imports.after("flashinfer.norm", _replace_norms)
    imports.after("sglang.kernels.jit.utils.occupancy", _replace_occupancy)
    imports.after("sglang.srt.utils.custom_op", _call_python_operators)
    imports.after(_BREAKABLE, _replace_capture_status)
    imports.after(_EXPERTS, _replace_experts)
    imports.after("sglang.srt.layers.moe.fused_moe_triton.layer", _end_race_of_experts)


def _missing(name: str) -> Any:
    def call(*args: Any) -> None:
        raise NotImplementedError(f"{name} of load_jit is not replaced (emulated_cuda/models.py)")

    return call


def _replace_norms() -> None:
    norm = sys.modules["flashinfer.norm"]  # which its package does not have as an attribute yet
    norm.fused_add_rmsnorm_cute = model_operators.fused_add_rmsnorm_cute
    norm.layernorm_cute = model_operators.layernorm


def _replace_experts() -> None:
    kernels = sys.modules[_EXPERTS]
    kernels.invoke_fused_moe_kernel = model_operators.fused_moe(kernels.invoke_fused_moe_kernel)


def _replace_occupancy() -> None:
    from sglang.kernels.jit.utils import occupancy

    occupancy.get_max_active_clusters = lambda size, *more, **options: 132 // size


def _replace_capture_status() -> None:
    def is_capturing(stream: Any) -> bool:
        capture = graphs.capturing()
        return capture is not None and stream in capture.streams

    sys.modules[_BREAKABLE]._is_stream_capturing = is_capturing


def _call_python_operators() -> None:
    """Call SGLang's operators that are Python functions; the dispatcher would look for them on the CPU.

    Those that are replaced stay with the dispatcher.
    """
    from sglang.srt.utils import custom_op

    real = custom_op.CustomOpWrapper.real_impl.fget

    def real_impl(self: Any) -> Any:
        if self._impl is None:
            operator, name = real(self), f"sglang::{self.op_name}"
            python = functools.wraps(self.op_func)(lambda *args, **options: self.op_func(*args, **options))
            self._impl = operator if name in OPERATORS else python
        return self._impl

    custom_op.CustomOpWrapper.real_impl = property(real_impl)


def _end_race_of_experts() -> None:
    """Give routed experts an output of their own, without which every decode graph is an order fault.

    `DeepseekV2MoE.forward_normal_dual_stream` lets them overwrite, in place, what the shared experts read on
    another stream. It affects models whose shared experts are not fused with the routed ones.
    """
    from sglang.srt.layers.moe.fused_moe_triton import layer

    init = layer.FusedMoE.__init__

    @functools.wraps(init)
    def not_in_place(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **{"inplace": False, **options})

    layer.FusedMoE.__init__ = not_in_place
