"""Comparison of rows of both tiers: of every transfer, byte by byte after its end, on a CPU only.

On a GPU transfers are enqueued, and a comparison at once would change what runs concurrently: there only the
census compares the pages in both tiers while the server is idle.
"""

import hashlib
from typing import Any

import torch

from sgl_kvpool.codec import decode_rows, encode_rows
from sgl_kvpool.srt.host.rows import HierarchicalMLAHostPool

_counts: dict[str, Any] = {"backed_up_pages": 0, "loaded_pages": 0, "wrong_pages": 0, "problems": []}
#: Digest of a host page's rows after its backup, or after a store has filled it; by page.
_digests: dict[int, bytes] = {}


def rows_of(pool: Any, host_pool: Any, layer: int, device_indices: torch.Tensor, host_pages: torch.Tensor):
    """Rows of a layer, read without the code of transfers: by slot, as attention does, and by host pages.

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


def report() -> dict[str, Any] | None:
    """Number of compared pages, and the first problems; None if no page was compared."""
    return dict(_counts) if _counts["backed_up_pages"] or _counts["loaded_pages"] else None


def _wrong(what: str, pages: torch.Tensor) -> None:
    _counts["wrong_pages"] += len(pages)
    if len(_counts["problems"]) < 10:
        _counts["problems"].append(f"{what}: host pages {pages[:8].tolist()}")


def _digest(host_pool: Any, page: int) -> bytes:
    # Rows only: a store may write a checksum behind them.
    raw = host_pool.kv_buffer[page].view(torch.uint8)[: host_pool.page_bytes]
    return hashlib.blake2b(raw.numpy(), digest_size=16).digest()


def _pages(host_pool: Any, host_indices: torch.Tensor) -> torch.Tensor:
    return host_indices.view(-1, host_pool.page_size)[:, 0] // host_pool.page_size


def _compare(
    host_pool: Any, pool: Any, host_indices: Any, device_indices: Any, layers: Any, equal: Any
) -> torch.Tensor:
    """Host pages that differ from the device's in any layer."""
    pages = _pages(host_pool, host_indices)
    good = torch.ones(len(pages), dtype=torch.bool)
    for layer in layers:
        same = equal(pool, host_pool, layer, *rows_of(pool, host_pool, layer, device_indices, pages))
        good &= same.view(len(pages), -1).all(dim=1)
    return pages[~good]


def watch() -> None:
    tier = HierarchicalMLAHostPool
    back_up, load = tier.backup_from_device_all_layer, tier.load_to_device_per_layer
    fill = tier.set_from_flat_data_page

    def watched_backup(self: Any, device_pool: Any, host_indices: Any, device_indices: Any, io_backend: str):
        back_up(self, device_pool, host_indices, device_indices, io_backend)
        if device_indices.device.type != "cpu":
            return
        pages = _pages(self, host_indices)
        _counts["backed_up_pages"] += len(pages)
        layers = range(device_pool.layer_num)
        bad = _compare(self, device_pool, host_indices, device_indices, layers, outward_equal)
        if len(bad):
            _wrong("backed up wrongly", bad)
        _digests.update((page, _digest(self, page)) for page in pages.tolist())

    def watched_load(
        self: Any, device_pool: Any, host_indices: Any, device_indices: Any, layer_id: int, *args, **kwargs
    ):
        load(self, device_pool, host_indices, device_indices, layer_id, *args, **kwargs)
        if device_indices.device.type != "cpu":
            return
        bad = _compare(self, device_pool, host_indices, device_indices, [layer_id], inward_equal)
        if len(bad):
            _wrong(f"layer {layer_id} loaded wrongly", bad)
        if layer_id + 1 < device_pool.layer_num:
            return
        pages = _pages(self, host_indices)
        _counts["loaded_pages"] += len(pages)
        changed = [page for page in pages.tolist() if _digests.get(page) != _digest(self, page)]
        if changed:
            _wrong("changed on the host after they were stored", torch.tensor(changed))

    def watched_fill(self: Any, index: int, data_page: Any):
        fill(self, index, data_page)
        page = int(index) // self.page_size
        _digests[page] = _digest(self, page)

    tier.backup_from_device_all_layer, tier.load_to_device_per_layer = watched_backup, watched_load
    tier.set_from_flat_data_page = watched_fill
