"""Arrangement of an MLA pool's layers in memory: SGLang's `MLATokenToKVPool` with a `KVArrangement`.

`layer_major` is SGLang's arrangement and inherits everything. In the other arrangements, layers are views of
one buffer: where SGLang indexes with slots, these pools index with row numbers (`slot_to_row`), and moves,
sizes and buffer descriptions use the whole buffer instead of a loop over layers.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MLATokenToKVPool
from sglang.srt.utils.async_probe import maybe_detect_oob

from sgl_kvpool.layout import RowFormat
from sgl_kvpool.memory.arrangement import KVArrangement
from sgl_kvpool.refusal import Refusal
from sgl_kvpool.srt.pool.cross_layer_rows import CrossLayerRows

if TYPE_CHECKING:
    from sgl_kvpool.srt.pool.row_pool import RowPool

__all__ = ["ArrangedMLATokenToKVPool", "RowWriteLoc", "RowsToWrite"]


@dataclass
class RowWriteLoc(KVWriteLoc):
    """A `KVWriteLoc` whose `loc` holds row numbers already, for writers that convert slots once per step."""


class ArrangedMLATokenToKVPool(MLATokenToKVPool):
    """Base of `LayoutMLATokenToKVPool`, which sets arrangement and format before `_create_buffers` runs.

    Attributes
    ----------
    kv_cache_arrangement : KVArrangement
    row_format : RowFormat
    cross_layer : CrossLayerRows or None
        The buffer of all layers; None if each layer has its own.
    """

    kv_cache_arrangement: KVArrangement
    row_format: RowFormat
    cross_layer: CrossLayerRows | None = None

    def _create_buffers(self) -> None:
        if self.kv_cache_arrangement.has_contiguous_layers or not self.layer_num:
            super()._create_buffers()  # a pipeline stage may have no layer
            return
        slots = self.size + self.page_size  # padded tokens write to a slot of the first page
        if slots % self.page_size:
            raise Refusal(
                f"a pool of {self.size} tokens is not a multiple of the page size {self.page_size}, which "
                f"{self.kv_cache_arrangement} needs; make --max-total-tokens a multiple of --page-size"
            )
        memory_pool = torch.cuda.use_mem_pool(self.custom_mem_pool) if self.custom_mem_pool else nullcontext()
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE), memory_pool:
            self.cross_layer = CrossLayerRows(
                self.kv_cache_arrangement,
                self.model_layer_ids,
                slots // self.page_size,
                self.page_size,
                self.row_format,
                self.device,
            )
        self.kv_buffer = [
            self.cross_layer.layer(index).view(self.store_dtype).unsqueeze(1)
            for index in range(self.layer_num)
        ]

    def _clear_buffers(self) -> None:
        super()._clear_buffers()
        self.cross_layer = None

    def slot_to_row(self, slots: torch.Tensor) -> torch.Tensor:
        """Row numbers of SGLang's slots, the same in every layer; negative ones stay as they are.

        Returns `slots` itself unless the arrangement is `page_major`. One call per step is enough.
        """
        return slots if self.cross_layer is None else self.cross_layer.placement.slot_to_row(slots)

    @property
    def slot_pages(self) -> tuple[int, int] | None:
        """`RowPlacement.slot_pages`, by which kernels turn slots into rows; None if slots are row numbers."""
        return None if self.cross_layer is None else self.cross_layer.placement.slot_pages

    def get_kv_size_bytes(self) -> int:
        """Bytes of the rows of all layers."""
        if self.cross_layer is None:
            return super().get_kv_size_bytes()
        return self.cross_layer.group.tensor.nbytes

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Address, size and page size in bytes of every buffer: one per layer, or one for all layers."""
        if self.cross_layer is None:
            return super().get_contiguous_buf_infos()
        return self.cross_layer.buffer_infos()

    def get_device_pool_infos(self):
        """SGLang's description of the pool. It has one stride; TypeError unless slots are row numbers."""
        if not self._slots_are_rows:
            raise TypeError(
                f"SGLang's DevicePoolInfo cannot describe a {self.kv_cache_arrangement} pool; use "
                "sgl_kvpool.srt.pool.describe"
            )
        return super().get_device_pool_infos()

    def host_tier_info(self):
        """SGLang's `MLABufferInfo` for any arrangement, for `HierarchicalMLAHostPool`.

        That class reads only sizes and layers from it and takes addresses from `CanonicalKVCaches`, so it may
        use the description that `get_device_pool_infos` refuses to other callers.
        """
        return super().get_device_pool_infos()[0].buffer_info

    @property
    def _slots_are_rows(self) -> bool:
        return self.cross_layer is None or self.cross_layer.placement.slots_are_rows

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy the rows of slots `src_loc` to slots `tgt_loc` in all layers."""
        if self.cross_layer is None:
            super().move_kv_cache(tgt_loc, src_loc)
            return
        for loc, name in ((tgt_loc, "tgt_loc"), (src_loc, "src_loc")):
            maybe_detect_oob(loc, 0, self.size + self.page_size, f"move_kv_cache {name}")
        self.cross_layer.move(tgt_loc, src_loc)

    def get_cpu_copy(self, indices, *args, **kwargs):
        """Copy the rows of some slots to the CPU, in SGLang's form."""
        return super().get_cpu_copy(self._rows_to_copy(indices), *args, **kwargs)

    def load_cpu_copy(self, kv_cache_cpu, indices, *args, **kwargs):
        """Write rows from `get_cpu_copy` to some slots."""
        super().load_cpu_copy(kv_cache_cpu, self._rows_to_copy(indices), *args, **kwargs)

    def _rows_to_copy(self, slots: torch.Tensor) -> torch.Tensor:
        # Torch would count a negative row from the end of the view, into the row of another token or layer.
        # These copies wait for the device anyway, so the check costs no extra synchronization.
        if self.cross_layer is not None and len(slots) and int(slots.min()) < 0:
            raise IndexError(f"slot {int(slots.min())} is not valid; leave out tokens without a slot")
        return self.slot_to_row(slots)


class RowsToWrite:
    """Row numbers at which the tokens of a batch are stored.

    Parameters
    ----------
    pool : RowPool
    """

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
            rows = RowWriteLoc(self.pool.slot_to_row(loc.loc), physical=loc.physical)
            self._slots, self._rows = slots, rows
        return rows


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
