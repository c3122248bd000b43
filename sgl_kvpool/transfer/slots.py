"""Pages of a transfer: slot lists as SGLang gives them, their page indices, byte views of pages."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from sgl_kvpool.layout import RowFormat
from sgl_kvpool.memory.canonical import CanonicalGroup, CanonicalKVCaches
from sgl_kvpool.memory.runs import PageRuns


def pages_of(slots: torch.Tensor, page_size: int) -> np.ndarray:
    """Page indices of a slot list that passed `slot_list_problem`, `[pages]` int64."""
    return slots.numpy()[::page_size].astype(np.int64) // page_size


def contiguous(pages: np.ndarray) -> np.ndarray:
    """Page indices as a contiguous int64 array, as compiled code takes them."""
    return np.ascontiguousarray(pages, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class DevicePages:
    """Pages of a GPU pool as SGLang's list of their slots, `[tokens]` int64, page by page, on any device."""

    slots: torch.Tensor
    page_size: int

    def __len__(self) -> int:
        return len(self.slots) // self.page_size

    def take(self, places: np.ndarray) -> DevicePages:
        """Pages at some positions of the list, selected without reading their indices."""
        by_page = self.slots.view(-1, self.page_size)
        chosen = torch.from_numpy(places).to(self.slots.device, non_blocking=True)
        return DevicePages(by_page.index_select(0, chosen).view(-1), self.page_size)

    def page_indices(self) -> np.ndarray:
        """Page indices, `[pages]` int64. Waits for the GPU if the slots are there."""
        return pages_of(self.slots.cpu(), self.page_size)


#: Page indices, `[pages]` integers, or pages of a GPU pool whose indices need not be read.
Pages = np.ndarray | DevicePages


@dataclass(frozen=True, eq=False)
class Transfer:
    """A store (`to_host`) or a load: which pages go where. A load is carried out part by part, each once.

    `device_pages[i]` and `host_pages[i]` `[pages]` integers are the two ends of one copy.
    """

    host_pages: np.ndarray
    device_pages: Pages
    to_host: bool
    #: What a channel or an engine, which is the key, keeps from one part to the next.
    state: dict[Any, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.host_pages)

    def page_indices(self) -> tuple[np.ndarray, np.ndarray]:
        """Source and target as page indices. Waits for the GPU if slots are there."""
        host, device = self.host_pages, self.device_pages
        if isinstance(device, DevicePages):
            device = device.page_indices()
        return (device, host) if self.to_host else (host, device)


def slot_list_problem(slots: torch.Tensor, page_size: int, num_pages: int, first_page: int = 0) -> str | None:
    """Error of a slot list that does not consist of distinct whole pages, slots in order; None if it does.

    `slots` is `[tokens]` int64 or int32, on the CPU. The lowest valid page is 1 for a device pool, whose page
    0 takes the writes of padded tokens.
    """
    if slots.dim() != 1 or slots.dtype not in (torch.int64, torch.int32):
        return f"slots are {slots.dtype} {tuple(slots.shape)}, expected a list of int64"
    if len(slots) % page_size:
        return f"{len(slots)} slots are not a multiple of the page size {page_size}"
    if not len(slots):
        return None
    pages = pages_of(slots, page_size)
    rows = slots.numpy().reshape(-1, page_size)
    expected = pages[:, None] * page_size + np.arange(page_size)
    if not np.array_equal(rows, expected):
        wrong = int(np.flatnonzero((rows != expected).any(axis=1))[0])
        return f"the slots from {int(rows[wrong, 0])} on are not the {page_size} slots of one page in order"
    if int(pages.min()) < first_page or int(pages.max()) >= num_pages:
        return (
            f"pages {int(pages.min())} to {int(pages.max())} requested; the pool has {first_page} to "
            f"{num_pages - 1}"
        )
    if len(np.unique(pages)) != len(pages):
        return "a page is listed twice"
    return None


def packed_view(pages: torch.Tensor, group: CanonicalGroup, offset_bytes: int = 0) -> CanonicalKVCaches:
    """View of pages `[pages, page_bytes]` uint8 with the parts of a group one after the other."""
    references = []
    for layer in group.layers:
        runs = PageRuns(tensor_index=0, offset_bytes=offset_bytes, run_bytes=layer.runs.size_bytes)
        references.append(replace(layer, runs=runs))
        offset_bytes += layer.runs.size_bytes
    ours = replace(group, layers=tuple(references), num_pages=len(pages))
    return CanonicalKVCaches((pages.view(torch.int8),), (ours,))


def host_view(
    pages: torch.Tensor,
    group: CanonicalGroup,
    offset_bytes: int,
    rows: RowFormat,
    content: str | None = None,
) -> CanonicalKVCaches:
    """View of page-major host pages `[pages, bytes]` uint8 that corresponds to a group of device pages.

    Its layers lie one after the other, from `offset_bytes` of a host page; `content` is the meaning of the
    host's bytes, if it differs from the device's.
    """
    assert group.page_size_tokens is not None
    layer_bytes = group.page_size_tokens * rows.row_bytes
    references = tuple(
        replace(
            layer,
            runs=PageRuns(
                tensor_index=0, offset_bytes=offset_bytes + place * layer_bytes, run_bytes=layer_bytes
            ),
            content=layer.content if content is None else content,
        )
        for place, layer in enumerate(group.layers)
    )
    ours = replace(group, layers=references, num_pages=len(pages))
    return CanonicalKVCaches((pages.view(torch.int8),), (ours,))
