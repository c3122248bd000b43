"""The host tier of MLA pools: SGLang's `MLATokenToKVPoolHost` with page-major bytes of any layout.

The layout may be narrower than the device's (`--kv-host-layout`): rows are then encoded on the way to the
host and decoded on the way back, and all numbers of bytes and tokens here are the host's.

A host page holds all layers one after the other, so it is contiguous on a disk or on a network: ::

    kv_buffer  : [pages, size_bytes / itemsize]       rows, index keys, padding, checksum (`page_format.py`)
    rows       : [pages, layers, page_size, 1, row]   layers: the target's, then those of packed drafts,
                                                      which have the rows of all ranks (`--dcp-size`)
    index keys : [pages, bytes]                       of sparse models, as on the device, in the same order

SGLang calls the shape of the rows `page_first_direct`. Here the memory has this shape for both values of
--hicache-mem-layout, `page_first` and `page_first_direct`. The pool keeps the requested value as its label,
because SGLang's controller, side pools and stores read it. Stores register the whole contiguous tensor, so
the padding is part of it.
"""

import logging
from collections.abc import Sequence

import torch
from sglang.srt.mem_cache.pool_host import base
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from sgl_kvpool.srt import overrides
from sgl_kvpool.srt.host import memory
from sgl_kvpool.srt.host.page_format import DIRECT_IO_BYTES, HostPageFormat
from sgl_kvpool.srt.host.shared_segment import NodeRanks, SharingRefused
from sgl_kvpool.srt.host.shared_tier import SharedTier
from sgl_kvpool.srt.host.storage_mixin import storage_format_tag
from sgl_kvpool.srt.host.transfer_mixin import TransferMixin, kv_group
from sgl_kvpool.srt.pool.mla import LayoutMLATokenToKVPool
from sgl_kvpool.srt.pool.regions import canonical_view
from sgl_kvpool.transfer.channel import EngineRequest, TransferChannel, build_channels
from sgl_kvpool.transfer.conversion import check_host_layout
from sgl_kvpool.transfer.gpu_engine import gpu_calls
from sgl_kvpool.transfer.host_options import HOST_LABELS, HostTierOptions

logger = logging.getLogger(__name__)


