"""Byte view of a model's KV caches for transfers: tensors of byte pages, and where each layer lies in a page.

`CanonicalKVCaches.tensors` are int8 `[pages, page_bytes]` views of the live pool, each part of memory once.
`CanonicalKVCaches.groups` say which of those bytes belong to which layer: for page p of a group, reference r
means the bytes ::

    tensors[r.tensor_index][p, r.offset_bytes + i * r.run_stride_bytes:][:r.run_bytes]   for i < r.run_count

A group is a set of layers that share their page indices: all layers of a plain model, full or window layers
of a sliding-window model. Recurrent states are groups too, indexed by state slot instead of page. Groups may
share bytes if each page belongs to only one of them at a time; inside a group references never overlap. What
a page holds beyond its references (padding, holes) is never read, written or counted.

Torch is its only dependency; `sgl_kvpool.connectors.pools.describe` makes a view of a pool of SGLang.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch

from sgl_kvpool.memory.runs import PageRuns, merged
from sgl_kvpool.refusal import whole_number


@dataclass(frozen=True, kw_only=True)
class LayerReference:
    """One part of one layer in a page of its group.

    `layer_id`: SGLang's model layer id, or a name; None for state that is not part of a layer.
    `part`: Kind of the bytes: "kv", "k", "v", "scale", "indexer", "conv_0", "ssm", ...
    `content`: Meaning of the bytes: dtype, shape and order, in a text that is equal for two references only
      if their bytes are interchangeable.
    """

    layer_id: int | str | None
    part: str
    runs: PageRuns
    content: str


@dataclass(frozen=True, kw_only=True)
class CanonicalGroup:
    """Layers that share their page indices (or state slots).

    `name`: "kv", "full", "window", "state", or a name given to an allocator.
    `layers`: Parts of the layers, those of one kind in model order; empty for a pipeline stage without such
      layers.
    `num_pages`: Pages, or state slots, including SGLang's reserved one.
    `page_size_tokens`: Tokens of a page; None for states.
    ValueError: if `num_pages` is negative, or `page_size_tokens` is not positive.
    """

    name: str
    layers: tuple[LayerReference, ...]
    num_pages: int
    page_size_tokens: int | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_pages", whole_number("num_pages", self.num_pages, 0))
        if self.page_size_tokens is not None:
            tokens = whole_number("page_size_tokens", self.page_size_tokens)
            object.__setattr__(self, "page_size_tokens", tokens)

    @property
    def bytes_per_page(self) -> int:
        """Bytes that a transfer of one page of all layers moves, without padding and holes."""
        return sum(layer.runs.size_bytes for layer in self.layers)

    @cached_property
    def references(self) -> tuple[PageRuns, ...]:
        """The bytes of all layers as the fewest references: adjacent runs are merged."""
        return merged(layer.runs for layer in self.layers)

    def layer(self, layer_id: int | str | None, part: str | None = None) -> LayerReference:
        """The reference of a layer; `part` selects one of several. KeyError unless exactly one matches."""
        found = [r for r in self.layers if r.layer_id == layer_id and part in (None, r.part)]
        if len(found) != 1:
            parts = [r.part for r in self.layers if r.layer_id == layer_id]
            raise KeyError(f"group {self.name} has parts {parts} of layer {layer_id!r}, requested {part!r}")
        return found[0]


@dataclass(frozen=True)
class CanonicalKVCaches:
    """Caches of a model as byte pages; see the module's docstring.

    `tensors` [pages, page_bytes], int8: Views of the live pool. `page_bytes` includes padding.
    ValueError: if `validate` finds an error.
    """

    tensors: tuple[torch.Tensor, ...]
    groups: tuple[CanonicalGroup, ...]

    def __post_init__(self) -> None:
        self.validate()

    def group(self, name: str) -> CanonicalGroup:
        """Group of this name; KeyError that lists the names otherwise."""
        for group in self.groups:
            if group.name == name:
                return group
        raise KeyError(f"no group {name!r}; there are: {', '.join(g.name for g in self.groups)}")

    def only(self, part: str) -> CanonicalKVCaches:
        """The same groups reduced to one part of each layer, for a transfer of that part alone."""
        groups = (
            replace(group, layers=tuple(layer for layer in group.layers if layer.part == part))
            for group in self.groups
        )
        return CanonicalKVCaches(self.tensors, tuple(groups))

    def view(self, group: CanonicalGroup, runs: PageRuns) -> torch.Tensor:
        """Bytes of some runs in all pages of a group: `[num_pages, run_count, run_bytes]` int8, no copy."""
        tensor = self.tensors[runs.tensor_index]
        return tensor.as_strided(
            (group.num_pages, runs.run_count, runs.run_bytes),
            (tensor.stride(0), runs.run_stride_bytes, 1),
            tensor.storage_offset() + runs.offset_bytes,
        )

    def validate(self) -> None:
        """Check that every reference lies in its tensor and that references of a group do not overlap.

        The ValueError names the tensor or the group.
        """
        for index, tensor in enumerate(self.tensors):
            if tensor.dtype != torch.int8 or tensor.dim() != 2 or tensor.stride(1) != 1:
                raise ValueError(
                    f"tensor {index} is {tensor.dtype} {tuple(tensor.shape)}, stride {tensor.stride()}; "
                    "expected int8 [pages, page_bytes] with the bytes of a page in a row"
                )
            if len(tensor) > 1 and tensor.stride(0) < tensor.shape[1]:
                raise ValueError(f"tensor {index}: pages {tensor.stride(0)} bytes apart overlap")
        spans = sorted((*_span(tensor), i) for i, tensor in enumerate(self.tensors) if tensor.numel())
        for (storage, _, end, one), (other, begin, _, two) in pairwise(spans):
            if storage == other and begin < end:
                raise ValueError(f"tensors {one} and {two} share memory; list it once")
        for group in self.groups:
            self._validate_group(group)
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names):
            raise ValueError(f"two groups have the same name: {names}")

    def _validate_group(self, group: CanonicalGroup) -> None:
        where = f"group {group.name}"
        parts = [(layer.layer_id, layer.part) for layer in group.layers]
        if len(set(parts)) != len(parts):
            raise ValueError(f"{where} has a part of a layer twice: {parts}")
        taken: dict[int, list[tuple[torch.Tensor, int]]] = {}
        for layer in group.layers:
            runs = layer.runs
            if runs.tensor_index >= len(self.tensors):
                raise ValueError(
                    f"{where}: {layer} refers to tensor {runs.tensor_index}, of {len(self.tensors)}"
                )
            tensor = self.tensors[runs.tensor_index]
            if runs.end_bytes > tensor.shape[1] or group.num_pages > len(tensor):
                raise ValueError(
                    f"{where}: {layer} in {group.num_pages} pages ends at byte {runs.end_bytes}, outside of "
                    f"tensor {runs.tensor_index}, {len(tensor)} pages of {tensor.shape[1]} bytes"
                )
            starts = runs.offset_bytes + torch.arange(runs.run_count) * runs.run_stride_bytes
            taken.setdefault(runs.tensor_index, []).append((starts, runs.run_bytes))
        for index, spans in taken.items():
            starts = torch.cat([starts for starts, _ in spans])
            ends = torch.cat([starts + size for starts, size in spans])
            order = starts.argsort()
            overlap = (ends[order][:-1] > starts[order][1:]).nonzero()
            if len(overlap):
                byte = int(starts[order][1:][overlap[0]])
                raise ValueError(f"{where}: byte {byte} of a page of tensor {index} has two owners")


def _storage(tensor: torch.Tensor) -> tuple[str, int]:
    storage = tensor.untyped_storage()
    # Meta tensors have no address, only a storage object.
    return str(tensor.device), storage.data_ptr() if tensor.device.type != "meta" else storage._cdata


def _span(tensor: torch.Tensor) -> tuple[tuple[str, int], int, int]:
    """Storage, first byte and end of an int8 `[pages, page_bytes]` tensor."""
    begin = tensor.storage_offset()
    return _storage(tensor), begin, begin + (len(tensor) - 1) * tensor.stride(0) + tensor.shape[1]


def _place(tensor: torch.Tensor) -> tuple:
    """Key that is equal for two views of the same bytes."""
    return (*_storage(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


class TensorList:
    """Builder of `CanonicalKVCaches.tensors`: the same bytes get the same index."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._index: dict[tuple, int] = {}

    def add(self, tensor: torch.Tensor) -> int:
        """Index of an int8 `[pages, page_bytes]` view, which is added if it is new."""
        index = self._index.setdefault(_place(tensor), len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(tensor)
        return index


def byte_pages(tensor: torch.Tensor, units_per_page: int, name: str) -> torch.Tensor:
    """A cache tensor `[units, ...]` as byte pages `[units / units_per_page, page_bytes]` int8, a view.

    Units are token slots, pages as kernels see them, or state slots. ValueError, with the tensor's name, if
    the elements are not contiguous, or the units are not a whole number of pages.
    """
    units = tensor.shape[0]
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and stride {tensor.stride()}: its bytes are not "
            "contiguous, and the place of other layers between them is unknown; pass a contiguous tensor"
        )
    if units % units_per_page:
        raise ValueError(
            f"{name} has {units} units along its first axis, not a multiple of "
            f"{units_per_page} per page; choose a pool size that is a multiple of the page size"
        )
    page_bytes = tensor.nbytes // units * units_per_page if units else 0
    return tensor.view(-1).view(torch.int8).view(units // units_per_page, page_bytes)


def check_interchangeable(ours: CanonicalGroup, theirs: CanonicalGroup) -> None:
    """Raise ValueError if the pages of two groups do not have the same content."""

    def contents(group: CanonicalGroup) -> list[tuple]:
        return [(layer.layer_id, layer.part, layer.content, layer.runs.size_bytes) for layer in group.layers]

    mine, other = contents(ours), contents(theirs)
    if mine != other or ours.page_size_tokens != theirs.page_size_tokens:
        differing = next((pair for pair in zip(mine, other, strict=False) if pair[0] != pair[1]), None)
        raise ValueError(
            f"the layers of group {ours.name} differ, or the meaning of their bytes: {len(mine)} and "
            f"{len(other)} parts, pages of {ours.page_size_tokens} and {theirs.page_size_tokens} tokens, "
            f"first {differing}"
        )
