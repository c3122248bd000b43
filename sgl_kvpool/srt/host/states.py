"""The host tier of states beside the tier of rows: SGLang's `MambaPoolHost` with whole state slots as pages.

A host slot holds the conv and ssm states of all layers of one state slot as contiguous bytes, followed by
padding and a checksum (`page_format.py`). The order is that of SGLang's stores, which store a slot part by
part; in each part, layers of packed drafts follow the target's: ::

    [ssm of layer 0, 1, ... | conv_0 of layer 0, 1, ... | conv_1 ...]

Transfers, retries and lost slots work as for rows.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.pool_host.base import synchronized
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

from sgl_kvpool.memory.canonical import CanonicalGroup, CanonicalKVCaches, LayerReference
from sgl_kvpool.refusal import Refusal
from sgl_kvpool.srt import overrides
from sgl_kvpool.srt.host import memory
from sgl_kvpool.srt.host.page_format import DIRECT_IO_BYTES, HostPageFormat
from sgl_kvpool.srt.host.transfer_mixin import TransferMixin
from sgl_kvpool.srt.pool.regions import canonical_view
from sgl_kvpool.transfer.channel import EngineRequest, TransferChannel, channels_of
from sgl_kvpool.transfer.gpu_engine import gpu_calls, staged_state_bytes
from sgl_kvpool.transfer.host_options import HOST_LABELS, HostTierOptions
from sgl_kvpool.transfer.plan import TransferPlan
from sgl_kvpool.transfer.slots import packed_view

logger = logging.getLogger(__name__)

#: Version in `StateView.tag`: increased when stored states change in a way that their parts do not show.
STATE_FORMAT_VERSION = 3
_SSM = "ssm"


def _order(part: str) -> int:
    """Sort key of a part in a slot: ssm, conv_0, conv_1, ..."""
    return 0 if part == _SSM else 1 + int(part.removeprefix("conv_"))


@dataclass(frozen=True)
class StateView:
    """The states of a pool and of the drafts that are packed with it, a page of bytes per state slot.

    `caches` has one group, "state", with its parts in the host's order.
    """

    caches: CanonicalKVCaches

    @classmethod
    def of(cls, pools: Sequence[Any]) -> StateView:
        """View of a target's `MambaPool` and of those of its drafts; TypeError for another kind of pool.

        ValueError if a pool keeps states outside of its layers, or a draft's pool has fewer slots than the
        target's.
        """
        tensors: list = []
        layers: list[LayerReference] = []
        counts = []
        for place, pool in enumerate(pools):
            view = canonical_view(pool)
            group = view.group("state")
            if extra := sorted({layer.part for layer in group.layers if layer.layer_id is None}):
                raise Refusal(
                    f"{type(pool).__name__} keeps {', '.join(extra)} beside the states of its layers, which "
                    "the host tier does not carry; leave out --enable-hierarchical-cache or --kv-cache-layout"
                )
            for layer in group.layers:
                runs = replace(layer.runs, tensor_index=layer.runs.tensor_index + len(tensors))
                name = layer.layer_id if place == 0 else f"draft {place} layer {layer.layer_id}"
                layers.append(replace(layer, layer_id=name, runs=runs))
            tensors += view.tensors
            counts.append(group.num_pages)
        if min(counts) < counts[0]:
            raise ValueError(f"a draft's pool has {min(counts)} state slots, its target's {counts[0]}")
        layers.sort(key=lambda layer: _order(layer.part))  # stable: layers keep their order
        group = CanonicalGroup(name="state", layers=tuple(layers), num_pages=counts[0], page_size_tokens=None)
        return cls(CanonicalKVCaches(tuple(tensors), (group,)))

    @property
    def group(self) -> CanonicalGroup:
        return self.caches.group("state")

    @cached_property
    def parts_by_layer(self) -> list[tuple[int, ...]]:
        """Indices of each layer's parts in the group; the target's layers come first."""
        places: dict = {}
        for place, layer in enumerate(self.group.layers):
            places.setdefault(layer.layer_id, []).append(place)
        return [tuple(found) for found in places.values()]

    @cached_property
    def components(self) -> tuple[tuple[int, int], ...]:
        """Offset and size in bytes of each part of all layers in a slot: SGLang's components, in order."""
        sizes: dict[str, int] = {}
        for layer in self.group.layers:
            sizes[layer.part] = sizes.get(layer.part, 0) + layer.runs.size_bytes
        offsets = accumulate(sizes.values(), initial=0)
        return tuple(zip(offsets, sizes.values(), strict=False))

    @property
    def largest_part_bytes(self) -> int:
        """Bytes of the largest state of one layer."""
        return max((layer.runs.size_bytes for layer in self.group.layers), default=0)

    @cached_property
    def tag(self) -> str:
        """Tag of the bytes of a slot, equal only for interchangeable slots."""
        layers = [(str(r.layer_id), r.part, r.content, r.runs.size_bytes) for r in self.group.layers]
        digest = hashlib.blake2b(repr((STATE_FORMAT_VERSION, layers)).encode(), digest_size=8)
        return f"m{digest.hexdigest()}"


