"""The host tier of MLA pools: SGLang's `MLATokenToKVPoolHost` with page-major bytes of any layout.

A host page holds all layers, one after the other, so it is one run of bytes on a disk or on a wire: ::

    kv_buffer : [pages, layers, page_size, 1, row]    layers: the target's, then those of packed drafts

SGLang calls this shape `page_first_direct`. Here the memory has it under both labels, `page_first` and
`page_first_direct`: the label stays what the server was asked for, because SGLang's controller, side pools
and stores read it.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from sgl_kvpool import metrics
from sgl_kvpool.canonical import CanonicalGroup, CanonicalKVCaches
from sgl_kvpool.host import memory, page_seal
from sgl_kvpool.host.labels import HOST_LABELS
from sgl_kvpool.host.lane import Lane
from sgl_kvpool.host.page_view import host_view
from sgl_kvpool.host.plan import TransferPlan
from sgl_kvpool.host.slots import pages_of, slot_list_problem
from sgl_kvpool.pool import LayoutMLATokenToKVPool

logger = logging.getLogger(__name__)

__all__ = ["PAGE_FORMAT_VERSION", "HierarchicalMLAHostPool"]

#: Of what `storage_format_tag` names: counted up when stored pages change in another way than rows do.
PAGE_FORMAT_VERSION = 1


class HierarchicalMLAHostPool(MLATokenToKVPoolHost):
    """Host tier of a `LayoutMLATokenToKVPool` and of the drafts that are packed with it.

    Parameters
    ----------
    kv_pool : LayoutMLATokenToKVPool
        Any layout, any arrangement.
    host_to_device_ratio : float
        Tokens of the host tier per token of the device pool, if `host_size` is 0.
    host_size : float
        GB (1e9 bytes) of the host tier; 0 for the ratio.
    page_size : int
        Tokens.
    layout : str
        Label, of `HOST_LABELS`.
    draft_pools : sequence of LayoutMLATokenToKVPool
        One layer each, with the target's rows.
    pin_memory : bool, optional
        Whether to register the memory with CUDA; unless given, where the pool is on a GPU.
    **kwargs
        As SGLang's: `allocator_type`, `pool_label`, `host_token_capacity`.

    Attributes
    ----------
    row_format : RowFormat
        Of a stored row.
    page_bytes : int
        Of a page of all layers.
    storage_format_tag : str
        Names these bytes in the keys of stores, so that a server with others misses.

    Raises
    ------
    TypeError
        A pool of another class.
    ValueError
        A label that is none, drafts with other rows, or not enough memory.
    """

    def __init__(
        self,
        kv_pool: LayoutMLATokenToKVPool,
        host_to_device_ratio: float,
        host_size: float,
        page_size: int,
        layout: str,
        *,
        draft_pools: Sequence[LayoutMLATokenToKVPool] = (),
        pin_memory: bool | None = None,
        **kwargs,
    ) -> None:
        pools = (kv_pool, *draft_pools)
        other = [type(pool).__name__ for pool in pools if not isinstance(pool, LayoutMLATokenToKVPool)]
        if other:
            raise TypeError(f"{type(self).__name__} is for pools with a layout, not {', '.join(other)}")
        if layout not in HOST_LABELS:
            raise ValueError(f"--hicache-mem-layout {layout} is not one of {', '.join(HOST_LABELS)}")
        tags = [pool.row_format.tag for pool in pools]
        if len(set(tags)) > 1 or any(draft.layer_num != 1 for draft in draft_pools):
            raise ValueError(
                f"drafts packed with their target have one layer and the target's rows; got rows {tags} and "
                f"{[draft.layer_num for draft in draft_pools]} layers"
            )
        row_bytes = kv_pool.kv_cache_dim * kv_pool.store_dtype.itemsize
        if row_bytes != kv_pool.row_format.row_bytes:
            raise RuntimeError(
                f"SGLang takes a row for {row_bytes} bytes, it has {kv_pool.row_format.row_bytes}"
            )
        # Before the base class, whose constructor calls the overrides below.
        self.row_format = kv_pool.row_format
        self._device_views = [CanonicalKVCaches.from_pool(pool, page_size) for pool in pools]
        self._key_of = threading.local()
        infos = [pool.host_tier_info() for pool in pools]
        capacity = kv_pool.host_capacity_tokens
        super().__init__(
            infos[0],
            host_to_device_ratio,
            host_size,
            page_size,
            layout,
            pin_memory=kv_pool.device != "cpu" if pin_memory is None else pin_memory,
            override_kv_cache_dim=kv_pool.kv_cache_dim,
            draft_buffer_infos=infos[1:],
            device_capacity_tokens=kv_pool.size if capacity is None else capacity,
            start_layer=kv_pool.start_layer,
            end_layer=kv_pool.end_layer,
            target_layer_num=kv_pool.layer_num,
            **kwargs,
        )
        self.storage_format_tag = (
            f"{self.row_format.tag}-host_{self.row_format.layout}-l{self.start_layer}"
            f".{self.target_layer_num}.{len(draft_pools)}"
            f"-t{self.page_size}-s{PAGE_FORMAT_VERSION}{_scales_tag(kv_pool)}"
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of all layers."""
        return self.page_size * self.layer_num * self.row_format.row_bytes

    # ---------------------------------------------------------------- construction

    def _allocate_host_buffer(self) -> None:
        try:
            super()._allocate_host_buffer()
        except (ValueError, MemoryError, OSError, RuntimeError) as error:
            raise memory.too_much(self.size * self.size_per_token, self.size, error) from error

    pin_memory: bool

    def init_kv_buffer(self) -> torch.Tensor:
        """Memory of the tier, in page-major order; pinned if it was asked for and can be."""
        shape = (self.page_num, self.layer_num, self.page_size, 1, self.kv_cache_dim)
        buffer = self.allocator.allocate(shape, dtype=self.dtype, device=self.device)
        self.token_stride_size = self.kv_cache_dim * self.dtype.itemsize
        self.layout_dim = self.token_stride_size * self.layer_num
        if self.pin_memory:
            self.pin_memory = memory.pin(buffer, self.page_bytes)
        return buffer

    def _initialize_transfer_views(self) -> None:
        self.can_use_jit = False
        self.data_refs = list(self.kv_buffer.unbind(1))
        self.data_ptrs = None  # no kernel of SGLang's moves these rows
        self._init_write_back_staging_buffers()
        self._pages = self.kv_buffer.view(self.page_num, -1).view(torch.uint8)  # [pages, page_bytes]
        # The drafts' layers follow the target's, as SGLang numbers the layers of a host tier.
        firsts = range(self.target_layer_num, self.layer_num)
        places = [range(self.target_layer_num), *(range(first, first + 1) for first in firsts)]
        self._to_host, self._to_device = [], []
        for device, layers in zip(self._device_views, places, strict=True):
            group = _kv_group(device)
            host = host_view(self._pages, group, layers, self.page_size, self.row_format.row_bytes)
            self._to_host.append(Lane(TransferPlan(device, host, group.name), "to_host"))
            self._to_device.append(Lane(TransferPlan(host, device, group.name), "to_device"))
        plan = self._to_host[0].plan
        runs = {run.run_bytes for run in plan.copy_runs}
        logger.info(
            "sgl-kvpool: host tier of %d pages of %d tokens (%d bytes, all %d layers), %s, rows %s, "
            "engine %s, runs of %s bytes%s",
            self.page_num,
            self.page_size,
            self.page_bytes,
            self.layer_num,
            self.layout,
            self.row_format.tag,
            self._to_host[0].engine.name,
            " and ".join(map(str, sorted(runs))) or "no",
            ", pinned" if self.pin_memory else "",
        )

    def _init_write_back_staging_buffers(self) -> None:
        self.staging_page_capacity = 0
        self.staging_token_capacity = 0
        self.staging_buffer = None
        self.can_use_write_back_jit = False

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Address, size and page size in bytes of the one buffer."""
        return [self.kv_buffer.data_ptr()], [self.kv_buffer.nbytes], [self.page_bytes]

    def get_size_per_token(self) -> int:
        """Bytes of a token in all layers."""
        return self.layer_num * self.row_format.row_bytes

    # ---------------------------------------------------------------- page state

    def clear(self) -> None:
        """Forget all pages."""
        #: Pages whose backup failed: SGLang takes them for backed up, and they must not be read.
        self._lost: np.ndarray = np.zeros(self.page_num, dtype=bool)
        super().clear()

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Slots of free pages, or None if there are not as many."""
        slots = super().alloc(need_size)
        if slots is not None:
            self._lost[pages_of(slots, self.page_size)] = False
        return slots

    def slots_problem(self, host_slots: torch.Tensor) -> str | None:
        """Why these slots cannot be loaded: no list of pages, free ones, lost ones; None if they can."""
        problem = slot_list_problem(host_slots, self.page_size, self.page_num)
        if problem is not None or not len(host_slots):
            return problem
        if not bool(self.slot_used[host_slots].all()):
            return "a host page of the list is not allocated"
        if self._lost[pages_of(host_slots, self.page_size)].any():
            return "a host page of the list was lost in its backup"
        return None

    def device_slots_problem(self, device_slots: torch.Tensor) -> str | None:
        """Why these slots of the device pool are no list of its pages; None if they are."""
        num_pages = _kv_group(self._device_views[0]).num_pages
        return slot_list_problem(device_slots, self.page_size, num_pages, first_page=1)

    # ---------------------------------------------------------------- transfers

    def load_to_device_per_layer(
        self,
        device_pool,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        layer_id: int,
        io_backend: str,
        *,
        is_draft: bool = False,
    ) -> None:
        """Host pages of one layer to device pages; the lists were checked when they were queued."""
        host_layer = self._host_layer_by_controller.get(layer_id)
        if host_layer is None:
            return
        host_pages, device_pages = self._pages_of(host_indices, device_indices)
        draft = host_layer - self.target_layer_num + 1  # place of the layer's pool behind the target's
        lane, part = (self._to_device[draft], 0) if draft > 0 else (self._to_device[0], host_layer)
        lane.run(host_pages, device_pages, part)

    def backup_from_device_all_layer(
        self, device_pool, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
    ) -> None:
        """Device pages of all layers, drafts included, to host pages.

        A failure is not raised: SGLang would stop, and it need not. The pages are marked lost, every later
        load of them is a miss, and no store gets them.
        """
        host_pages, device_pages = self._pages_of(host_indices, device_indices)
        try:
            for lane in self._to_host:
                lane.run(device_pages, host_pages)
        except Exception as error:  # whatever it is, these pages are not backed up
            self._lost[host_pages] = True
            metrics.failed("backup_lost", f"{len(host_pages)} pages", error=error)

    def _pages_of(self, *slots: torch.Tensor) -> tuple[np.ndarray, ...]:
        return tuple(pages_of(each, self.page_size) for each in slots)

    # ---------------------------------------------------------------- stores

    @contextmanager
    def stored_under(self, keys: Mapping[int, str]) -> Iterator[None]:
        """Tell this thread's stores of pages under which keys (by a page's first slot) they happen."""
        self._key_of.keys = keys
        try:
            yield
        finally:
            self._key_of.keys = {}

    def _key(self, index: int) -> str:
        return getattr(self._key_of, "keys", {}).get(index, "")

    def _page_to_store(self, index) -> tuple[int, torch.Tensor]:
        """First slot and bytes of the page that begins at a slot."""
        slot = int(index)
        page = slot // self.page_size
        if slot % self.page_size or not 0 <= page < self.page_num:
            raise IndexError(
                f"no page of {self.page_size} tokens begins at slot {slot}; the host tier has "
                f"{self.page_num} pages"
            )
        return slot, self._pages[page]

    def get_data_page(self, index, flat: bool = True) -> torch.Tensor:
        """A page for a store.

        Parameters
        ----------
        index : int
            First slot of the page.
        flat : bool
            A copy with its digest, `[(page_bytes + 16) / itemsize]`; else a view `[1, layers, page_size, 1,
            row]`, which stores that copy into and out of the tier's own memory use.

        Raises
        ------
        IndexError
            No page begins there.
        ValueError
            The page was lost in its backup.
        """
        slot, page = self._page_to_store(index)
        if self._lost[slot // self.page_size]:
            raise ValueError(f"the page of slot {slot} was lost in its backup, and is not stored")
        if not flat:
            return self.kv_buffer[slot // self.page_size].unsqueeze(0)
        sealed = page_seal.sealed(page.numpy(), self.storage_format_tag, self._key(slot))
        return torch.from_numpy(sealed).view(self.dtype)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """Memory that takes what `get_data_page` gave a store."""
        return torch.zeros(self.page_bytes + page_seal.SEAL_BYTES, dtype=torch.uint8).view(self.dtype)

    def set_from_flat_data_page(self, index, data_page: torch.Tensor) -> None:
        """Take a page back from a store, or nothing of it.

        Raises
        ------
        DamagedPage
            It is not what was stored, there and under this key.
        IndexError
            No page begins at `index`.
        """
        slot, page = self._page_to_store(index)
        stored = data_page.contiguous().view(-1).view(torch.uint8).numpy()
        try:
            opened = page_seal.opened(stored, self.page_bytes, self.storage_format_tag, self._key(slot))
        except page_seal.DamagedPage as error:
            error.slot = slot
            raise
        page.copy_(torch.from_numpy(opened))

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Addresses and sizes in bytes of pages, one each, for stores that copy from and to them directly."""
        # SGLang looks at the first slot of each page only, and so do its callers: others may be anything.
        firsts = indices.numpy()[:: self.page_size]
        pages = firsts // self.page_size
        wrong = (firsts % self.page_size != 0) | (pages < 0) | (pages >= self.page_num)
        if len(indices) % self.page_size or wrong.any():
            raise ValueError(
                f"{len(indices)} slots, of pages that begin at {firsts.tolist()}, are no pages of "
                f"{self.page_size} tokens; the host tier has {self.page_num}"
            )
        if self._lost[pages].any():
            raise ValueError("a page of the list was lost in its backup, and is not stored")
        addresses = self.kv_buffer.data_ptr() + pages * self.page_bytes
        return addresses.tolist(), [self.page_bytes] * len(pages)


def _scales_tag(pool: LayoutMLATokenToKVPool) -> str:
    """What tells stored values apart that were divided by other k_scales; empty if all are 1."""
    scales = [pool.k_scale(layer) for layer in range(pool.start_layer, pool.start_layer + pool.layer_num)]
    if all(scale == 1.0 for scale in scales):
        return ""
    return "-k" + hashlib.blake2b(repr(scales).encode(), digest_size=4).hexdigest()


def _kv_group(caches: CanonicalKVCaches) -> CanonicalGroup:
    """The one group of a dense MLA pool."""
    (group,) = caches.groups
    return group
