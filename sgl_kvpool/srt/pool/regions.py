"""Byte views of pools for the host tier: our rows, and the states of SGLang's `MambaPool`.

Of a pool with rows, the described bytes have to be all bytes that it reports as stored.
:mod:`sgl_kvpool.connectors.pools` describes SGLang's other pools.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MambaPool

from sgl_kvpool.memory.canonical import (
    CanonicalGroup,
    CanonicalKVCaches,
    LayerReference,
    TensorList,
    byte_pages,
)
from sgl_kvpool.memory.runs import PageRuns
from sgl_kvpool.refusal import whole_number
from sgl_kvpool.srt.pool.dsa import LayoutDSATokenToKVPool
from sgl_kvpool.srt.pool.mla import LayoutMLATokenToKVPool

#: Model layer ids by the layer ids of a wrapped pool; None if they are the same.
LayerIds = Mapping[int, int] | None


def canonical_view(pool: Any, page_size_tokens: int | None = None) -> CanonicalKVCaches:
    """Byte view of a pool of ours that holds rows, or of a `MambaPool`; as `connectors.pools.describe`."""
    return PoolReader(page_size_tokens).caches(pool)


class PoolReader:
    """The tensors and groups described so far; `page_size_tokens` is the pool's page size by default."""

    def __init__(self, page_size_tokens: int | None) -> None:
        if page_size_tokens is not None:
            page_size_tokens = whole_number("page_size_tokens", page_size_tokens)
        self.page_size_tokens = page_size_tokens
        self.tensors = TensorList()
        self.groups: list[CanonicalGroup] = []

    def caches(self, pool: Any) -> CanonicalKVCaches:
        self.add(pool)
        return CanonicalKVCaches(tuple(self.tensors.tensors), tuple(self.groups))

    def add(self, pool: Any, name: str = "kv", layer_ids: LayerIds = None) -> None:
        """Describe a pool, or every pool that a wrapper contains; TypeError for an unknown kind."""
        self.reader_of(pool)(pool, name, layer_ids)

    def reader_of(self, pool: Any) -> Callable[[Any, str, LayerIds], None]:
        """The method that describes a kind of pool."""
        if isinstance(pool, LayoutMLATokenToKVPool):
            return self._layout_mla
        if type(pool) is MambaPool:
            return self._mamba
        raise TypeError(f"the bytes of {type(pool).__name__} are unknown")

    def _layout_mla(self, pool: LayoutMLATokenToKVPool, name: str, layer_ids: LayerIds) -> None:
        page = self._page_tokens(pool)
        contents = [f"{pool.row_format.tag} k_scale {pool.k_scale(own)}" for own in pool.model_layer_ids]
        ids = mapped(pool.model_layer_ids, layer_ids)  # in the order of the buffers
        if pool.placement is None or pool.cross_layer is None:
            references = [
                self._reference(rows, layer_id, "kv", content, page)
                for rows, layer_id, content in zip(pool.kv_buffer, ids, contents, strict=True)
            ]
        else:
            folded = page // pool.page_size
            index = self.tensors.add(byte_pages(pool.cross_layer, folded, type(pool).__name__))
            references = [
                LayerReference(
                    layer_id=layer_id,
                    part="kv",
                    runs=pool.placement.page_runs(place, index).folded(folded, pool.placement.page_bytes),
                    content=content,
                )
                for place, (layer_id, content) in enumerate(zip(ids, contents, strict=True))
            ]
        if isinstance(pool, LayoutDSATokenToKVPool):
            references += self._index_references(pool, layer_ids, page)
        self._group(pool, name, references, page)

    def _index_references(
        self, pool: DSATokenToKVPool, layer_ids: LayerIds, page: int
    ) -> list[LayerReference]:
        references = []
        ids = mapped(pool.model_layer_ids, layer_ids)
        content = (
            f"index keys of {pool.index_kpool} x {pool.index_head_dim} in pages of {pool.index_page_size}"
        )
        for layer_id, rows, skipped in zip(
            ids, pool.index_k_with_scale_buffer, pool.skip_topk_layers, strict=True
        ):
            # A layer that reuses the top-k of the layer before it has a placeholder instead of index keys.
            if skipped:
                continue
            # A row of index keys covers as many slots of SGLang as a page of the pool has rows. Each rank has
            # the keys of all slots that are spread over the ranks.
            spread = pool._write_loc_dcp_span
            if len(rows) * pool.page_size != (pool.size + pool.page_size) * spread:
                raise TypeError(
                    f"{type(pool).__name__} has {len(rows)} pages of index keys beside {pool.size} + "
                    f"{pool.page_size} slots of one of {spread} ranks; page indices of the two differ, which "
                    "is not described"
                )
            references.append(
                self._reference(rows, layer_id, "indexer", content, page * spread, pool.page_size)
            )
        return references

    def _mamba(self, pool: MambaPool, name: str, layer_ids: LayerIds) -> None:
        (pool_info,) = pool.get_device_pool_infos()
        info: MambaStateBufferInfo = pool_info.buffer_info
        info.validate(layer_ids=pool_info.layer_ids)
        kinds = {f"conv_{index}": states for index, states in enumerate(info.conv)} | {"ssm": info.temporal}
        references = [
            self._reference(_as_stored(states[index]), layer_id, kind, _shape_of_state(states[index]), 1)
            for index, layer_id in enumerate(pool_info.layer_ids)
            for kind, states in kinds.items()
            if states[index].numel()  # models without convolutions have empty states
        ]
        references += [
            self._reference(states, None, f"extra_{index}", _shape_of_state(states), 1)
            for index, states in enumerate(info.extra_checkpoint_buffers)
        ]
        slots = info.temporal.shape[1]  # [layers, slots, ...] by MambaStateBufferInfo's definition
        self.groups.append(
            CanonicalGroup(name="state", layers=tuple(references), num_pages=slots, page_size_tokens=None)
        )

    def _page_tokens(self, pool: Any) -> int:
        """Tokens of a page of the view; ValueError unless it consists of whole pages of the pool."""
        page = self.page_size_tokens or pool.page_size
        if page % pool.page_size:
            raise ValueError(
                f"pages of {page} tokens do not consist of whole pages of the pool, which have "
                f"{pool.page_size} tokens; choose a multiple of {pool.page_size}"
            )
        if (pool.size + pool.page_size) % page:
            raise ValueError(
                f"{type(pool).__name__} has {pool.size} + {pool.page_size} slots, which are not a multiple "
                f"of the page size {page}; choose another pool size, or a page size that divides the slots"
            )
        return page

    def _reference(
        self,
        tensor: torch.Tensor,
        layer_id: int | None,
        part: str,
        content: str,
        page_tokens: int,
        unit_tokens: int = 1,
    ) -> LayerReference:
        """One part of one layer in its own tensor, `[units, ...]` with `unit_tokens` tokens each."""
        if page_tokens % unit_tokens:
            raise ValueError(
                f"{part} of layer {layer_id} has pages of {unit_tokens} tokens, which do not divide pages of "
                f"{page_tokens}"
            )
        pages = byte_pages(tensor, page_tokens // unit_tokens, f"{part} of layer {layer_id}")
        index = self.tensors.add(pages)
        runs = PageRuns(tensor_index=index, offset_bytes=0, run_bytes=pages.shape[1])
        return LayerReference(layer_id=layer_id, part=part, runs=runs, content=content)

    def _group(self, pool: Any, name: str, references: list[LayerReference], page_tokens: int) -> None:
        """Add a group if it holds all bytes that the pool reports as stored."""
        described = sum(
            len(self.tensors.tensors[r.runs.tensor_index]) * r.runs.size_bytes for r in references
        )
        stored = self._stored_bytes(pool)
        if described != stored:
            raise TypeError(
                f"{type(pool).__name__} stores {stored} bytes, of which {described} are in described "
                "buffers; copies of its pages would be incomplete"
            )
        # The length of a tensor would be wrong: a pool may reserve addresses for more pages than it has.
        pages = (pool.size + pool.page_size) // page_tokens
        self.groups.append(
            CanonicalGroup(name=name, layers=tuple(references), num_pages=pages, page_size_tokens=page_tokens)
        )

    def _stored_bytes(self, pool: Any) -> int:
        return pool.get_kv_size_bytes()


def _stored_axes(states: torch.Tensor) -> list[int]:
    """Axes of `[slots, ...]` in memory order, outermost first; CPUs with AMX use another order."""
    return [0, *sorted(range(1, states.dim()), key=lambda axis: -states.stride(axis))]


def _as_stored(states: torch.Tensor) -> torch.Tensor:
    """View of states with their axes in memory order, contiguous if their bytes have no gaps."""
    return states if states.is_contiguous() else states.permute(_stored_axes(states))


def _shape_of_state(states: torch.Tensor) -> str:
    order = "" if states.is_contiguous() else f" axes {_stored_axes(states)[1:]}"
    return f"{states.dtype} {tuple(states.shape[1:])}{order}"


def mapped(own: tuple[int, ...], names: LayerIds) -> tuple[int, ...]:
    """Model layer ids of a pool's layers, given the pool's `own` ids."""
    return tuple(own) if names is None else tuple(names[layer] for layer in own)
