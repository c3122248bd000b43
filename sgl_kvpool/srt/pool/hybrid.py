"""The pool of models that mix MLA with linear attention: SGLang's `HybridLinearKVPool` around our pool.

The rows of the MLA layers are in a `LayoutMLATokenToKVPool`, or a `LayoutDSATokenToKVPool` for sparse
attention, which numbers the MLA layers 0, 1, ... All callers use model layer ids, and this class translates
them. The states of the linear layers stay in SGLang's own `MambaPool`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, HybridLinearKVPool, MLATokenToKVPool

from sgl_kvpool.layout import MLAKVCacheLayout, RowFormat
from sgl_kvpool.memory.arrangement import KVArrangement
from sgl_kvpool.refusal import Refusal
from sgl_kvpool.srt.pool.dsa import LayoutDSATokenToKVPool
from sgl_kvpool.srt.pool.k_scales import checked_k_scales
from sgl_kvpool.srt.pool.mla import LayoutMLATokenToKVPool
from sgl_kvpool.srt.pool.row_pool import RowPool
from sgl_kvpool.transfer.host_options import HostTierOptions

__all__ = ["LayoutHybridLinearKVPool"]


class LayoutHybridLinearKVPool(HybridLinearKVPool, RowPool):
    """`HybridLinearKVPool` whose MLA layers store rows of one `MLAKVCacheLayout`.

    Takes SGLang's own arguments and, by keyword, those of `LayoutMLATokenToKVPool`; the keys of `k_scales`
    are model layer ids. States stay in SGLang's pool, with SGLang's bytes.

    Attributes
    ----------
    full_kv_pool : LayoutMLATokenToKVPool
        The pool of the rows; a `LayoutDSATokenToKVPool` for models with sparse attention.

    Raises
    ------
    ValueError
        As `LayoutMLATokenToKVPool` and `LayoutDSATokenToKVPool`; also for a model without MLA, for a row pool
        that SGLang has built already, for a class of row pools that is not SGLang's default, for a layer
        listed twice, and for a k_scale of a layer without rows.
    """

    full_kv_pool: LayoutMLATokenToKVPool

    def __init__(
        self,
        *args,
        kv_cache_layout: MLAKVCacheLayout | str,
        full_attention_layer_ids: Sequence[int],
        use_mla: bool = False,
        use_dsa: bool = False,
        full_kv_pool_class: type | None = None,
        full_kv_pool: object | None = None,
        k_scales: Mapping[int, float] | None = None,
        kv_cache_arrangement: KVArrangement | str = KVArrangement.LAYER_MAJOR,
        readers: Sequence[str] = (),
        host_tier: HostTierOptions | None = None,
        **kwargs,
    ):
        layout = MLAKVCacheLayout.parse(kv_cache_layout)
        if not use_mla:
            raise Refusal(
                f"KV cache layout {layout} stores rows of multi-head latent attention (MLA), which this "
                "hybrid model does not use; serve it without --kv-cache-layout"
            )
        # SGLang may pass another class (a platform's) or the pool itself (unified memory).
        stock = (None, DSATokenToKVPool if use_dsa else MLATokenToKVPool)
        if full_kv_pool is not None or full_kv_pool_class not in stock:
            passed = full_kv_pool_class if full_kv_pool is None else type(full_kv_pool)
            raise Refusal(
                f"SGLang passed a {getattr(passed, '__name__', passed)} for rows of layout {layout}, which "
                "cannot store them; leave --kv-cache-layout out"
            )
        layer_ids = list(full_attention_layer_ids)
        places = {layer_id: place for place, layer_id in enumerate(layer_ids)}
        if len(places) < len(layer_ids):
            raise Refusal(f"full_attention_layer_ids {layer_ids} lists a layer twice")
        scales = checked_k_scales(k_scales)  # checked here, where keys are still model layer ids
        others = sorted(set(scales) - set(places))
        if others:
            raise Refusal(
                f"k_scales has layers {others}, and only {sorted(places)} have rows; the checkpoint's KV "
                "scales are damaged"
            )
        rows_class = LayoutDSATokenToKVPool if use_dsa else LayoutMLATokenToKVPool
        super().__init__(
            *args,
            full_attention_layer_ids=layer_ids,
            use_mla=True,
            use_dsa=use_dsa,
            full_kv_pool_class=rows_class.bind(
                layout,
                {places[layer_id]: k_scale for layer_id, k_scale in scales.items()},
                arrangement=KVArrangement.parse(kv_cache_arrangement),
                readers=readers,
                host_tier=host_tier,
            ),
            **kwargs,
        )

    # ---------------------------------------------------------------- what the rows are

    @property
    def row_pool(self) -> LayoutMLATokenToKVPool:
        """The wrapped pool, which numbers its layers 0, 1, ..."""
        return self.full_kv_pool

    @property
    def kv_cache_layout(self) -> MLAKVCacheLayout:  # type: ignore[override]
        """Layout of the rows."""
        return self.full_kv_pool.kv_cache_layout

    @property
    def kv_cache_arrangement(self) -> KVArrangement:  # type: ignore[override]
        """Arrangement of the rows of all MLA layers."""
        return self.full_kv_pool.kv_cache_arrangement

    @property
    def row_format(self) -> RowFormat:  # type: ignore[override]
        """Format of a row."""
        return self.full_kv_pool.row_format

    @property
    def kv_lora_rank(self) -> int:  # type: ignore[override]
        """Number of latent values in a row."""
        return self.full_kv_pool.kv_lora_rank

    @property
    def qk_rope_head_dim(self) -> int:  # type: ignore[override]
        """Number of rotary values in a row."""
        return self.full_kv_pool.qk_rope_head_dim

    def has_rows(self, layer_id: int) -> bool:
        """Whether a model layer is an MLA layer; the other layers keep states."""
        return layer_id in self.full_attention_layer_id_mapping

    def k_scale(self, layer_id: int) -> float:
        """Divisor of a model layer's values before they are stored; 1.0 for layouts without k_scale."""
        return self.full_kv_pool.k_scale(self._transfer_full_attention_id(layer_id))

    def slot_to_row(self, slots: torch.Tensor) -> torch.Tensor:
        """Row numbers of SGLang's slots, the same in every MLA layer."""
        return self.full_kv_pool.slot_to_row(slots)

    @property
    def slot_pages(self) -> tuple[int, int] | None:
        """`RowPlacement.slot_pages`, by which kernels turn slots into rows; None if slots are row numbers."""
        return self.full_kv_pool.slot_pages

    def get_v_head_dim(self) -> int:
        """Number of a row's values that are attended as V: the latent."""
        return self.full_kv_pool.get_v_head_dim()  # SGLang's reads a value buffer, which packed rows lack

    # ---------------------------------------------------------------- rows

    def get_row_buffer(self, layer_id: int) -> torch.Tensor:
        """Stored bytes of a model layer, `[rows, 1, row_bytes]` uint8, a view of the live pool.

        Waits until a load of this layer from the host tier is done. ValueError for a layer without rows.
        """
        place = self._transfer_full_attention_id(layer_id)
        self._wait_for_layer(layer_id)  # the wrapped pool has no transfer counter; this pool holds it
        return self.full_kv_pool.get_row_buffer(place)

    # SGLang's own methods change the layer object's id during a call, which another thread would see, and its
    # `set_kv_buffer` treats row numbers (`RowWriteLoc`) as slots.

    def set_kv_buffer(
        self, layer, loc_info, cache_k, cache_v, k_scale=1.0, v_scale=1.0, dcp_kv_mask=None
    ) -> None:
        """Store combined rows `cache_k` `[tokens, 1, R + P]` with the pool's own scales."""
        place = self._transfer_full_attention_id(layer.layer_id)
        self.full_kv_pool.set_kv_buffer(layer, loc_info, cache_k, cache_v, layer_id_override=place)

    def set_mla_kv_buffer(self, layer, loc_info, cache_k_nope, cache_k_rope) -> None:
        """Store rows from a latent `[tokens, 1, R]` and a rope `[tokens, 1, P]` (None or empty if P is 0)."""
        place = self._transfer_full_attention_id(layer.layer_id)
        self.full_kv_pool.set_mla_kv_buffer(
            layer, loc_info, cache_k_nope, cache_k_rope, layer_id_override=place
        )

    def get_mla_kv_buffer(
        self, layer, loc: torch.Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Decoded latent and rope of some slots, as `LayoutMLATokenToKVPool.get_mla_kv_buffer`."""
        place = self._transfer_full_attention_id(layer.layer_id)
        self._wait_for_layer(layer.layer_id)
        return self.full_kv_pool.get_mla_kv_buffer(layer, loc, dst_dtype, layer_id_override=place)
