"""Host pages for SGLang's controller: page state and transfers. A base of the host tier's pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from sgl_kvpool import metrics
from sgl_kvpool.memory.canonical import CanonicalGroup, CanonicalKVCaches
from sgl_kvpool.srt import overrides
from sgl_kvpool.srt.host.shared_tier import LostPages, SharedTier
from sgl_kvpool.srt.host.storage_mixin import StorageMixin
from sgl_kvpool.transfer.channel import TransferChannel, TransferChannels
from sgl_kvpool.transfer.slots import DevicePages, Pages, Transfer, pages_of, slot_list_problem


def kv_group(caches: CanonicalKVCaches) -> CanonicalGroup:
    """The only group of an MLA pool or of a pool of states."""
    (group,) = caches.groups
    return group


class TransferMixin(StorageMixin):
    """Base of the host tier's pools, which set the attributes below."""

    _device_views: list[CanonicalKVCaches]
    _channels: TransferChannels
    #: The latest load, and what it was called with.
    _load: _Load | None = None
    #: State of a tier that the ranks of a machine share; None for a tier of this rank alone.
    shared: SharedTier | None = None

    def _parts_of(self, layer_id: int, is_draft: bool) -> Sequence[tuple[TransferChannel, int]]:
        """Parts of a layer, as (channel, index in its group); `layer_id` is the controller's number."""
        raise NotImplementedError

    @overrides
    def clear(self) -> None:
        if self.shared is None:
            self._lost = LostPages.private(self.page_num)
        else:
            self._lost = self.shared.lost
            self._lost.set(slice(None), False)
            self.shared.log.add("clear", np.arange(self.size))
        super().clear()

    @overrides
    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Allocate pages and return their slots; None if too few are free or the ranks ended the tier."""
        if self.shared is not None and self.shared.lost.is_closed:
            return None
        slots = super().alloc(need_size)
        if slots is not None:
            self._lost.set(pages_of(slots, self.logical_page_size), False)
            if self.shared is not None:
                self.shared.log.add("alloc", slots.numpy())
        return slots

    @overrides
    def free(self, indices: torch.Tensor) -> int:
        if self.shared is not None:
            self.shared.log.add("free", indices.cpu().numpy())
        return super().free(indices)

    def host_indices_problem(self, host_indices: torch.Tensor, *, allocated_here: bool = True) -> str | None:
        """Reason why these slots cannot be loaded; None if they can.

        They are not a list of whole pages, a page is free or was lost in its backup, or the ranks that share
        the tier have ended it. A draft's tier has the target's slots, which were not `allocated_here`.
        """
        problem = slot_list_problem(host_indices, self.logical_page_size, self.page_num)
        if problem is not None or not len(host_indices):
            return problem
        if self.shared is not None and self.shared.lost.is_closed:
            return "the ranks have ended the tier; start the server again to use it"
        if allocated_here and not bool(self.slot_used[host_indices].all()):
            return "a host page of the list is not allocated"
        if self._lost.any(pages_of(host_indices, self.logical_page_size)):
            return "a host page of the list was lost in its backup"
        return None

    def device_indices_problem(self, device_indices: torch.Tensor) -> str | None:
        """Reason why these slots of the device pool are not a list of its pages; None if they are.

        Lists on a GPU are not checked, because that would wait for all work of the GPU at every load and
        every backup. Such lists come from SGLang's allocator.
        """
        if device_indices.device.type != "cpu":
            return None
        num_pages = kv_group(self._device_views[0]).num_pages
        return slot_list_problem(device_indices, self.logical_page_size, num_pages, first_page=1)

    @overrides
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
        """Load one layer of host pages into device pages; RuntimeError if a page was lost in its backup.

        Other errors: engine and torch failed; see `TransferChannel.run`.
        """
        parts = self._parts_of(layer_id, is_draft)
        if not parts:
            return  # a layer that this pool does not hold
        load = self._load
        if load is None or not load.continues(host_indices, device_indices, (layer_id, is_draft)):
            transfer = Transfer(*self._pages_of(host_indices, device_indices), to_host=False)
            load = self._load = _Load(host_indices, device_indices, transfer)
        load.called.add((layer_id, is_draft))
        if self._lost.any_flagged(load.transfer.host_pages):
            # Some loads of SGLang bypass the controller's `load`, which treats such pages as a miss.
            raise RuntimeError("cannot load a host page that was lost in its backup")
        for channel, part in parts:
            channel.run(load.transfer, part)

    @overrides
    def backup_from_device_all_layer(
        self, device_pool, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
    ) -> None:
        """Back up all layers of device pages, drafts included, to host pages.

        A failure is not raised, because SGLang would stop although it can go on. The pages are marked as
        lost: every later load of them is a miss, and stores do not get them.
        """
        host_pages, device_pages = self._pages_of(host_indices, device_indices)
        if self.shared is not None:
            if self.shared.lost.is_closed:
                return
            host_pages, device_pages = self.shared.own_part(host_pages, device_pages)
        try:
            for channel in self._channels.to_host:
                channel.run(Transfer(host_pages, device_pages, to_host=True))
        except Exception as error:  # whatever the error, these pages are not backed up
            self._lost.set(host_pages, True)
            metrics.failed("backup_lost", f"{len(host_pages)} pages", error=error)
        else:
            self._lost.set(host_pages, False)

    def indices_for_transfer(
        self, host_indices: torch.Tensor, device_indices: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both lists on the devices that the engines need: the host's list on the CPU, where SGLang has it.

        The device's list stays on the GPU unless an engine needs page indices on the CPU; then this waits for
        the GPU, as SGLang's own `direct` backend does.
        """
        if self._channels.needs_page_indices:
            device_indices = device_indices.cpu()
        return host_indices, device_indices

    def _pages_of(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> tuple[np.ndarray, Pages]:
        host_pages = pages_of(host_indices.cpu(), self.logical_page_size)
        if self._channels.needs_page_indices:
            return host_pages, pages_of(device_indices.cpu(), self.logical_page_size)
        return host_pages, DevicePages(device_indices, self.logical_page_size)


@dataclass(frozen=True)
class _Load:
    """A load, for which SGLang calls the tier once per layer with the same two tensors."""

    host_indices: torch.Tensor
    device_indices: torch.Tensor
    transfer: Transfer
    called: set[tuple[int, bool]] = field(default_factory=set)  # layer id, and whether it is a draft's

    def continues(
        self, host_indices: torch.Tensor, device_indices: torch.Tensor, layer: tuple[int, bool]
    ) -> bool:
        """Whether a call is for another layer of this load, which only the two tensors tell."""
        same = host_indices is self.host_indices and device_indices is self.device_indices
        return same and layer not in self.called
