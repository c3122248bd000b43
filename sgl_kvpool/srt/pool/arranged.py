"""Where an MLA pool's layers lie: SGLang's `MLATokenToKVPool` with a `KVArrangement`.

`layer_major` is SGLang's own: everything is inherited. In the others the layers are views of one buffer;
what SGLang does with slots is then done with row numbers (`slot_to_row`), and what it does layer by layer is
done with the buffer.
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
    """A `KVWriteLoc` whose `loc` has been through `slot_to_row`, for writers that do so once per step."""


class ArrangedMLATokenToKVPool(MLATokenToKVPool):
    """Base of `LayoutMLATokenToKVPool`, which sets these before SGLang's constructor runs.

    Attributes
    ----------
    kv_cache_arrangement : KVArrangement
    row_format : RowFormat
    cross_layer : CrossLayerRows or None
        The buffer of all layers; None if each has its own.
    """

    kv_cache_arrangement: KVArrangement
    row_format: RowFormat
    cross_layer: CrossLayerRows | None = None

    def _create_buffers(self) -> None:
        if self.kv_cache_arrangement.is_layer_packed or not self.layer_num:
            super()._create_buffers()  # a pipeline stage may have no layer
            return
        slots = self.size + self.page_size  # the first page holds the slot that padded tokens write to
        if slots % self.page_size:
            raise Refusal(
                f"a pool of {self.size} tokens is no whole number of pages of {self.page_size}, which "
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

        `slots` itself unless the arrangement is `page_major`. Once per step is enough.
        """
        return slots if self.cross_layer is None else self.cross_layer.placement.slot_to_row(slots)

    @property
    def slot_pages(self) -> tuple[int, int] | None:
        """How slots become row numbers, for kernels: `RowPlacement.slot_pages`; None where they are."""
        return None if self.cross_layer is None else self.cross_layer.placement.slot_pages

    def get_kv_size_bytes(self) -> int:
        """Bytes of all layers."""
        if self.cross_layer is None:
            return super().get_kv_size_bytes()
        return self.cross_layer.group.tensor.nbytes

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Address, size and page size in bytes of every buffer: one per layer, or one for all layers."""
        if self.cross_layer is None:
            return super().get_contiguous_buf_infos()
        return self.cross_layer.buffer_infos()

    def get_device_pool_infos(self):
        """As SGLang's; its description of rows has no place for the two steps to a page-major row."""
        if not self._slots_are_rows:
            raise TypeError(
                f"SGLang's DevicePoolInfo cannot describe a {self.kv_cache_arrangement} pool; use "
                "sgl_kvpool.srt.pool.describe"
            )
        return super().get_device_pool_infos()

    def host_tier_info(self):
        """SGLang's `MLABufferInfo` of any arrangement, for `HierarchicalMLAHostPool`.

        That reads sizes and layers in it and takes addresses from `CanonicalKVCaches`, so it may be given
        what `get_device_pool_infos` refuses to others.
        """
        return super().get_device_pool_infos()[0].buffer_info

    @property
    def _slots_are_rows(self) -> bool:
        return self.cross_layer is None or self.cross_layer.placement.slots_are_rows

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy the rows of slots `src_loc` to slots `tgt_loc`, in all layers."""
        if self.cross_layer is None:
            super().move_kv_cache(tgt_loc, src_loc)
            return
        for loc, name in ((tgt_loc, "tgt_loc"), (src_loc, "src_loc")):
            maybe_detect_oob(loc, 0, self.size + self.page_size, f"move_kv_cache {name}")
        self.cross_layer.move(tgt_loc, src_loc)

    def get_cpu_copy(self, indices, *args, **kwargs):
        """Rows of some slots on the CPU, as SGLang's."""
        return super().get_cpu_copy(self._rows_to_copy(indices), *args, **kwargs)

    def load_cpu_copy(self, kv_cache_cpu, indices, *args, **kwargs):
        """Put rows that `get_cpu_copy` took into slots."""
        super().load_cpu_copy(kv_cache_cpu, self._rows_to_copy(indices), *args, **kwargs)

    def _rows_to_copy(self, slots: torch.Tensor) -> torch.Tensor:
        # Torch would count a negative row from the end of the view, where other layers' rows are. These
        # copies wait for the device anyway.
        if self.cross_layer is not None and len(slots) and int(slots.min()) < 0:
            raise IndexError(f"slot {int(slots.min())} is none; leave out tokens without a slot")
        return self.slot_to_row(slots)


class RowsToWrite:
    """Where the tokens of a batch are stored, as row numbers of a pool.

    Parameters
    ----------
    pool : RowPool
    """

    def __init__(self, pool: RowPool):
        self.pool = pool
        self._slots: torch.Tensor | None = None
        self._rows: RowWriteLoc | None = None

    def forget(self) -> None:
        """To be called at every step, and inside a CUDA graph too: SGLang fills the same tensor anew, and
        what a graph is to work out again must be part of it."""
        self._slots = self._rows = None

    def of(self, forward_batch) -> RowWriteLoc:
        """Rows of a batch's tokens; worked out anew if SGLang has another `out_cache_loc` by now.

        Between graphs of prefill every layer has a new view of the same slots; the memory is what counts, and
        it is kept, so that no other tensor can be there.
        """
        slots, rows = forward_batch.out_cache_loc, self._rows
        if rows is None or self._slots is None or not _same_memory(self._slots, slots):
            loc = KVWriteLoc.for_batch(forward_batch)
            rows = RowWriteLoc(self.pool.slot_to_row(loc.loc), physical=loc.physical)
            self._slots, self._rows = slots, rows
        return rows


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
