"""Host pages for SGLang's controller: page state and transfers. A base of the host tier's pools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sgl_kvpool import metrics
from sgl_kvpool.memory.canonical import CanonicalGroup, CanonicalKVCaches
from sgl_kvpool.srt.host.lost_pages import LostPages
from sgl_kvpool.srt.host.shared_tier import SharedTier
from sgl_kvpool.srt.host.stored_pages import StoredPagesPool
from sgl_kvpool.transfer.channel import TransferChannel
from sgl_kvpool.transfer.channel_builder import TransferChannels
from sgl_kvpool.transfer.slots import DevicePages, pages_of, slot_list_problem

__all__ = ["MovedPagesPool", "kv_group"]


def kv_group(caches: CanonicalKVCaches) -> CanonicalGroup:
    """The only group of an MLA pool or of a pool of states."""
    (group,) = caches.groups
    return group


class MovedPagesPool(StoredPagesPool):
    """Base of the host tier's pools, which set the attributes below."""

    _device_views: list[CanonicalKVCaches]
    _channels: TransferChannels
    #: Lists of the current transfer, as SGLang passed them and in the channels' form.
    _listed: tuple[Any, ...]
    #: State of a tier that the ranks of a machine share; None for a tier of this rank alone.
    shared: SharedTier | None = None

    def _parts_of(self, layer_id: int, is_draft: bool) -> Sequence[tuple[TransferChannel, int]]:
        """Parts of a layer, as (channel, index in its group); `layer_id` is the controller's number."""
        raise NotImplementedError

    # ---------------------------------------------------------------- page state

    def clear(self) -> None:
        """Free all pages and discard their contents."""
        if self.shared is None:
            self._lost = LostPages.private(self.page_num)
        else:
            self._lost = self.shared.lost
            self._lost.set(slice(None), False)
            self.shared.log.add("clear", np.arange(self.size))
        super().clear()

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Allocate pages and return their slots; None if too few are free or the ranks ended the tier."""
        if self.shared is not None and self.shared.lost.is_closed:
            return None
        slots = super().alloc(need_size)
        if slots is not None:
            self._lost.set(pages_of(slots, self.page_size), False)
            if self.shared is not None:
                self.shared.log.add("alloc", slots.numpy())
        return slots

    def free(self, indices: torch.Tensor) -> int:
        """Free slots; returns their number."""
        if self.shared is not None:
            self.shared.log.add("free", indices.cpu().numpy())
        return super().free(indices)

    def slots_problem(self, host_slots: torch.Tensor, *, allocated_here: bool = True) -> str | None:
        """Reason why these slots cannot be loaded; None if they can.

        Parameters
        ----------
        host_slots : Tensor [tokens], int64
        allocated_here : bool
            False for the tier of a draft, whose slots are its target's slots.

        Returns
        -------
        str or None
            Reason: the slots are not a list of whole pages, a page is free or was lost in its backup, or the
            ranks that share the tier have ended it.
        """
        problem = slot_list_problem(host_slots, self.page_size, self.page_num)
        if problem is not None or not len(host_slots):
            return problem
        if self.shared is not None and self.shared.lost.is_closed:
            return "the ranks have ended the tier; start the server again to use it"
        if allocated_here and not bool(self.slot_used[host_slots].all()):
            return "a host page of the list is not allocated"
        if self._lost.any(pages_of(host_slots, self.page_size)):
            return "a host page of the list was lost in its backup"
        return None

    def device_slots_problem(self, device_slots: torch.Tensor) -> str | None:
        """Reason why these slots of the device pool are not a list of its pages; None if they are.

        Lists on a GPU are not checked, because that would wait for all work of the GPU at every load and
        every backup. Such lists come from SGLang's allocator.
        """
        if device_slots.device.type != "cpu":
            return None
        num_pages = kv_group(self._device_views[0]).num_pages
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
        """Load one layer of host pages into device pages.

        Raises
        ------
        RuntimeError
            If a page was lost in its backup.
        Exception
            If engine and torch failed; see `TransferChannel.run`.
        """
        parts = self._parts_of(layer_id, is_draft)
        if not parts:
            return  # a layer that this pool does not hold
        host_pages, device_pages = self._lists_of(host_indices, device_indices)
        if self._lost.any_flagged(host_pages):
            # Some loads of SGLang bypass the controller's `load`, which treats such pages as a miss.
            raise RuntimeError("cannot load a host page that was lost in its backup")
        for channel, part in parts:
            channel.run(host_pages, device_pages, part)

    def backup_from_device_all_layer(
        self, device_pool, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
    ) -> None:
        """Back up all layers of device pages, drafts included, to host pages.

        A failure is not raised, because SGLang would stop although it can go on. The pages are marked as
        lost: every later load of them is a miss, and stores do not get them.
        """
        host_pages, device_pages = self._lists_of(host_indices, device_indices)
        if self.shared is not None:
            if self.shared.lost.is_closed:
                return
            host_pages, device_pages = self.shared.own_part(host_pages, device_pages)
        try:
            for channel in self._channels.to_host:
                channel.run(device_pages, host_pages)
        except Exception as error:  # whatever the error, these pages are not backed up
            self._lost.set(host_pages, True)
            metrics.failed("backup_lost", f"{len(host_pages)} pages", error=error)
        else:
            self._lost.set(host_pages, False)

    def slots_for_transfer(
        self, host_slots: torch.Tensor, device_slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both lists on the devices that the engines need: the host's list on the CPU, where SGLang has it.

        The device's list stays on the GPU unless an engine needs page indices on the CPU; then this waits for
        the GPU, as SGLang's own `direct` backend does.
        """
        if self._channels.needs_page_indices:
            device_slots = device_slots.cpu()
        return host_slots, device_slots

    def _lists_of(self, host_slots: torch.Tensor, device_slots: torch.Tensor) -> tuple[np.ndarray, Any]:
        """Lists for the channels, the same objects for a whole load: engines recognize a load by them."""
        known_host, known_device, lists = self._listed
        if known_host is not host_slots or known_device is not device_slots:
            host_pages = pages_of(host_slots.cpu(), self.page_size)
            if self._channels.needs_page_indices:
                lists = host_pages, pages_of(device_slots.cpu(), self.page_size)
            else:
                lists = host_pages, DevicePages(device_slots, self.page_size)
            self._listed = (host_slots, device_slots, lists)
        return lists
