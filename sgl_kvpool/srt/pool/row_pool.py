"""Pools with rows of a chosen layout, which hold the rows or wrap a pool that does, and their options."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_parallel

from sgl_kvpool.layout import MLAKVCacheLayout, RowFormat
from sgl_kvpool.memory.arrangement import KVArrangement, PageStride, RowPlacement, global_slots, local_slots
from sgl_kvpool.refusal import Refusal
from sgl_kvpool.transfer.host_options import HostTierOptions


@dataclass(frozen=True)
class PoolOptions:
    """What a pool's constructor takes besides SGLang's own arguments; checked when it is made.

    `layout`: Layout of a row.
    `k_scales`: k_scale by model layer id, for layouts that divide by it; 1.0 for layers without an entry. The
      scale belongs to the pool and not to the layer object of a call, because SGLang's prefill writes through
      a layer object without a scale, and one cache must not hold rows of two scales.
    `arrangement`: Arrangement of the layers in memory.
    `readers`: Names of the attention backends that will read the pool.
    `host_tier`: Options of the pool's host tier.
    ValueError: for an unknown layout or arrangement, and for a k_scale that is not finite and positive in
      float32 or whose key is not a layer id.
    """

    layout: MLAKVCacheLayout
    k_scales: Mapping[int, float] = field(default_factory=dict)
    arrangement: KVArrangement = KVArrangement.LAYER_MAJOR
    readers: Sequence[str] = ()
    host_tier: HostTierOptions = field(default_factory=HostTierOptions)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", MLAKVCacheLayout(self.layout))
        object.__setattr__(self, "arrangement", KVArrangement(self.arrangement))
        object.__setattr__(self, "k_scales", _checked_k_scales(self.k_scales or {}))


class RowPool:
    """A pool whose rows have a `MLAKVCacheLayout`; attention backends read and write it."""

    options: PoolOptions
    row_format: RowFormat
    #: Number of latent values and of rotary values in a row.
    kv_lora_rank: int
    qk_rope_head_dim: int
    #: Places of the rows in the buffer that all layers share; None if each layer has its own, as SGLang
    #: allocates them.
    placement: RowPlacement | None = None
    #: The pool's dtype as SGLang sees it.
    dtype: torch.dtype
    #: SGLang's method that stores rows.
    set_mla_kv_buffer: Callable[..., None]

    @property
    def kv_cache_layout(self) -> MLAKVCacheLayout:
        return self.options.layout

    @property
    def kv_cache_arrangement(self) -> KVArrangement:
        return self.options.arrangement

    @property
    def host_tier(self) -> HostTierOptions:
        return self.options.host_tier

    @property
    def row_pool(self) -> Any:
        """The pool that holds the rows: this pool or the one that it wraps."""
        return self

    @property
    def row_layer_ids(self) -> Sequence[int]:
        """Model layers with rows, in the order of the row pool."""
        return self.row_pool.model_layer_ids

    def has_rows(self, layer_id: int) -> bool:
        """Whether the pool has rows of a model layer; a hybrid model has rows for some layers only."""
        return True

    def get_row_buffer(self, layer_id: int) -> torch.Tensor:
        """Stored bytes of a model layer, `[rows, 1, row_bytes]` uint8, a view of the live pool.

        `slot_to_row(slots)` gives the rows of slots. Waits until a load of this layer from the host tier is
        done.
        """
        raise NotImplementedError

    def slot_to_row(self, slots: torch.Tensor) -> torch.Tensor:
        """Row numbers of SGLang's slots, the same in every layer; negative ones stay as they are.

        Returns `slots` itself unless the arrangement is `page_major`. One call per step is enough.
        """
        return slots if self.placement is None else self.placement.slot_to_row(slots)

    @property
    def dcp_size(self) -> int:
        """Ranks of decode context parallelism over which SGLang's slots are spread in this pool.

        1 for a pool of which each rank has all rows (`dcp_replicated`), or whose slots are a rank's own
        (`write_loc_is_dcp_resolved`).
        """
        return self.row_pool._write_loc_dcp_span

    @property
    def dcp_rank(self) -> int:
        """This rank among those over which the slots are spread."""
        return get_parallel().attn_dcp_rank % self.dcp_size

    def rows_to_write(self, slots: torch.Tensor) -> torch.Tensor:
        """Row numbers at which this rank stores SGLang's slots; -1 for the slots of other ranks."""
        if self.dcp_size > 1:
            local = local_slots(slots, self.dcp_size)
            is_here = (slots >= 0) & (slots == global_slots(local, self.dcp_rank, self.dcp_size))
            slots = torch.where(is_here, local, -1)
        return self.slot_to_row(slots)

    @property
    def page_stride(self) -> PageStride | None:
        """From which kernels compute the row of a slot of SGLang; None if slots are row numbers."""
        stride = None if self.placement is None else self.placement.page_stride
        if self.dcp_size == 1:
            return stride
        return (stride or PageStride(1, 1))._replace(dcp_size=self.dcp_size)

    def k_scale(self, layer_id: int) -> float:
        """Divisor of a model layer's values before they are stored; 1.0 for layouts without k_scale."""
        return self.options.k_scales.get(layer_id, 1.0) if self.options.layout.uses_k_scale else 1.0

    def take_k_scales(self, k_scales: Mapping[int, float]) -> None:
        """Replace the k_scales, by model layer; rows of the old ones must not be read any more."""
        raise NotImplementedError


