"""Lists of slots, as SGLang gives them, and the pages they are. Needs torch alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["DevicePages", "page_indices", "pages_of", "slot_list_problem"]


def pages_of(slots: torch.Tensor, page_size: int) -> np.ndarray:
    """Pages of a list that `slot_list_problem` has nothing to say about, `[pages]` int64."""
    return slots.numpy()[::page_size].astype(np.int64) // page_size


@dataclass(frozen=True, eq=False)
class DevicePages:
    """Pages of a GPU pool as SGLang lists their slots, which stay where they are.

    Attributes
    ----------
    slots : Tensor [tokens], int64
        Page by page, on the GPU or on the CPU.
    page_size : int
        Tokens.
    """

    slots: torch.Tensor
    page_size: int

    def __len__(self) -> int:
        return len(self.slots) // self.page_size

    def take(self, places: np.ndarray) -> DevicePages:
        """The pages at some places of the list; their indices are not looked at."""
        by_page = self.slots.view(-1, self.page_size)
        chosen = torch.from_numpy(places).to(self.slots.device, non_blocking=True)
        return DevicePages(by_page.index_select(0, chosen).view(-1), self.page_size)

    def page_indices(self) -> np.ndarray:
        """`[pages]` int64. Waits for the GPU if the list is there."""
        return pages_of(self.slots.cpu(), self.page_size)


def page_indices(pages: np.ndarray | DevicePages) -> np.ndarray:
    """`[pages]` int64 of either kind of list."""
    return pages.page_indices() if isinstance(pages, DevicePages) else pages


def slot_list_problem(slots: torch.Tensor, page_size: int, num_pages: int, first_page: int = 0) -> str | None:
    """Why a list of slots is no list of different whole pages; None if it is.

    Parameters
    ----------
    slots : Tensor [tokens], int64 or int32, on the CPU
        Page by page, the slots of a page in their order.
    page_size : int
        Tokens.
    num_pages : int
        Of the pool.
    first_page : int
        1 for a device pool, whose page 0 takes the writes of padded tokens and is nobody's.
    """
    if slots.dim() != 1 or slots.dtype not in (torch.int64, torch.int32):
        return f"slots are {slots.dtype} {tuple(slots.shape)}, expected a list of int64"
    if len(slots) % page_size:
        return f"{len(slots)} slots are no whole number of pages of {page_size}"
    if not len(slots):
        return None
    pages = pages_of(slots, page_size)
    rows = slots.numpy().reshape(-1, page_size)
    expected = pages[:, None] * page_size + np.arange(page_size)
    if not np.array_equal(rows, expected):
        wrong = int(np.flatnonzero((rows != expected).any(axis=1))[0])
        return f"the slots from {int(rows[wrong, 0])} on are not the {page_size} of one page in their order"
    if int(pages.min()) < first_page or int(pages.max()) >= num_pages:
        return (
            f"pages {int(pages.min())} to {int(pages.max())}, and there are {first_page} to {num_pages - 1}"
        )
    if len(np.unique(pages)) != len(pages):
        return "a page is listed twice"
    return None
