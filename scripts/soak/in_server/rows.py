"""Rows of both tiers, read without the code of transfers, and comparisons of their values."""

from typing import Any

import torch

from sgl_kvpool.codec import decode_rows, encode_rows


def rows_of(pool: Any, host_pool: Any, layer: int, device_indices: torch.Tensor, host_pages: torch.Tensor):
    """Rows of a layer: on the device by slot, as attention reads them, and on the host by whole pages.

    `layer`: Layer index, from the pool's first layer.
    Returns: uint8 rows on the CPU, with the widths of the tiers.
    """
    rows = pool.kv_buffer[layer].view(torch.uint8)
    on_device = rows[pool.slot_to_row(device_indices.to(rows.device)), 0].cpu()
    on_host = host_pool.data_refs[layer][host_pages].view(torch.uint8)
    return on_device, on_host.reshape(len(device_indices), -1)


def outward_equal(pool: Any, host_pool: Any, layer: int, on_device: torch.Tensor, on_host: torch.Tensor):
    """Whether host rows equal the codec's conversion of the device rows, `[tokens]` bool."""
    device, host, scale = pool.row_format, host_pool.row_format, pool.k_scale(pool.start_layer + layer)
    if device != host:
        on_device = encode_rows(*_parts(decode_rows(on_device, device, k_scale=scale), host), host)
    return (on_device == on_host).all(dim=1)


def inward_equal(pool: Any, host_pool: Any, layer: int, on_device: torch.Tensor, on_host: torch.Tensor):
    """Whether device rows equal the codec's conversion of the host rows, `[tokens]` bool."""
    device, host, scale = pool.row_format, host_pool.row_format, pool.k_scale(pool.start_layer + layer)
    if device != host:
        on_host = encode_rows(*_parts(decode_rows(on_host, host), device), device, k_scale=scale)
    return (on_device == on_host).all(dim=1)


def relative_error(pool: Any, host_pool: Any, layer: int, on_device: torch.Tensor, on_host: torch.Tensor):
    """Norm of the difference of the rows' values divided by the norm on the device, `[tokens]` float32."""
    scale = pool.k_scale(pool.start_layer + layer)
    ours = decode_rows(on_device, pool.row_format, torch.float32, k_scale=scale)
    # The host has a layout with k_scale only if the device has it too.
    theirs = decode_rows(on_host, host_pool.row_format, torch.float32, k_scale=scale)
    return (ours - theirs).norm(dim=1) / ours.norm(dim=1).clamp(min=1e-6)


def _parts(values: torch.Tensor, fmt: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    rope = values[:, fmt.kv_lora_rank :]
    return values[:, : fmt.kv_lora_rank], rope if rope.shape[1] else None