class HierarchicalMLAHostPool(TransferMixin, MLATokenToKVPoolHost):
    """Host tier of a `LayoutMLATokenToKVPool` and of the drafts that are packed with it.

    Takes SGLang's names and arguments: `host_size` in GB (1e9 bytes), or, if that is 0, the ratio of bytes of
    the host tier to those of the device pool, which is the ratio of tokens with the same layout on both
    sides; `page_size`, the slots of SGLang's page, whose rows are spread over `kv_pool.dcp_size` ranks;
    `layout`, one of `HOST_LABELS`; `pin_memory`, by default for pools on a GPU; and by keyword
    `allocator_type`, `pool_label` and `host_token_capacity`. Drafts have one layer each and the target's row
    format. `row_format` is that of a stored row.

    With `node_ranks`, these ranks share the tier, with one copy of each page for all of them: ratio and size
    then mean each rank's part, and every rank has to make the pool. Without `with_checksum` pages have no
    room for one, as for a draft with a separate tier: stores handle its pages in SGLang's sizes, and a
    damaged page only lowers the number of accepted tokens.

    TypeError for a pool of another class. ValueError if a draft has another row format, more than one layer
    or fewer pages, rows cannot be converted to the host layout, or there is not enough memory. Any error of
    an engine that was requested by name and cannot be built.
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
        node_ranks: NodeRanks | None = None,
        with_checksum: bool = True,
        **kwargs,
    ) -> None:
        pools = (kv_pool, *draft_pools)
        if other := [type(pool).__name__ for pool in pools if not isinstance(pool, LayoutMLATokenToKVPool)]:
            raise TypeError(f"{type(self).__name__} is for pools with a layout, not {', '.join(other)}")
        assert layout in HOST_LABELS, layout
        tags = [pool.row_format.tag for pool in pools]
        if len(set(tags)) > 1 or any(draft.layer_num != 1 for draft in draft_pools):
            raise ValueError(
                f"drafts packed with their target have one layer and the target's rows; got rows {tags} and "
                f"{[draft.layer_num for draft in draft_pools]} layers"
            )
        # Set before the base class's constructor runs, because that calls the overrides below.
        self._options: HostTierOptions = kv_pool.host_tier
        host_layout = self._options.host_layout(kv_pool.kv_cache_layout)
        check_host_layout(kv_pool.row_format, host_layout)
        self._device_rows = kv_pool.row_format
        self.row_format = self._device_rows.in_layout(host_layout)
        self._k_scales = [[pool.k_scale(layer) for layer in pool.row_layer_ids] for pool in pools]
        # Each rank has all rows of a draft.
        self._page_sizes = [page_size // pool.dcp_size for pool in pools]
        views = [canonical_view(pool, size) for pool, size in zip(pools, self._page_sizes, strict=True)]
        self._device_views = [view.only("kv") for view in views]
        # Beside a draft's separate tier, SGLang allocates a pool of its index keys.
        has_keys = with_checksum and any(pool.serves_dsa for pool in pools)
        self._key_views = [view.only("indexer") for view in views if has_keys]
        # Of each pool, the indices of its layers with index keys, by their indices among all layers.
        ids = [[layer.layer_id for layer in kv_group(view).layers] for view in self._device_views]
        self._key_parts = [
            {ids[pool].index(key.layer_id): part for part, key in enumerate(kv_group(view).layers)}
            for pool, view in enumerate(self._key_views)
        ]
        counts = [kv_group(view).num_pages for view in self._device_views]
        if min(counts) < counts[0]:
            raise ValueError(
                f"a draft packed with its target has {min(counts)} pages, the target {counts[0]}"
            )
        rows = sum(pool.layer_num * size for pool, size in zip(pools, self._page_sizes, strict=True))
        self._rows_bytes = rows * self.row_format.row_bytes
        content_bytes = self._rows_bytes + sum(kv_group(view).bytes_per_page for view in self._key_views)
        self.page_format = (
            HostPageFormat.of_rows(content_bytes, self._page_sizes[0])
            if with_checksum
            else HostPageFormat.bare(content_bytes)
        )
        # The tier of a draft gets its number of tokens from the target's tier.
        self._sized_by_ratio = None if kwargs.get("host_token_capacity") else not host_size
        self._beside_bytes = 0 if with_checksum else kv_pool.index_key_bytes // page_size
        self.shared = None if node_ranks is None else SharedTier(node_ranks)
        parts = 1 if node_ranks is None else node_ranks.fewest
        infos = [pool.host_tier_info() for pool in pools]
        capacity = kv_pool.host_capacity_tokens
        super().__init__(
            infos[0],
            parts * host_to_device_ratio * self._device_rows.row_bytes / self.row_format.row_bytes,
            parts * host_size,
            page_size,
            layout,
            pin_memory=torch.device(kv_pool.device).type != "cpu" if pin_memory is None else pin_memory,
            override_kv_cache_dim=kv_pool.kv_cache_dim,
            draft_buffer_infos=infos[1:],
            dcp_size=kv_pool.dcp_size,
            dcp_rank=kv_pool.dcp_rank,
            device_capacity_tokens=kv_pool.size if capacity is None else capacity,
            start_layer=kv_pool.start_layer,
            end_layer=kv_pool.end_layer,
            target_layer_num=kv_pool.layer_num,
            **kwargs,
        )
        keys = [key for view in self._key_views for key in kv_group(view).layers]
        self.storage_format_tag = storage_format_tag(pools, self.page_size, host_layout, keys)

    @overrides
    def _allocate_host_buffer(self) -> None:
        if self._beside_bytes:
            token_bytes = self.size_per_token + self._beside_bytes
            memory.require_room(self.size * token_bytes, self.size, self._sized_by_ratio)
        try:
            if self.shared is None:
                super()._allocate_host_buffer()
            else:
                self._allocate_shared_buffer(self.shared)
        except SharingRefused:
            raise
        except (ValueError, MemoryError, OSError, RuntimeError) as error:
            size_bytes = self.size * self.size_per_token
            raise memory.too_much(size_bytes, self.size, self._sized_by_ratio, error) from error

    def _allocate_shared_buffer(self, shared: SharedTier) -> None:
        """Allocate the buffer that the ranks share.

        Before any rank allocates, every rank checks free memory for its part as SGLang does.
        """
        part_bytes = self.size * self.size_per_token // shared.ranks.fewest
        problem = shared.room_problem(part_bytes, base.host_memory_budget_bytes(part_bytes))
        if problem is not None:
            raise ValueError(problem)
        self.kv_buffer = self.init_kv_buffer()
        self.fd = None

    @overrides
    def init_kv_buffer(self) -> torch.Tensor:
        """Memory of the tier in page-major order, pinned if requested and possible."""
        if self.row_format != self._device_rows:
            # The base class has set both from the device pool.
            self.dtype, self.kv_cache_dim = torch.uint8, self.row_format.row_bytes
        shape = (self.page_num, self.page_format.size_bytes // self.dtype.itemsize)
        if self.shared is not None:
            buffer = self.shared.allocate(shape, self.dtype)
        else:
            buffer = self.allocator.allocate(shape, dtype=self.dtype, device=self.device)
        self.token_stride_size = self.kv_cache_dim * self.dtype.itemsize
        self.layout_dim = self.token_stride_size * self.layer_num
        self._take(buffer)
        return buffer

    @overrides
    def _initialize_transfer_views(self) -> None:
        self.can_use_jit = False
        self._pages = self.kv_buffer.view(torch.uint8)  # [pages, size_bytes]
        self.data_refs = self._rows()
        self.data_ptrs = None  # no kernel of SGLang moves these rows
        self._init_write_back_staging_buffers()
        # The drafts' layers follow the target's, as SGLang numbers the layers of a host tier.
        self._channels = build_channels(
            self._pages,
            self._device_views,
            self._device_rows,
            self.row_format,
            self._k_scales,
            self._key_views,
            EngineRequest(self._options.engine, self._chunks, gpu_calls),
        )
        logger.info(
            "sgl-kvpool: host tier of %d pages of %d tokens (%d bytes, all %d layers), %s, rows %s%s, "
            "engine %s, runs of %s bytes%s, %d bytes from page to page%s",
            self.page_num,
            self.page_size,
            self.page_bytes,
            self.layer_num,
            self.layout,
            self.row_format.tag,
            "" if self.row_format == self._device_rows else f" of {self._device_rows.tag} on the device",
            self._channels.engines,
            " and ".join(map(str, self._channels.run_bytes)) or "no",
            ", pinned" if self.pin_memory else "",
            self.page_format.size_bytes,
            "" if self.shared is None else f", {self.shared.in_words(self.size)}",
        )

    def _parts_of(self, layer_id: int, is_draft: bool) -> list[tuple[TransferChannel, int]]:
        if not is_draft and layer_id not in self._host_layer_by_controller:
            return []
        host_layer = self._host_layer_by_controller[layer_id]
        pool = max(0, host_layer - self.target_layer_num + 1)  # the target's is 0
        layer = 0 if pool else host_layer
        channels = self._channels.to_device
        key = self._key_parts[pool].get(layer) if self._key_parts else None
        # SGLang records one event for both.
        keys = [] if key is None else [(channels[len(self._device_views) + pool], key)]
        return [*keys, (channels[pool], layer)]

    def _page_view(self, page: int) -> torch.Tensor:
        return self.kv_buffer[page]

    def _rows(self) -> list[torch.Tensor]:
        """Rows of each layer in all pages, `[pages, page_size, 1, row]`, views."""
        target, *drafts = self._page_sizes
        sizes = [target] * self.target_layer_num + drafts
        rows = self.kv_buffer[:, : self._rows_bytes // self.dtype.itemsize]
        layers = rows.split([size * self.kv_cache_dim for size in sizes], dim=1)
        return [layer.unflatten(1, (-1, 1, self.kv_cache_dim)) for layer in layers]

    @property
    def index_keys(self) -> torch.Tensor:
        """Index keys of all pages, `[pages, bytes]` uint8, a view: layer by layer."""
        return self._pages[:, self._rows_bytes : self.page_bytes]

    @overrides
    def _init_write_back_staging_buffers(self) -> None:
        self.staging_page_capacity = 0
        self.staging_token_capacity = 0
        self.staging_buffer = None
        self.can_use_write_back_jit = False

    @overrides
    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Lists of the address, size and page size in bytes of the one buffer."""
        return [self.kv_buffer.data_ptr()], [self.kv_buffer.nbytes], [self.page_format.size_bytes]

    @overrides
    def get_size_per_token(self) -> int:
        # SGLang also calls this before it has set the page size.
        return self.page_format.bytes_per_token(self._page_sizes[0])

    @overrides
    def is_stride_page_aligned(self, page_size_bytes: int = DIRECT_IO_BYTES) -> bool:
        """Whether addresses and sizes of all pages are multiples of `page_size_bytes`, as O_DIRECT needs."""
        numbers = (self.kv_buffer.data_ptr(), self.page_format.size_bytes)
        return not any(number % page_size_bytes for number in numbers)
