"""What the CUDA part of `sgl-kvpool warmup` launches, without a GPU; prints it as JSON.

A program of its own, because Triton must not be in interpreter mode:

    python launches.py '[{"layout": "fp4", "arrangement": "page_major", ...}, ...]'

The pool, the request table and the backend are real and on the CPU, but for the constructor of SGLang's
backend, which needs a GPU. Every launch of a Triton kernel is described as Triton would look it up for sm_90
(types, divisibility, constants) and not carried out; FlashInfer's wrappers check what they are called with
against FlashInfer's own signatures.
"""

import inspect
import json
import os
import sys

import torch

launched, called = [], []


def record_launches():
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    backend = make_backend(GPUTarget("cuda", 90, 32))

    def run(self, *args, grid, warmup, **kwargs):
        binder = create_function_from_signature(self.signature, self.params, backend)
        given, specialization, _ = binder(*args, **kwargs)
        described = {p.name: list(map(str, s)) for p, s in zip(self.params, specialization, strict=True)}
        launched.append({"kernel": self.fn.__name__, "arguments": described})
        if "kv_indices_ptr" in given:
            given["kv_indices_ptr"].zero_()  # lists of slots, which the CPU reads

    JITFunction.run = run


def launch_on_cpu():
    """Take the CUDA side of `mla_decode` and of the codec with tensors on the CPU."""
    from sgl_kvpool import codec
    from sgl_kvpool.attention import decode
    from sgl_kvpool.attention.decode_config import decode_config
    from sgl_kvpool.attention.decode_launch import launch
    from sgl_kvpool.codec import triton

    def decode_on_cpu(params, batch_invariant):
        fmt, (tokens, heads, _) = params.fmt, params.q.shape
        config = decode_config(fmt, heads, params.queries_per_list, params.lists, params.kv_indices.shape[1])
        partial = decode.partial_results(None, config, fmt, tokens, heads, params.row_buffer.device)
        launch(params, partial, config)

    decode._decode_on_cpu = decode_on_cpu
    codec._backend = lambda rows: triton
    torch.Tensor.pin_memory = lambda self: self


class Wrapper:
    """Replaces a wrapper of FlashInfer: checks calls against FlashInfer's signatures and records them."""

    def __init__(self, kind):
        self.kind = kind

    def __getattr__(self, name):
        signature = inspect.signature(getattr(self.kind, name))

        def method(*args, **kwargs):
            bound = signature.bind(self, *args, **kwargs)
            numbers = {k: v for k, v in bound.arguments.items() if isinstance(v, int | bool | str)}
            called.append({"method": f"{self.kind.__name__}.{name}", **numbers})
            return torch.zeros(1)

        return method


def construct_on_cpu():
    """Let the constructor of SGLang's backend, which ours extends, run on a CPU."""
    from flashinfer import BatchMLAPagedAttentionWrapper, BatchPrefillWithRaggedKVCacheWrapper
    from sglang.srt.layers.attention.flashinfer_mla_backend import FlashInferMLAAttnBackend

    def init(self, model_runner, skip_prefill=False, kv_indptr_buf=None, q_indptr_decode_buf=None):
        self.token_to_kv_pool, self.device = model_runner.token_to_kv_pool, model_runner.device
        self.skip_prefill, self.enable_chunk_kv = skip_prefill, not skip_prefill
        self.max_context_len = model_runner.model_config.context_len
        self.qo_indptr, self.kv_indptr = torch.zeros(2, 9, dtype=torch.int32)
        self.workspace_buffer, self.fmha_backend = None, "auto"
        self.prefill_wrapper_ragged = Wrapper(BatchPrefillWithRaggedKVCacheWrapper)
        self.prefill_wrapper_paged = Wrapper(BatchMLAPagedAttentionWrapper)

    FlashInferMLAAttnBackend.__init__ = init


def steps_of(options):
    """Launches and calls of each step for one server, by the step's name."""
    from sgl_kvpool import KVArrangement, MLAKVCacheLayout
    from sgl_kvpool.commands.warmup import attention, steps
    from sgl_kvpool.commands.warmup.served import Served

    layout = MLAKVCacheLayout(options.pop("layout"))
    options["arrangement"] = KVArrangement(options.pop("arrangement", "layer_major"))
    served = Served(name="a test", scaling=0.1, layouts=(layout,), **options)
    attention.publish(served, "cpu")
    found = {}
    for step in steps.steps_of_model(served, "cpu"):
        step.use()
        found[step.name.removeprefix(f"{layout}: ")] = {"launched": launched[:], "called": called[:]}
        launched.clear()
        called.clear()
    return found


def main():
    assert os.environ.get("TRITON_INTERPRET", "0") == "0"
    record_launches()
    launch_on_cpu()
    construct_on_cpu()
    print(json.dumps([steps_of(options) for options in json.loads(sys.argv[1])]))


if __name__ == "__main__":
    main()
