"""Kernels that SGLang compiles when they are first used: operators of the device, with the kernels' checks.

`load_jit` gives these instead of a compiled module if all functions of a module are in `EXPORTS`, or if the
module is in `MODULES`.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch


def _check(tensors: dict[str, torch.Tensor], *, dims: int) -> None:
    for name, tensor in tensors.items():
        if tensor.device.type != "cuda" or tensor.dim() != dims or tensor.stride(-1) != 1:
            raise RuntimeError(f"{name}: {tensor.device}, {tuple(tensor.shape)}, {tensor.stride()}")


def _clamp_position(positions: torch.Tensor, lengths: torch.Tensor) -> None:
    _check({"positions": positions, "lengths": lengths}, dims=1)
    if positions.shape != lengths.shape or positions.dtype != lengths.dtype:
        raise RuntimeError(f"{positions.shape} {positions.dtype}, {lengths.shape} {lengths.dtype}")
    positions.copy_((lengths - 1).clamp(min=0))


def _set_mla_kv_buffer(buffer, slots, nope, rope, warps, skipped) -> None:
    _check({"buffer": buffer, "nope": nope, "rope": rope}, dims=2)
    if slots.device.type != "cuda" or slots.dim() != 1:  # of any stride: draft steps pass every third slot
        raise RuntimeError(f"slots: {slots.device}, {tuple(slots.shape)}")
    if not (len(slots) == len(nope) == len(rope) and buffer.dtype == nope.dtype == rope.dtype):
        raise RuntimeError(f"{buffer.dtype}, {slots.shape}, {[(x.shape, x.dtype) for x in (nope, rope)]}")
    # A bulk store copies 16 bytes at a time.
    if any(x.data_ptr() % 16 or x.stride(0) * x.element_size() % 16 for x in (buffer, nope, rope)):
        raise RuntimeError("rows are not aligned to 16 bytes")
    rows = torch.cat([nope, rope], dim=1)
    stored = buffer[:, : rows.shape[1]]
    stored[slots.long()] = torch.where((slots == skipped)[:, None], stored[slots.long()], rows)


def _concat_mla_absorb_q(latent: torch.Tensor, rope: torch.Tensor, out: torch.Tensor) -> None:
    _check({"latent": latent, "rope": rope, "out": out}, dims=3)
    widths = latent.shape[-1], rope.shape[-1], out.shape[-1]
    if widths != (512, 64, 576) or not latent.shape[:-1] == rope.shape[:-1] == out.shape[:-1]:
        raise RuntimeError(f"{latent.shape}, {rope.shape}, {out.shape}")
    if any(tensor.dtype != torch.bfloat16 for tensor in (latent, rope, out)):
        raise RuntimeError(f"{latent.dtype}, {rope.dtype}, {out.dtype}")
    out[..., :512].copy_(latent)
    out[..., 512:].copy_(rope)


#: Function of a compiled module -> what is called instead, with tensors of the device.
EXPORTS: dict[str, Callable[..., None]] = {
    "clamp_position": _clamp_position,
    "concat_mla_absorb_q": _concat_mla_absorb_q,
    "set_mla_kv_buffer": _set_mla_kv_buffer,
}


#: Name of a module -> its functions, where their names are not unique.
MODULES: dict[str, dict[str, Callable[..., None]]] = {}


def install() -> None:
    """Replace SGLang's look-up of compiled modules and its loading of them."""
    from sglang.kernels.jit.utils.compile import loader

    find, load = loader._find_prebuilt, loader._load

    def find_replaced(*, spec: Any, scope: Any) -> Any:
        names = [name for name, _ in spec.cuda_wrappers]
        if spec.module_args[0] in MODULES:
            return SimpleNamespace(**MODULES[spec.module_args[0]])
        if names and EXPORTS.keys() >= set(names):
            return SimpleNamespace(**{name: EXPORTS[name] for name in names})
        if names:
            raise NotImplementedError(f"{spec.module_name} of load_jit, with {names}, is not replaced")
        return find(spec=spec, scope=scope)

    def load_replaced(library: Any) -> Any:
        return library if isinstance(library, SimpleNamespace) else load(library)

    loader._find_prebuilt, loader._load = find_replaced, load_replaced