class HierarchicalStatePoolHost(TransferMixin, MambaPoolHost):
    """Host tier of the states of a `MambaPool` and of the drafts that are packed with it.

    `host_to_device_ratio`: host slots per slot of the pool, if `host_size`, in GB (1e9 bytes), is 0. Of
    `options`, those of the host tier of rows, the layout does not apply. Drafts have one layer each, whose
    states have the target's geometry. `page_bytes` are those of the states of a slot; `size_per_token`,
    SGLang's name, includes padding and checksum. The controller adds `storage_format_tag` with the rows' tag
    to the keys of stores.

    Errors as `StateView.of`; HostTierTooLarge if there is not enough memory; any error of an engine that was
    requested by name and cannot be built.
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
        allocator_type: str = "default",
    ) -> None:
        assert layout in HOST_LABELS, layout
        pools = (mamba_pool, *draft_pools)
        self._view = StateView.of(pools)
        self._device_views = [self._view.caches]
        self.storage_format_tag = self._view.tag
        self.page_format = HostPageFormat.of_states(self._view.group.bytes_per_page)
        infos = [pool.get_device_pool_infos()[0].buffer_info for pool in pools]
        capacity = mamba_pool.host_capacity_tokens
        try:
            super().__init__(
                infos[0],
                host_to_device_ratio,
                host_size,
                device_capacity=mamba_pool.size if capacity is None else capacity,
                pin_memory=infos[0].temporal.device.type != "cpu",
                allocator_type=allocator_type,
                layout=layout,
                mtp_draft_buffer_infos=infos[1:],
            )
        except (ValueError, MemoryError, OSError, RuntimeError) as error:
            # Pools and label have been checked, so only the allocation can have failed.
            size_bytes = getattr(self, "size", 0) * self.page_format.size_bytes
            raise memory.too_much(
                size_bytes, getattr(self, "size", 0), not host_size, error, unit="states"
            ) from error
        self._make_channels(options or HostTierOptions())

    @overrides
    def get_size_per_token(self) -> int:
        return self.page_format.size_bytes

    @property
    def stored_dtype(self) -> torch.dtype:
        """uint8: SGLang's stores get states as bytes."""
        return torch.uint8

    @overrides
    def init_kv_buffer(self) -> list[torch.Tensor]:
        """Memory of the tier: a list of one buffer for all components, where SGLang has one per component."""
        shape = (self.size, self.page_format.size_bytes)
        self._buffer = self.allocator.allocate(shape, dtype=torch.uint8, device=self.device)
        self._take(self._buffer)
        self._pages = self._buffer  # [slots, size_bytes] uint8
        # SGLang's stores count the buffers of the components, so there is a byte view for each component.
        views = [self._buffer[:, begin : begin + size] for begin, size in self._view.components]
        has_ssm = self.temporal_state_elem_size > 0
        self.temporal_buffer = views.pop(0) if has_ssm else self._buffer[:, :0]
        self.conv_buffer = views
        return [self._buffer]

    @overrides
    def _configure_npu_mamba_io(self) -> None:
        """Does nothing: NPU memory is not supported here."""

    @overrides
    def _init_write_back_staging_buffers(self) -> None:
        self.can_use_write_back_jit = False

    def _make_channels(self, options: HostTierOptions) -> None:
        group = self._view.group
        host = packed_view(self._pages, group)
        states, name = self._view.caches, group.name
        self._channels = channels_of(
            [(TransferPlan(states, host, name), TransferPlan(host, states, name))],
            staged_state_bytes(group.bytes_per_page, self._view.largest_part_bytes),
            EngineRequest(options.engine, self._chunks, gpu_calls),
        )
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

    @overrides
    def clear(self) -> None:
        self.slot_used = torch.zeros(self.size, dtype=torch.bool)
        super().clear()

    @overrides
    @synchronized
    def alloc(self, need_size: int) -> torch.Tensor | None:
        slots = super().alloc(need_size)
        if slots is not None:
            self.slot_used[slots] = True
        return slots

    @overrides
    @synchronized
    def free(self, indices: torch.Tensor) -> int:
        """Free slots; returns the number of slots that were allocated until this call.

        SGLang's own method does not check whether slots are allocated, and a slot freed twice would get two
        owners. SGLang only reports the number: `release_transfers` sums it as released slots.
        """
        slots = indices.cpu()
        owned = torch.unique(slots[self.slot_used[slots]])
        if len(owned) != len(slots):
            logger.warning(
                "sgl-kvpool: some of the host's state slots %s are already free", sorted(set(slots.tolist()))
            )
        self.slot_used[owned] = False
        return super().free(owned)

    def _parts_of(self, layer_id: int, is_draft: bool) -> list[tuple[TransferChannel, int]]:
        (channel,) = self._channels.to_device
        parts = self._view.parts_by_layer
        return [(channel, part) for part in parts[layer_id]] if layer_id < len(parts) else []

    def _page_view(self, page: int) -> torch.Tensor:
        return self._pages[page, : self.page_format.content_bytes]

    @overrides
    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        """The buffer that zero-copy stores register."""
        return [self._buffer]

    @overrides
    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Addresses and sizes in bytes: for each slot its ssm states, if any, then those of each convolution.

        The last part includes the rest of the slot, so that padding and checksum are stored with it.
        """
        slot_bytes = self.page_format.size_bytes
        begins = self._buffer.data_ptr() + self.first_pages_of(indices) * slot_bytes
        offsets, _ = np.array(self._view.components, dtype=np.int64).reshape(-1, 2).T
        sizes = np.diff(offsets, append=slot_bytes)
        return (begins[:, None] + offsets).ravel().tolist(), np.tile(sizes, len(begins)).tolist()

    @overrides
    def is_stride_page_aligned(self, page_size_bytes: int = DIRECT_IO_BYTES) -> bool:
        """Whether all addresses and sizes of `get_page_buffer_meta` are multiples of `page_size_bytes`."""
        # Sizes are differences of these numbers.
        offsets = [offset for offset, _ in self._view.components]
        numbers = [self._buffer.data_ptr(), self.page_format.size_bytes, *offsets]
        return not any(number % page_size_bytes for number in numbers)