@dataclass
class RowWriteLoc(KVWriteLoc):
    """A `KVWriteLoc` whose `loc` holds row numbers already, for writers that convert slots once per step."""


class RowsToWrite:
    """Row numbers at which the tokens of a batch are stored."""

    def __init__(self, pool: RowPool):
        self.pool = pool
        self._slots: torch.Tensor | None = None
        self._rows: RowWriteLoc | None = None

    def forget(self) -> None:
        """Discard the row numbers; call at every step, and inside a CUDA graph too.

        SGLang refills the same tensor, and a graph repeats only what it has recorded.
        """
        self._slots = self._rows = None

    def of(self, forward_batch) -> RowWriteLoc:
        """Rows of a batch's tokens, computed again if SGLang has another `out_cache_loc`.

        Between prefill graphs every layer has a new view of the same slots, so addresses are compared, not
        tensor objects. A reference to the slots is kept, so that no other tensor can get their memory.
        """
        slots, rows = forward_batch.out_cache_loc, self._rows
        if rows is None or self._slots is None or not _same_memory(self._slots, slots):
            loc = KVWriteLoc.for_batch(forward_batch)
            rows = RowWriteLoc(self.pool.rows_to_write(loc.loc), physical=loc.physical)
            self._slots, self._rows = slots, rows
        return rows


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _checked_k_scales(k_scales: Mapping[int, float]) -> dict[int, float]:
    """The k_scales by layer id as Python floats; ValueError unless all are finite and positive."""
    checked = {}
    for layer_id, k_scale in k_scales.items():
        if not isinstance(layer_id, int):
            raise Refusal(f"k_scales has a key {layer_id!r}; keys are model layer ids (int)")
        try:
            checked[layer_id] = float(k_scale)
            stored = torch.tensor(checked[layer_id], dtype=torch.float32).item()
        except (TypeError, ValueError, RuntimeError) as error:
            raise Refusal(f"k_scale={k_scale!r} of layer {layer_id} is not a number") from error
        if not 0.0 < stored < float("inf"):
            raise Refusal(
                f"k_scale={k_scale} of layer {layer_id} is not finite and positive in float32; "
                "the checkpoint's KV scales are damaged, or choose a layout without k_scale"
            )
    return checked


def k_scales_digest(pools: Sequence[Any]) -> str:
    """Digest of the k_scales of the target's pool and then the drafts', for storage keys and handshakes.

    8 hexadecimal digits that depend on every layer's k_scale; empty if all are 1.
    """
    scales = [[pool.k_scale(layer) for layer in pool.row_layer_ids] for pool in pools]
    if all(scale == 1.0 for layers in scales for scale in layers):
        return ""
    return hashlib.blake2b(repr(scales).encode(), digest_size=4).hexdigest()
