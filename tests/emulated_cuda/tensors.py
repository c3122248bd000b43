"""Tensors that say they are on cuda:0, each over a CPU tensor in a block of the allocator."""

from __future__ import annotations

from typing import Any

import torch

DEVICE = torch.device("cuda", 0)


class CudaTensor(torch.Tensor):
    """A tensor of the device; `on_cpu` has the same memory, shape and strides.

    For torch's C++ code it is a CPU tensor: only Python and the dispatcher see a CUDA tensor.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl
    on_cpu: torch.Tensor

    @staticmethod
    def __new__(cls, on_cpu: torch.Tensor) -> CudaTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, on_cpu.size(), strides=on_cpu.stride(), storage_offset=on_cpu.storage_offset(),
            dtype=on_cpu.dtype, device="cpu", requires_grad=False,
        )  # fmt: skip
        tensor.on_cpu = on_cpu
        return tensor

    @property
    def device(self) -> torch.device:
        return DEVICE

    @property
    def data(self) -> Any:
        return self.detach()

    @data.setter
    def data(self, other: Any) -> None:
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.on_cpu = other.on_cpu

    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def data_ptr(self) -> int:
        return self.on_cpu.data_ptr()

    def get_device(self) -> int:
        return 0

    def untyped_storage(self) -> Any:
        return self.on_cpu.untyped_storage()

    def __repr__(self) -> str:
        return f"CudaTensor({self.on_cpu!r})"

    def cpu(self, *args: Any, **options: Any) -> torch.Tensor:
        return self.to("cpu")

    def cuda(self, *args: Any, **options: Any) -> torch.Tensor:
        return self

    def to(self, *args: Any, **options: Any) -> torch.Tensor:
        from emulated_cuda import operators

        return operators.to(self, *args, **options)

    def new_tensor(self, data: Any, *, dtype: Any = None, device: Any = None, **options: Any) -> torch.Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or DEVICE)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *args: Any, **options: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def pin_memory(self, *args: Any) -> torch.Tensor:
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")

    def is_pinned(self, *args: Any) -> bool:
        return False

    def record_stream(self, stream: Any) -> None:
        from emulated_cuda.memory import ALLOCATOR

        block = ALLOCATOR.of(self.on_cpu)
        if block is not None:
            block.recorded.add(stream)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from emulated_cuda import operators

        return operators.run(func, args, kwargs or {})


def unwrap(value: Any) -> Any:
    return value.on_cpu if isinstance(value, CudaTensor) else value
