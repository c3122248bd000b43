"""The host tier of states beside that of rows: SGLang's `MambaPoolHost` with whole state slots as pages.

A host slot keeps the conv and ssm states of all layers of one state slot in one run of bytes, in the order
of `state_view.py`, which is also that of SGLang's stores, then padding and a checksum (`page_format.py`).
Transfers, retries and lost slots are as for rows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.pool_host.base import synchronized
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

from sgl_kvpool.refusal import Refusal
from sgl_kvpool.srt.host import memory
from sgl_kvpool.srt.host.gpu_calls import gpu_calls
from sgl_kvpool.srt.host.moved_pages import MovedPagesPool
from sgl_kvpool.srt.host.page_format import CHECKSUM_BYTES, HostPageFormat
from sgl_kvpool.srt.host.state_view import StateView
from sgl_kvpool.transfer.channel import TransferChannel
from sgl_kvpool.transfer.channel_builder import EngineRequest, channels_of
from sgl_kvpool.transfer.host_options import HOST_LABELS, HostTierOptions
from sgl_kvpool.transfer.page_buffer import staged_state_bytes
from sgl_kvpool.transfer.page_view import packed_view
from sgl_kvpool.transfer.plan import TransferPlan

logger = logging.getLogger(__name__)

__all__ = ["HierarchicalStatePoolHost"]


class HierarchicalStatePoolHost(MovedPagesPool, MambaPoolHost):
    """Host tier of the states of a `MambaPool` and of drafts that are packed with it.

    Parameters
    ----------
    mamba_pool : MambaPool
        On any device.
    host_to_device_ratio : float
        Host slots per slot of the pool, if `host_size` is 0.
    host_size : float
        GB (1e9 bytes); 0 for the ratio.
    layout : str
        Label, of `HOST_LABELS`.
    draft_pools : sequence of MambaPool
        One layer each, with the target's states.
    options : HostTierOptions, optional
        Of the rows; their layout is none of states.
    pin_memory : bool, optional
        Whether to register the memory with CUDA; unless given, where the pool is on a GPU.
    io_backend : str
        Of --hicache-io-backend.
    allocator_type : str
        As SGLang's.

    Attributes
    ----------
    page_bytes : int
        Of the states of a slot.
    size_per_token : int
        The same with padding and checksum: SGLang's name for what a slot takes.
    storage_format_tag : str
        Names these bytes; the controller puts it into the keys of stores with the rows' tag.

    Raises
    ------
    TypeError
        A pool of another class.
    ValueError
        A label that is none, or parts that are not carried.
    HostTierTooLarge
        Not enough memory.
    Exception
        An engine that was requested by name cannot be built.
    """

    def __init__(
        self,
        mamba_pool: Any,
        host_to_device_ratio: float,
        host_size: float,
        layout: str,
        *,
        draft_pools: Sequence[Any] = (),
        options: HostTierOptions | None = None,
        pin_memory: bool | None = None,
        io_backend: str = "kernel",
        allocator_type: str = "default",
    ) -> None:
        if layout not in HOST_LABELS:
            raise Refusal(f"--hicache-mem-layout {layout} is not one of {', '.join(HOST_LABELS)}")
        pools = (mamba_pool, *draft_pools)
        self._view = StateView.of(pools)
        self._device_views = [self._view.caches]
        self.storage_format_tag = self._view.tag
        self.page_format = HostPageFormat.of_states(self._view.group.bytes_per_page)
        infos = [pool.get_device_pool_infos()[0].buffer_info for pool in pools]
        device = infos[0].temporal.device
        capacity = mamba_pool.host_capacity_tokens
        try:
            super().__init__(
                infos[0],
                host_to_device_ratio,
                host_size,
                device_capacity=mamba_pool.size if capacity is None else capacity,
                pin_memory=device.type != "cpu" if pin_memory is None else pin_memory,
                allocator_type=allocator_type,
                layout=layout,
                mtp_draft_buffer_infos=infos[1:],
            )
        except (ValueError, MemoryError, OSError, RuntimeError) as error:
            # Nothing else is left that could fail: pools and label were looked at.
            size_bytes = getattr(self, "size", 0) * self.page_format.size_bytes
            raise memory.too_much(
                size_bytes, getattr(self, "size", 0), not host_size, error, unit="states"
            ) from error
        self._make_channels(options or HostTierOptions(), io_backend)

    # ---------------------------------------------------------------- construction

    def get_size_per_token(self) -> int:
        """Bytes of a host slot."""
        return self.page_format.size_bytes

    @property
    def stored_dtype(self) -> torch.dtype:
        """SGLang's stores get states as bytes."""
        return torch.uint8

    def init_kv_buffer(self) -> list[torch.Tensor]:
        """Memory of the tier; SGLang wants the buffers of all components in a list, and here they are one."""
        fmt = self.page_format
        self._buffer = self.allocator.allocate(
            (self.size, fmt.size_bytes), dtype=torch.uint8, device=self.device
        )
        # Stores get the padding too, and it must not be what the memory held before.
        self._buffer[:, fmt.content_bytes : fmt.size_bytes - CHECKSUM_BYTES].zero_()
        self._chunks = memory.pin(self._buffer, fmt.size_bytes) if self.pin_memory else None
        self.pin_memory: bool = self._chunks is not None
        self._pages = self._buffer  # [slots, size_bytes] uint8
        # As bytes: SGLang's stores ask how many there are.
        views = [self._buffer[:, begin : begin + size] for begin, size in self._view.components]
        has_ssm = self.temporal_state_elem_size > 0
        self.temporal_buffer = views.pop(0) if has_ssm else self._buffer[:, :0]
        self.conv_buffer = views
        return [self._buffer]

    def _configure_npu_mamba_io(self) -> None:
        """Not for this memory."""

    def _init_write_back_staging_buffers(self) -> None:
        self.can_use_write_back_jit = False

    def _make_channels(self, options: HostTierOptions, io_backend: str) -> None:
        group = self._view.group
        host = packed_view(self._pages, group)
        plans = [
            (
                TransferPlan(self._view.caches, host, group.name),
                TransferPlan(host, self._view.caches, group.name),
            )
        ]
        self._channels = channels_of(
            plans,
            self._buffer,
            staged_state_bytes(group.bytes_per_page, self._view.largest_part_bytes),
            EngineRequest(options.engine, io_backend, self._chunks, gpu_calls),
        )
        self._listed: tuple[Any, ...] = (None, None, None)
        logger.info(
            "sgl-kvpool: host tier of %d state slots (%d bytes, all %d linear layers), %s, engine %s, "
            "parts of %s bytes%s",
            self.size,
            self.page_bytes,
            self.num_mamba_layers,
            self.layout,
            self._channels.engines,
            " and ".join(str(n) for n in sorted({layer.runs.size_bytes for layer in group.layers})) or "no",
            ", pinned" if self.pin_memory else "",
        )

    # ---------------------------------------------------------------- slots

    def clear(self) -> None:
        """Forget all states."""
        self.slot_used = torch.zeros(self.size, dtype=torch.bool)
        super().clear()

    @synchronized
    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Free slots, or None if there are not as many."""
        slots = super().alloc(need_size)
        if slots is not None:
            self.slot_used[slots] = True
        return slots

    @synchronized
    def free(self, indices: torch.Tensor) -> int:
        """Give slots back; how many that were not free are now.

        SGLang's does not look at them: a slot given back twice would get two owners. Nobody in SGLang decides
        by the number; `release_transfers` adds it up as what was released.
        """
        slots = indices.cpu()
        owned = torch.unique(slots[self.slot_used[slots]])
        if len(owned) != len(slots):
            logger.warning(
                "sgl-kvpool: state slots %s of the host are free already", sorted(set(slots.tolist()))
            )
        self.slot_used[owned] = False
        return super().free(owned)

    # ---------------------------------------------------------------- transfers

    def _parts_of(self, layer_id: int, is_draft: bool) -> list[tuple[TransferChannel, int]]:
        (channel,) = self._channels.to_device
        parts = self._view.parts_by_layer
        return [(channel, part) for part in parts[layer_id]] if layer_id < len(parts) else []

    # ---------------------------------------------------------------- what stores see

    def _page_view(self, page: int) -> torch.Tensor:
        return self._pages[page, : self.page_format.content_bytes]

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        """The buffer that stores register which copy from and to it."""
        return [self._buffer]

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Addresses and sizes in bytes: of each slot the ssm states, if any, then each convolution's.

        The last one reaches to the end of the slot: padding and checksum go where it goes.

        Raises
        ------
        IndexError
            No such slot.
        """
        slot_bytes = self.page_format.size_bytes
        begins = self._buffer.data_ptr() + self.first_pages_of(indices) * slot_bytes
        offsets, _ = np.array(self._view.components, dtype=np.int64).reshape(-1, 2).T
        sizes = np.diff(offsets, append=slot_bytes)
        return (begins[:, None] + offsets).ravel().tolist(), np.tile(sizes, len(begins)).tolist()

    def is_stride_page_aligned(self, page_size_bytes: int = 4096) -> bool:
        """Whether every address and size of `get_page_buffer_meta` is a multiple."""
        numbers = [self._buffer.data_ptr(), self.page_format.size_bytes, *sum(self._view.components, ())]
        return not any(number % page_size_bytes for number in numbers)
