"""Memory order of the pages of all layers: named arrangements, and the row numbers of slots in them.

Axes: L layers, B pages, N tokens in a page, C bytes of a row. MLA has one head, so its rows have no head
axis. This module imports neither SGLang nor torch at run time.

==============  =========  =====================================  =============================
arrangement     axes       address of (layer, page, token)        a page of all layers
==============  =========  =====================================  =============================
`layer_major`   L B N C    ((l * B + b) * N + n) * C              L runs of N * C bytes
`token_major`   B N L C    ((b * N + n) * L + l) * C              one run of N * L * C bytes
`page_major`    B L N C    ((b * L + l) * N + n) * C              one run of L * N * C bytes
==============  =========  =====================================  =============================

`head_major` (B H L C) is for caches with H > 1 heads, whose pages `connectors.cross_layer` slices by head:
one head of all layers is one run, which is what a rank of a tensor-parallel peer requests.

SGLang names a token by its slot, s = b * N + n. The *row number* of a slot is `slot_to_row(slots)`, the same
in every layer's view, whose rows have one stride.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from sgl_kvpool.memory.runs import PageRuns
from sgl_kvpool.refusal import whole_number

if TYPE_CHECKING:
    import torch


@enum.unique
class KVArrangement(enum.StrEnum):
    """Order of the axes. The value is the name in arguments; all but `head_major` are on the command line.

    `axes`: Axes from the outermost to the innermost, of L, B, N, H, C.
    """

    axes: str

    LAYER_MAJOR = "layer_major", "LBNC"
    TOKEN_MAJOR = "token_major", "BNLC"
    PAGE_MAJOR = "page_major", "BLNC"
    HEAD_MAJOR = "head_major", "BHLC"

    def __new__(cls, value: str, axes: str = "") -> KVArrangement:  # mypy: look-ups have one argument
        arrangement = str.__new__(cls, value)
        arrangement._value_, arrangement.axes = value, axes
        return arrangement

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise ValueError(f"unknown KV cache arrangement {value!r}; choose one of: {', '.join(cls)}")

    @classmethod
    def of_rows(cls) -> tuple[KVArrangement, ...]:
        """Arrangements for rows without a head axis."""
        return tuple(member for member in cls if "H" not in member.axes)

    @property
    def is_slot_linear(self) -> bool:
        """Whether a row's address is its slot times a stride, so that `slot_to_row` is the identity."""
        return "BN" in self.axes

    @property
    def has_contiguous_layers(self) -> bool:
        """Whether a layer's rows are contiguous, as SGLang allocates them."""
        return self.axes[0] == "L"


_INT32_MAX = 2**31 - 1


def local_slots(slots, dcp_size: int):
    """Slots in the pool of the rank that stores them, by SGLang's numbers; negative ones stay negative.

    With decode context parallelism, rank r of n stores slot s * n + r as its slot s.
    """
    return slots // dcp_size


def global_slots(local, dcp_rank, dcp_size: int):
    """SGLang's numbers of slots of a rank's pool."""
    return local * dcp_size + dcp_rank


class PageStride(NamedTuple):
    """Slot s is row ``p // page_size_tokens * rows_per_page + p % page_size_tokens``, p its `local_slots`.

    `page_size_tokens` counts the tokens of one of `dcp_size` ranks.
    """

    page_size_tokens: int
    rows_per_page: int
    dcp_size: int = 1


def rows_of_slots(slots: torch.Tensor, page: PageStride | None) -> torch.Tensor:
    """Row numbers of slots, int32 or int64, without checks; None if slots are row numbers already.

    Negative values mean "no slot" and are returned unchanged.
    """
    if page is None:
        return slots
    page_size_tokens, rows_per_page, dcp_size = page
    rows = local_slots(slots, dcp_size)
    pages = rows.div(page_size_tokens, rounding_mode="floor")
    return (rows + pages * (rows_per_page - page_size_tokens)).where(slots >= 0, slots)


