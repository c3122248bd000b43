"""Slot lists as SGLang gives them, and the indices of their pages. Needs torch and NumPy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["DevicePages", "page_indices", "pages_of", "slot_list_problem"]


def pages_of(slots: torch.Tensor, page_size: int) -> np.ndarray:
    """Page indices of a slot list that passed `slot_list_problem`, `[pages]` int64."""
    return slots.numpy()[::page_size].astype(np.int64) // page_size


@dataclass(frozen=True, eq=False)
class DevicePages:
    """Pages of a GPU pool as SGLang's list of their slots, which stays on its device.

    Attributes
    ----------
    slots : Tensor [tokens], int64
        Slots page by page, on the GPU or on the CPU.
    page_size : int
        Tokens of a page.
    """

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


def page_indices(pages: np.ndarray | DevicePages) -> np.ndarray:
    """Page indices of either kind of list, `[pages]` int64."""
    return pages.page_indices() if isinstance(pages, DevicePages) else pages


def slot_list_problem(slots: torch.Tensor, page_size: int, num_pages: int, first_page: int = 0) -> str | None:
    """Error of a slot list that does not consist of distinct whole pages; None if it does.

    Parameters
    ----------
    slots : Tensor [tokens], int64 or int32, on the CPU
        Slots page by page; the slots of a page in ascending order.
    page_size : int
        Tokens of a page.
    num_pages : int
        Pages of the pool.
    first_page : int
        Lowest valid page: 1 for a device pool, whose page 0 takes the writes of padded tokens.
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
