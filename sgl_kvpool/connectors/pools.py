"""Byte views of SGLang's pools.

A pool's geometry is read from `get_device_pool_infos` and the pool's fields, not guessed from shapes. A pool
of SGLang is described only if its exact class is in the table at the end, because a subclass may store other
bytes. Subclasses of this package's pools are described like the pools. Of a KV pool, the described bytes have
to be all bytes that it reports as stored.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVScaleLayout, MHABufferInfo, MLABufferInfo
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

from sgl_kvpool.memory.canonical import CanonicalKVCaches, LayerReference
from sgl_kvpool.srt.pool.hybrid import LayoutHybridLinearKVPool
from sgl_kvpool.srt.pool.regions import LayerIds, PoolReader, mapped


def describe(pool: Any, page_size_tokens: int | None = None) -> CanonicalKVCaches:
    """Byte view of a real SGLang pool, without a copy.

    `pool`: Pool of MHA, MLA (SGLang's and ours, all layouts and arrangements), DSA, sliding-window or hybrid
      linear attention, or of Mamba states.
    `page_size_tokens`: Tokens of a page of the view; the pool's page size by default. A multiple of the
      pool's page size, and of the page size that its kernels see, joins several pages to one page of the
      view.
    TypeError: if a kind of pool, or of its buffers, is not described here; the message names it.
    ValueError: if the page size is not such a multiple, or does not divide the pool's slots.
    """
    return _AnyPoolReader(page_size_tokens).caches(pool)


class _AnyPoolReader(PoolReader):
    """Reader of SGLang's own pools too."""

    def reader_of(self, pool: Any) -> Callable[[Any, str, LayerIds], None]:
        reader = _KINDS.get(type(pool))
        if reader is not None:
            return reader.__get__(self)
        if isinstance(pool, LayoutHybridLinearKVPool):
            return self._hybrid_linear
        try:
            return super().reader_of(pool)
        except TypeError as error:
            kinds = sorted(kind.__name__ for kind in (*_KINDS, MambaPool))
            raise TypeError(
                f"{error}; known kinds of pools are {', '.join(kinds)}, LayoutMLATokenToKVPool "
                "and LayoutHybridLinearKVPool"
            ) from None

    def _mha(self, pool: MHATokenToKVPool, name: str, layer_ids: LayerIds) -> None:
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
            for index, layer_id in enumerate(mapped(pool_info.layer_ids, layer_ids))
            for part, tensors, values, tokens, order in parts
        ]
        self._group(pool, name, references, page)

    def _mla(self, pool: MLATokenToKVPool, name: str, layer_ids: LayerIds) -> None:
        page = self._page_tokens(pool)
        self._group(pool, name, self._mla_references(pool, layer_ids, page), page)

    def _mla_references(self, pool, layer_ids: LayerIds, page: int) -> list[LayerReference]:
        (pool_info,) = pool.get_device_pool_infos()
        info: MLABufferInfo = pool_info.buffer_info
        info.validate(layer_ids=pool_info.layer_ids)
        if not isinstance(info.buffers, tuple):
            raise TypeError(f"{type(pool).__name__} with {type(info.buffers).__name__} is not described")
        parts = {"kv": info.buffers} | ({} if info.scales is None else {"scale": info.scales})
        content = f"{pool.dtype} as {info.dtype} {info.kv_lora_rank} + {info.qk_rope_head_dim}"
        return [
            self._reference(tensors[index], layer_id, part, content, page)
            for index, layer_id in enumerate(mapped(pool_info.layer_ids, layer_ids))
            for part, tensors in parts.items()
        ]

    def _dsa(self, pool: DSATokenToKVPool, name: str, layer_ids: LayerIds) -> None:
        page = self._page_tokens(pool)
        references = self._mla_references(pool, layer_ids, page)
        if pool.dsa_kv_cache_store_fp8:
            references = [replace(r, content=f"{r.content} packed {pool.kv_cache_dim}") for r in references]
        self._group(pool, name, references + self._index_references(pool, layer_ids, page), page)

    def _index_references(self, pool: Any, layer_ids: LayerIds, page: int) -> list[LayerReference]:
        if pool.kpool_use_compress:
            raise TypeError(
                f"{type(pool).__name__} with compressed index keys keeps a tail per request, which is not "
                "described"
            )
        return super()._index_references(pool, layer_ids, page)

    def _swa(self, pool: SWAKVPool, name: str, layer_ids: LayerIds) -> None:
        for part, child, is_window in (
            ("full", pool.full_kv_pool, False),
            ("window", pool.swa_kv_pool, True),
        ):
            # Some kinds of inner pools use model layer ids, others count from 0.
            ids = [layer for layer, (_, window) in pool.layers_mapping.items() if window == is_window]
            own = getattr(child, "model_layer_ids", range(len(ids)))
            self.add(child, part, dict(zip(own, ids, strict=True)))

    def _hybrid_linear(self, pool: HybridLinearKVPool, name: str, layer_ids: LayerIds) -> None:
        child = pool.full_kv_pool
        if not hasattr(child, "model_layer_ids"):
            raise TypeError(f"{type(pool).__name__} around a {type(child).__name__} is not described")
        ids = list(pool.full_attention_layer_id_mapping)
        self.add(child, name, dict(zip(child.model_layer_ids, ids, strict=True)))
        self.add(pool.mamba_pool, "state")

    def _stored_bytes(self, pool: Any) -> int:
        """Size that SGLang reports for a pool, less the work space that belongs to no page."""
        sizes = pool.get_kv_size_bytes()
        total = sum(sizes) if isinstance(sizes, tuple) else sizes
        # SGLang counts the work space of FP4 readers, and leaves out the scales of FP4 rows.
        for name in ("dq_k_buffer", "dq_v_buffer"):
            if getattr(pool, name, None) is not None:
                total -= get_tensor_size_bytes(getattr(pool, name))
        if type(pool) is MLATokenToKVPoolFP4:
            total += sum(scale.nbytes for scale in pool.kv_scale_buffer)
        return total


_KINDS: dict[type, Callable] = {
    MHATokenToKVPool: _AnyPoolReader._mha,
    MLATokenToKVPool: _AnyPoolReader._mla,
    MLATokenToKVPoolFP4: _AnyPoolReader._mla,
    DSATokenToKVPool: _AnyPoolReader._dsa,
    SWAKVPool: _AnyPoolReader._swa,
    HybridLinearKVPool: _AnyPoolReader._hybrid_linear,
}
