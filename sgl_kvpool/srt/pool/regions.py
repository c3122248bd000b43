"""Byte views of SGLang's pools.

A pool's geometry is read from `get_device_pool_infos` and the pool's fields, not guessed from shapes. A pool
of SGLang is described only if its exact class is in the table at the end, because a subclass may store other
bytes. Subclasses of this package's pools, such as those from `bind`, are described like the pools. Of a KV
pool, the described bytes have to be all bytes that it reports as stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVScaleLayout,
    MambaStateBufferInfo,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    MambaPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    MLATokenToKVPoolFP4,
    get_tensor_size_bytes,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sgl_kvpool.memory.canonical import (
    CanonicalGroup,
    CanonicalKVCaches,
    LayerReference,
    TensorList,
    byte_pages,
)
from sgl_kvpool.memory.runs import PageRuns
from sgl_kvpool.sizes import whole_number
from sgl_kvpool.srt.pool.dsa import LayoutDSATokenToKVPool
from sgl_kvpool.srt.pool.hybrid import LayoutHybridLinearKVPool
from sgl_kvpool.srt.pool.mla import LayoutMLATokenToKVPool

__all__ = ["describe"]

#: Model layer ids by the layer ids of a wrapped pool; None if they are the same.
_LayerIds = Mapping[int, int] | None


def describe(pool: Any, page_size_tokens: int | None = None) -> CanonicalKVCaches:
    """Byte view of a real SGLang pool, without a copy.

    Parameters
    ----------
    pool : KVCache or MambaPool
        Pool of MHA, MLA (SGLang's and ours, all layouts and arrangements), DSA, sliding-window or hybrid
        linear attention, or of Mamba states.
    page_size_tokens : int, optional
        Tokens of a page of the view; the pool's page size by default. A multiple of the pool's page size,
        and of the page size that its kernels see, joins several pages to one page of the view.

    Returns
    -------
    CanonicalKVCaches

    Raises
    ------
    TypeError
        If a kind of pool, or of its buffers, is not described here; the message names it.
    ValueError
        If the page size is not such a multiple, or does not divide the pool's slots.
    """
    if page_size_tokens is not None:
        page_size_tokens = whole_number("page_size_tokens", page_size_tokens)
    regions = _Regions(page_size_tokens)
    regions.add(pool)
    return CanonicalKVCaches(tuple(regions.tensors.tensors), tuple(regions.groups))


class _Regions:
    """The tensors and groups described so far."""

    def __init__(self, page_size_tokens: int | None) -> None:
        self.page_size_tokens = page_size_tokens
        self.tensors = TensorList()
        self.groups: list[CanonicalGroup] = []

    def add(self, pool: Any, name: str = "kv", layer_ids: _LayerIds = None) -> None:
        """Describe a pool, or every pool that a wrapper contains."""
        reader = _KINDS.get(type(pool))
        if reader is None and isinstance(pool, LayoutMLATokenToKVPool):
            reader = _Regions._layout_mla
        elif reader is None and isinstance(pool, LayoutHybridLinearKVPool):
            reader = _Regions._hybrid_linear
        if reader is None:
            raise TypeError(
                f"the bytes of {type(pool).__name__} are unknown; known kinds of pools are "
                f"{', '.join(sorted(kind.__name__ for kind in _KINDS))}, LayoutMLATokenToKVPool "
                "and LayoutHybridLinearKVPool"
            )
        reader(self, pool, name, layer_ids)

    # ---------------------------------------------------------------- one reader per kind

    def _mha(self, pool: MHATokenToKVPool, name: str, layer_ids: _LayerIds) -> None:
        (pool_info,) = pool.get_device_pool_infos()
        info: MHABufferInfo = pool_info.buffer_info
        info.validate(layer_ids=pool_info.layer_ids)
        if info.buffers.layout is KVBufferLayout.NHD:
            unit_tokens, order = 1, "by token"
        elif info.buffers.layout is KVBufferLayout.HND:
            # Heads are the outer axis inside each page of the pool, also if a page of the view joins several.
            unit_tokens, order = info.page_size, f"by head in pages of {info.page_size}"
        else:
            raise TypeError(f"{type(pool).__name__} with {info.buffers.layout} buffers is not described")
        # (part, tensors, values of a head, tokens of a unit, order)
        parts = [
            ("k", info.buffers.k, info.head_dim, unit_tokens, order),
            ("v", info.buffers.v, info.v_head_dim, unit_tokens, order),
        ]
        if info.scales is not None:
            if info.scales.layout is not KVScaleLayout.TOKEN:
                raise TypeError(f"{type(pool).__name__} with {info.scales.layout} is not described")
            parts += [("k_scale", info.scales.k, "scales", 1, "by token")]
            parts += [("v_scale", info.scales.v, "scales", 1, "by token")]
        page = self._page_tokens(pool)
        references = [
            self._reference(
                tensors[index],
                layer_id,
                part,
                f"{pool.dtype} as {tensors[index].dtype} {info.head_num} x {values} {order}",
                page,
                tokens,
            )
            for index, layer_id in enumerate(_mapped(pool_info.layer_ids, layer_ids))
            for part, tensors, values, tokens, order in parts
        ]
        self._group(pool, name, references, page)

    def _mla(self, pool: MLATokenToKVPool, name: str, layer_ids: _LayerIds) -> None:
        page = self._page_tokens(pool)
        self._group(pool, name, self._mla_references(pool, layer_ids, page), page)

    def _mla_fp4(self, pool: MLATokenToKVPoolFP4, name: str, layer_ids: _LayerIds) -> None:
        page = self._page_tokens(pool)
        references = self._mla_references(pool, layer_ids, page)
        scale_bytes = sum(scale.nbytes for scale in pool.kv_scale_buffer)
        # SGLang's count leaves out the scales.
        self._group(pool, name, references, page, stored_bytes=_stored_bytes(pool) + scale_bytes)

    def _mla_references(self, pool, layer_ids: _LayerIds, page: int) -> list[LayerReference]:
        (pool_info,) = pool.get_device_pool_infos()
        info: MLABufferInfo = pool_info.buffer_info
        info.validate(layer_ids=pool_info.layer_ids)
        if not isinstance(info.buffers, tuple):
            raise TypeError(f"{type(pool).__name__} with {type(info.buffers).__name__} is not described")
        parts = {"kv": info.buffers} | ({} if info.scales is None else {"scale": info.scales})
        content = f"{pool.dtype} as {info.dtype} {info.kv_lora_rank} + {info.qk_rope_head_dim}"
        return [
            self._reference(tensors[index], layer_id, part, content, page)
            for index, layer_id in enumerate(_mapped(pool_info.layer_ids, layer_ids))
            for part, tensors in parts.items()
        ]

    def _layout_mla(self, pool: LayoutMLATokenToKVPool, name: str, layer_ids: _LayerIds) -> None:
        page = self._page_tokens(pool)
        if pool.cross_layer is None:
            references = self._mla_references(pool, layer_ids, page)
        else:
            buffer, folded = pool.cross_layer.group, page // pool.page_size
            tensor = self.tensors.add(byte_pages(buffer.canonical_tensor(), folded, type(pool).__name__))
            ids = _mapped(pool.model_layer_ids, layer_ids)  # in the order of the buffer's positions
            references = [
                replace(reference, layer_id=layer_id, runs=reference.runs.folded(folded, buffer.page_bytes))
                for layer_id, reference in zip(ids, buffer.references(0, tensor), strict=True)
            ]
        references = [
            replace(reference, content=f"{pool.row_format.tag} k_scale {pool.k_scale(own)}")
            for own, reference in zip(pool.model_layer_ids, references, strict=True)
        ]
        if isinstance(pool, LayoutDSATokenToKVPool):
            references += self._index_references(pool, layer_ids, page)
        self._group(pool, name, references, page)

    def _dsa(self, pool: DSATokenToKVPool, name: str, layer_ids: _LayerIds) -> None:
        page = self._page_tokens(pool)
        references = self._mla_references(pool, layer_ids, page)
        if pool.dsa_kv_cache_store_fp8:
            references = [replace(r, content=f"{r.content} packed {pool.kv_cache_dim}") for r in references]
        self._group(pool, name, references + self._index_references(pool, layer_ids, page), page)

    def _index_references(
        self, pool: DSATokenToKVPool, layer_ids: _LayerIds, page: int
    ) -> list[LayerReference]:
        if pool.kpool_use_compress:
            raise TypeError(
                f"{type(pool).__name__} with compressed index keys keeps a tail per request, which is not "
                "described"
            )
        references = []
        ids = _mapped(pool.model_layer_ids, layer_ids)
        content = (
            f"index keys of {pool.index_kpool} x {pool.index_head_dim} in pages of {pool.index_page_size}"
        )
        for layer_id, rows, skipped in zip(
            ids, pool.index_k_with_scale_buffer, pool.skip_topk_layers, strict=True
        ):
            # A layer that reuses the top-k of the layer before it has a placeholder instead of index keys.
            if skipped:
                continue
            # A row of index keys covers one page of the pool, and the indexer's kernels see it as one page.
            if len(rows) * pool.page_size != pool.size + pool.page_size:
                raise TypeError(
                    f"{type(pool).__name__} has {len(rows)} pages of index keys beside {pool.size} + "
                    f"{pool.page_size} slots; page indices of the two differ (decode context parallelism?), "
                    "which is not described"
                )
            references.append(self._reference(rows, layer_id, "indexer", content, page, pool.page_size))
        return references

    def _swa(self, pool: SWAKVPool, name: str, layer_ids: _LayerIds) -> None:
        for part, child, is_window in (
            ("full", pool.full_kv_pool, False),
            ("window", pool.swa_kv_pool, True),
        ):
            # Some kinds of inner pools use model layer ids, others count from 0.
            ids = [layer for layer, (_, window) in pool.layers_mapping.items() if window == is_window]
            own = getattr(child, "model_layer_ids", range(len(ids)))
            self.add(child, part, dict(zip(own, ids, strict=True)))

    def _hybrid_linear(self, pool: HybridLinearKVPool, name: str, layer_ids: _LayerIds) -> None:
        child = pool.full_kv_pool
        if not hasattr(child, "model_layer_ids"):
            raise TypeError(f"{type(pool).__name__} around a {type(child).__name__} is not described")
        ids = list(pool.full_attention_layer_id_mapping)
        self.add(child, name, dict(zip(child.model_layer_ids, ids, strict=True)))
        self.add(pool.mamba_pool, "state")

    def _mamba(self, pool: MambaPool, name: str, layer_ids: _LayerIds) -> None:
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

    # ---------------------------------------------------------------- shared

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

    def _group(
        self,
        pool: Any,
        name: str,
        references: list[LayerReference],
        page_tokens: int,
        stored_bytes: int | None = None,
    ) -> None:
        """Add a group if it holds all bytes that the pool reports as stored."""
        described = sum(
            len(self.tensors.tensors[r.runs.tensor_index]) * r.runs.size_bytes for r in references
        )
        stored = _stored_bytes(pool) if stored_bytes is None else stored_bytes
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


def _stored_bytes(pool: Any) -> int:
    """Size that SGLang reports for a pool, less the work space that belongs to no page."""
    sizes = pool.get_kv_size_bytes()
    total = sum(sizes) if isinstance(sizes, tuple) else sizes
    # SGLang counts the work space of FP4 readers.
    for name in ("dq_k_buffer", "dq_v_buffer"):
        if getattr(pool, name, None) is not None:
            total -= get_tensor_size_bytes(getattr(pool, name))
    return total


def _stored_axes(states: torch.Tensor) -> list[int]:
    """Axes of `[slots, ...]` in memory order, outermost first; CPUs with AMX use another order."""
    return [0, *sorted(range(1, states.dim()), key=lambda axis: -states.stride(axis))]


def _as_stored(states: torch.Tensor) -> torch.Tensor:
    """View of states with their axes in memory order, contiguous if their bytes have no gaps."""
    return states if states.is_contiguous() else states.permute(_stored_axes(states))


def _shape_of_state(states: torch.Tensor) -> str:
    order = "" if states.is_contiguous() else f" axes {_stored_axes(states)[1:]}"
    return f"{states.dtype} {tuple(states.shape[1:])}{order}"


def _mapped(own: tuple[int, ...], names: _LayerIds) -> tuple[int, ...]:
    """Model layer ids of a pool's layers, given the pool's `own` ids."""
    return tuple(own) if names is None else tuple(names[layer] for layer in own)


_KINDS: dict[type, Callable] = {
    MHATokenToKVPool: _Regions._mha,
    MLATokenToKVPool: _Regions._mla,
    MLATokenToKVPoolFP4: _Regions._mla_fp4,
    DSATokenToKVPool: _Regions._dsa,
    SWAKVPool: _Regions._swa,
    HybridLinearKVPool: _Regions._hybrid_linear,
    MambaPool: _Regions._mamba,
}
