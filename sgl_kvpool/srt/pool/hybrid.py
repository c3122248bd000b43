"""The pool of models that mix MLA with linear attention: SGLang's `HybridLinearKVPool` around our pool.

The rows of the MLA layers are in a `LayoutMLATokenToKVPool`, or a `LayoutDSATokenToKVPool` for sparse
attention, which numbers the MLA layers 0, 1, ... All callers use model layer ids, and this class translates
them. The states of the linear layers stay in SGLang's own `MambaPool`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    MLATokenToKVPool,
    unwrap_write_loc,
)
from torch.utils._pytree import tree_map_only

from sgl_kvpool.srt import overrides
from sgl_kvpool.srt.pool.dsa import LayoutDSATokenToKVPool
from sgl_kvpool.srt.pool.mla import LayoutMLATokenToKVPool
from sgl_kvpool.srt.pool.row_pool import PoolOptions, RowPool


class LayoutHybridLinearKVPool(HybridLinearKVPool, RowPool):
    """`HybridLinearKVPool` whose MLA layers store rows of one `MLAKVCacheLayout`.

    Takes SGLang's own arguments and, by keyword, `options`, whose `k_scales` are by model layer id; the
    `options` of the pool itself are those of the wrapped pool. States stay in SGLang's pool, with SGLang's
    bytes.

    ValueError as `LayoutMLATokenToKVPool` and `LayoutDSATokenToKVPool`.
    """

    #: The pool of the rows; a `LayoutDSATokenToKVPool` for models with sparse attention.
    full_kv_pool: LayoutMLATokenToKVPool

    def __init__(
        self,
        *args,
        options: PoolOptions,
        full_attention_layer_ids: Sequence[int],
        use_mla: bool = False,
        use_dsa: bool = False,
        full_kv_pool_class: type | None = None,
        full_kv_pool: object | None = None,
        **kwargs,
    ):
        # A platform's class, and a pool that SGLang has built (unified memory), are refused before.
        stock = (None, DSATokenToKVPool if use_dsa else MLATokenToKVPool)
        assert use_mla
        assert full_kv_pool is None
        assert full_kv_pool_class in stock, full_kv_pool_class
        layer_ids = list(full_attention_layer_ids)
        places = {layer_id: place for place, layer_id in enumerate(layer_ids)}
        assert len(places) == len(layer_ids), layer_ids
        by_place = {places[layer_id]: k_scale for layer_id, k_scale in options.k_scales.items()}
        super().__init__(
            *args,
            full_attention_layer_ids=layer_ids,
            use_mla=True,
            use_dsa=use_dsa,
            full_kv_pool_class=partial(
                LayoutDSATokenToKVPool if use_dsa else LayoutMLATokenToKVPool,
                options=replace(options, k_scales=by_place),
            ),
            **kwargs,
        )
        rows = self.full_kv_pool
        self.row_format, self.placement = rows.row_format, rows.placement
        self.kv_lora_rank, self.qk_rope_head_dim = rows.kv_lora_rank, rows.qk_rope_head_dim

    @property
    def row_pool(self) -> LayoutMLATokenToKVPool:
        """The wrapped pool, which numbers its layers 0, 1, ..."""
        return self.full_kv_pool

    @property
    def options(self) -> PoolOptions:  # type: ignore[override]
        """Options of the wrapped pool, with its layer numbers."""
        return self.full_kv_pool.options

    @property
    def row_layer_ids(self) -> Sequence[int]:
        return tuple(self.full_attention_layer_id_mapping)

    def has_rows(self, layer_id: int) -> bool:
        """Whether a model layer is an MLA layer; the other layers keep states."""
        return layer_id in self.full_attention_layer_id_mapping

    def k_scale(self, layer_id: int) -> float:
        return self.full_kv_pool.k_scale(self._transfer_full_attention_id(layer_id))

    def take_k_scales(self, k_scales: Mapping[int, float]) -> None:
        places = {self._transfer_full_attention_id(layer): value for layer, value in k_scales.items()}
        self.full_kv_pool.take_k_scales(places)

    @overrides
    def get_v_head_dim(self) -> int:
        return self.full_kv_pool.get_v_head_dim()  # SGLang's reads a value buffer, which packed rows lack

    def get_row_buffer(self, layer_id: int) -> torch.Tensor:
        place = self._transfer_full_attention_id(layer_id)
        self._wait_for_layer(layer_id)  # the wrapped pool has no transfer counter; this pool holds it
        return self.full_kv_pool.get_row_buffer(place)

    # SGLang's own methods change the layer object's id during a call, which another thread would see, and its
    # `set_kv_buffer` treats row numbers (`RowWriteLoc`) as slots.

    @overrides
    def set_kv_buffer(
        self, layer, loc_info, cache_k, cache_v, k_scale=1.0, v_scale=1.0, dcp_kv_mask=None
    ) -> None:
        """Store combined rows `cache_k` `[tokens, 1, R + P]` with the pool's own scales."""
        place = self._transfer_full_attention_id(layer.layer_id)
        if (full_loc := unwrap_write_loc(loc_info)[2]) is not None:
            loc_info = replace(loc_info, loc=full_loc)
        self.full_kv_pool.set_kv_buffer(layer, loc_info, cache_k, cache_v, layer_id_override=place)

    @overrides
    def set_mla_kv_buffer(self, layer, loc_info, cache_k_nope, cache_k_rope) -> None:
        place = self._transfer_full_attention_id(layer.layer_id)
        self.full_kv_pool.set_mla_kv_buffer(
            layer, loc_info, cache_k_nope, cache_k_rope, layer_id_override=place
        )

    @overrides
    def get_cpu_copy(self, indices, mamba_indices=None, req_pool_index=None):
        """SGLang's copy; on a CPU, SGLang returns a view of the live slot instead of a copy of one state."""
        rows, states = super().get_cpu_copy(indices, mamba_indices, req_pool_index)
        return rows, tree_map_only(torch.Tensor, torch.clone, states)

    @overrides
    def get_mla_kv_buffer(
        self, layer, loc: torch.Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        place = self._transfer_full_attention_id(layer.layer_id)
        self._wait_for_layer(layer.layer_id)
        return self.full_kv_pool.decoded(place, loc, dst_dtype)
