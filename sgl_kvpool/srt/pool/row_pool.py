"""Interface of pools with rows of a chosen layout, which hold the rows or wrap a pool that does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partialmethod
from typing import TYPE_CHECKING, Any, Self

from sgl_kvpool.layout import MLAKVCacheLayout, RowFormat
from sgl_kvpool.memory.arrangement import KVArrangement
from sgl_kvpool.transfer.host_options import HostTierOptions

if TYPE_CHECKING:
    import torch

__all__ = ["RowPool"]


class RowPool:
    """A pool whose rows have a `MLAKVCacheLayout`; attention backends read and write it.

    Attributes
    ----------
    kv_cache_layout : MLAKVCacheLayout
    kv_cache_arrangement : KVArrangement
    row_format : RowFormat
    kv_lora_rank, qk_rope_head_dim : int
        Number of latent values and of rotary values in a row.
    dtype : torch.dtype
        The pool's dtype as SGLang sees it.
    set_mla_kv_buffer : callable
        SGLang's method that stores rows.
    """

    kv_cache_layout: MLAKVCacheLayout
    kv_cache_arrangement: KVArrangement
    row_format: RowFormat
    kv_lora_rank: int
    qk_rope_head_dim: int
    dtype: torch.dtype
    set_mla_kv_buffer: Callable[..., None]

    @classmethod
    def bind(
        cls,
        layout: MLAKVCacheLayout,
        k_scales: Mapping[int, float] | None = None,
        *,
        arrangement: KVArrangement = KVArrangement.LAYER_MAJOR,
        readers: Sequence[str] = (),
        host_tier: HostTierOptions | None = None,
    ) -> type[Self]:
        """Subclass whose constructor takes exactly the arguments of SGLang's own class.

        SGLang's pool builders take a class, not a factory, and pass it the in-tree arguments only.
        """
        layout = MLAKVCacheLayout.parse(layout)
        init: Any = cls.__init__
        members = {
            "__init__": partialmethod(
                init,
                kv_cache_layout=layout,
                k_scales=k_scales,
                kv_cache_arrangement=KVArrangement.parse(arrangement),
                readers=readers,
                host_tier=host_tier,
            ),
            "__module__": cls.__module__,
        }
        return type(f"{cls.__name__}_{layout.value}", (cls,), members)

    @property
    def row_pool(self) -> Any:
        """The pool that holds the rows: this pool or the one that it wraps."""
        return self

    def has_rows(self, layer_id: int) -> bool:
        """Whether the pool has rows of a model layer; a hybrid model has rows for some layers only."""
        return True

    def get_row_buffer(self, layer_id: int) -> torch.Tensor:
        """Stored bytes of a model layer, `[rows, 1, row_bytes]` uint8, a view of the live pool."""
        raise NotImplementedError

    def slot_to_row(self, slots: torch.Tensor) -> torch.Tensor:
        """Row numbers of SGLang's slots, the same in every layer."""
        raise NotImplementedError

    @property
    def slot_pages(self) -> tuple[int, int] | None:
        """`RowPlacement.slot_pages`, by which kernels turn slots into rows; None if slots are row numbers."""
        raise NotImplementedError

    def k_scale(self, layer_id: int) -> float:
        """Divisor of a model layer's values before they are stored."""
        raise NotImplementedError