@dataclass(frozen=True)
class RowPlacement:
    """Addresses of the rows of `layers` layers with the same row size in one buffer.

    `layers`, `pages`, `page_size_tokens`, `row_bytes`: L, B, N and C, each at least 1.

    ValueError if a size is not a positive integer, or the arrangement needs a head axis.
    """

    arrangement: KVArrangement
    layers: int
    pages: int
    page_size_tokens: int
    row_bytes: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "arrangement", KVArrangement(self.arrangement))
        if self.arrangement not in KVArrangement.of_rows():
            raise ValueError(f"{self.arrangement} splits pages by head, and rows have one; use page_major")
        for name in ("layers", "pages", "page_size_tokens", "row_bytes"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))

    # Cached: pools read these at every write.

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Size of each axis; the size of C is in bytes."""
        return {"L": self.layers, "B": self.pages, "N": self.page_size_tokens, "C": self.row_bytes}

    @cached_property
    def strides_bytes(self) -> dict[str, int]:
        """Distance in bytes between neighbours along each axis."""
        strides, step = {}, 1
        for axis in reversed(self.arrangement.axes):
            strides[axis] = step
            step *= self.sizes[axis]
        return strides

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of all layers."""
        return self.layers * self.page_size_tokens * self.row_bytes

    @property
    def total_bytes(self) -> int:
        return self.pages * self.page_bytes

    @cached_property
    def row_stride_bytes(self) -> int:
        """Bytes between consecutive row numbers of a layer's view."""
        # With one token per page, consecutive rows are consecutive pages.
        return self.strides_bytes["N" if self.page_size_tokens > 1 else "B"]

    @cached_property
    def rows(self) -> int:
        """Number of rows of a layer's view: the largest row number plus one."""
        return self.row_of_slot(self.pages * self.page_size_tokens - 1) + 1

    def row_of_slot(self, slot: int) -> int:
        """Row number of one slot, on the host."""
        page, token = divmod(slot, self.page_size_tokens)
        return page * self._rows_per_page + token

    def slot_to_row(self, slots: torch.Tensor) -> torch.Tensor:
        """Row numbers of slots (int32 or int64, any shape), for every layer's view.

        Negative values mean "no slot" and are returned unchanged. Slots beyond the pool become `rows`, which
        is out of range too. Returns `slots` itself if slots are row numbers already; int64 if a row number
        does not fit into int32, else the same dtype. TypeError for another dtype.
        """
        kind = slots.dtype
        if kind.itemsize < 4 or not kind.is_signed or kind.is_floating_point or kind.is_complex:
            raise TypeError(f"slots are {kind}, expected int32 or int64")
        if self.slots_are_rows:
            return slots
        if self.rows > _INT32_MAX:
            slots = slots.long()
        # A slot far beyond the pool could wrap around in int32, before a reader checks bounds.
        rows = rows_of_slots(slots, self.page_stride)
        return rows.where(slots < self.pages * self.page_size_tokens, self.rows)

    @cached_property
    def slots_are_rows(self) -> bool:
        """Whether `slot_to_row` is the identity; true for every arrangement if a page is one token."""
        return self._rows_per_page == self.page_size_tokens

    @cached_property
    def _rows_per_page(self) -> int:
        """Row numbers from one page to the next; exceeds the page size if other layers lie between."""
        return self.strides_bytes["B"] // self.row_stride_bytes

    @property
    def page_stride(self) -> PageStride | None:
        """For readers that compute `slot_to_row` themselves; None if slots are row numbers already."""
        return None if self.slots_are_rows else PageStride(self.page_size_tokens, self._rows_per_page)

    def layer_view(self, buffer: torch.Tensor, layer: int) -> torch.Tensor:
        """A layer's rows, `[rows, row_bytes]` uint8, in the contiguous buffer `[total_bytes]` uint8.

        The view has a row stride of `row_stride_bytes`. In a page-major buffer most row numbers belong to
        other layers: only those from `slot_to_row` are this layer's.
        """
        if not 0 <= layer < self.layers:
            raise IndexError(f"layer {layer} of {self.layers}")
        if buffer.shape != (self.total_bytes,) or buffer.element_size() != 1 or not buffer.is_contiguous():
            raise ValueError(
                f"the buffer is {buffer.dtype} {tuple(buffer.shape)}, stride {buffer.stride()}; expected "
                f"({self.total_bytes},) contiguous bytes"
            )
        return buffer.as_strided(
            (self.rows, self.row_bytes),
            (self.row_stride_bytes, 1),
            buffer.storage_offset() + layer * self.strides_bytes["L"],
        )

    def page_runs(self, layer: int, tensor_index: int) -> PageRuns:
        """Where a layer, counted from 0, lies in a page of all layers; ValueError if layers are contiguous.

        `tensor_index` is that of the buffer, `[pages, page_bytes]`, in `CanonicalKVCaches.tensors`.
        """
        if self.arrangement.has_contiguous_layers:
            raise ValueError(f"{self.arrangement} keeps layers apart and has no page of all layers")
        run_bytes = self.strides_bytes["L"]  # a row if token-major, a layer's page if page-major
        return PageRuns(
            tensor_index=tensor_index,
            offset_bytes=layer * run_bytes,
            run_bytes=run_bytes,
            run_count=self.page_bytes // (self.layers * run_bytes),
            run_stride_bytes=self.layers * run_bytes,
        ).simplified()

    def by_axes(self, buffer: torch.Tensor) -> torch.Tensor:
        """A contiguous buffer of `total_bytes` bytes with one dimension per axis of the arrangement."""
        return buffer.view([self.sizes[axis] for axis in self.arrangement.axes])

    def move(self, buffer: torch.Tensor, target_slots: torch.Tensor, source_slots: torch.Tensor) -> None:
        """Copy the rows of some slots to other slots in all layers at once.

        Sources are read before targets are written, so the lists may share slots.
        """
        rows = self.by_axes(buffer)
        rows[self._tokens(target_slots)] = rows[self._tokens(source_slots)]

    def _tokens(self, slots: torch.Tensor) -> tuple:
        """Index of `by_axes` that selects slots in all layers."""
        slots = slots.reshape(-1).long()
        page = slots.div(self.page_size_tokens, rounding_mode="floor")
        token = slots.remainder(self.page_size_tokens)
        return (page, token) if self.arrangement.is_slot_linear else (page, slice(None), token)
