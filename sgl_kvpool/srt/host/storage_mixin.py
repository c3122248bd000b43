"""Host pages for SGLang's stores: names, bytes, addresses. A base of the host tier's pools."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import xxhash
from sglang.srt.environ import envs
from sglang.srt.mem_cache.pool_host.base import HostKVCache
from sglang.srt.utils import is_cuda

from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.memory.canonical import LayerReference
from sgl_kvpool.srt import overrides
from sgl_kvpool.srt.host import memory
from sgl_kvpool.srt.host.page_format import (
    CHECKSUM_BYTES,
    DamagedPage,
    HostPageFormat,
    damage,
    first_damage,
    write_checksum,
    write_checksums,
)
from sgl_kvpool.srt.host.shared_tier import LostPages
from sgl_kvpool.srt.pool.mla import LayoutMLATokenToKVPool
from sgl_kvpool.srt.pool.row_pool import k_scales_digest

#: Version in `storage_format_tag`: increased when stored pages change and the tag of the rows does not.
PAGE_FORMAT_VERSION = 2


def storage_format_tag(
    pools: Sequence[LayoutMLATokenToKVPool],
    page_size: int,
    host_layout: MLAKVCacheLayout | None = None,
    index_keys: Sequence[LayerReference] = (),
) -> str:
    """Tag of the bytes of a host page, for the keys of stores; equal only for interchangeable pages.

    `pools` are the target's, then those of packed drafts; `host_layout` is the device's by default;
    `index_keys` are those in the page. The tag has row format, layout on the host, first layer and number of
    layers, number of drafts, page size of a rank, version, with decode context parallelism which of how many
    ranks' rows, the index keys with their layers, and the k_scales if one of them is not 1.
    """
    target, fmt = pools[0], pools[0].row_format
    tag = (
        f"{fmt.tag}-host_{host_layout or fmt.layout}"
        f"-l{target.start_layer}.{target.layer_num}.{len(pools) - 1}-t{page_size}-s{PAGE_FORMAT_VERSION}"
    )
    if target.dcp_size > 1:
        tag += f"-d{target.dcp_rank}.{target.dcp_size}"
    if index_keys:
        layers = repr([(key.layer_id, key.content, key.runs.size_bytes) for key in index_keys])
        # A fused indexer stores keys without their Hadamard rotation.
        fused = is_cuda() and not envs.SGLANG_DISABLE_DSA_INDEXER_FUSION.get()
        digest = xxhash.xxh32_hexdigest(layers.encode())
        tag += f"-i{len(index_keys)}x{index_keys[0].runs.size_bytes}.{digest}h{0 if fused else 1}"
    scales = k_scales_digest(pools)
    return f"{tag}-k{scales}" if scales else tag


class StorageMixin(HostKVCache):
    """Base of the host tier's pools, which set what is declared here."""

    #: Tag of a page's format in the keys of stores; a server with another format does not find the page.
    storage_format_tag: str
    page_format: HostPageFormat
    #: Keys of `stored_under`, per thread, because SGLang stores and fetches on separate threads.
    _key_of = threading.local()
    #: Pages in the stores' format, `[pages, size_bytes]` uint8; a page of states is a slot.
    _pages: torch.Tensor
    #: Pages whose backup failed: SGLang assumes that they are backed up, but they must not be read.
    _lost: LostPages

    @property
    def stored_dtype(self) -> torch.dtype:
        """Dtype of pages for stores that copy: SGLang's dtype for this kind of pool."""
        return self.dtype

    def _take(self, buffer: torch.Tensor) -> None:
        """Clear the padding of new pages, `[pages, size_bytes / itemsize]`, and pin them if wanted.

        Stores write the padding too, so it must not keep earlier contents of the memory.
        """
        fmt = self.page_format
        if fmt.has_checksum:
            buffer.view(torch.uint8)[:, fmt.content_bytes : fmt.size_bytes - CHECKSUM_BYTES].zero_()
        self._chunks = memory.pin(buffer, fmt.size_bytes) if self.pin_memory else None
        self.pin_memory: bool = self._chunks is not None

    def _page_view(self, page: int) -> torch.Tensor:
        """View of a page that zero-copy stores read and write."""
        raise NotImplementedError

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of all layers, without padding and checksum."""
        return self.page_format.content_bytes

    @contextmanager
    def stored_under(self, keys: Mapping[int, str]) -> Iterator[None]:
        """Inside the block, `keys[first_slot]` is the storage key of a page; per thread."""
        self._key_of.keys = keys
        try:
            yield
        finally:
            self._key_of.keys = {}

    def _key(self, slot: int) -> str:
        return getattr(self._key_of, "keys", {}).get(slot, "")

    def first_pages_of(self, slots: torch.Tensor) -> np.ndarray:
        """Page indices of a slot list, `[pages]` int64; only the first slot of every page is read.

        IndexError if no page begins at one of these first slots.
        """
        page_size = self.logical_page_size
        firsts = slots.numpy()[::page_size].astype(np.int64)
        pages = firsts // page_size
        wrong = (firsts % page_size != 0) | (pages < 0) | (pages >= self.page_num)
        if wrong.any():
            raise IndexError(
                f"no page of {page_size} tokens begins at slot {firsts[wrong][0]}; the host tier has "
                f"{self.page_num} pages"
            )
        return pages

    def pages_before_a_lost_one(self, slots: torch.Tensor) -> int:
        """Number of pages of a list that may be stored: those before the first page lost in its backup."""
        lost = np.flatnonzero(self._lost.of(self.first_pages_of(slots)))
        return int(lost[0]) if len(lost) else len(slots) // self.logical_page_size

    def write_checksums(self, slots: torch.Tensor) -> None:
        """Write checksums into whole pages, under the keys of `stored_under`, for zero-copy stores.

        No other thread may write to them during the call.
        """
        write_checksums(*self._pages_and_keys(slots))

    def first_damaged(self, slots: torch.Tensor) -> tuple[int, str] | None:
        """Index in the list, and the reason, of the first damaged page that a zero-copy store has written."""
        return first_damage(*self._pages_and_keys(slots))

    def _pages_and_keys(self, slots: torch.Tensor) -> tuple[list[np.ndarray], str, list[str]]:
        """Arguments for those functions of `page_format` that take several pages."""
        raw = self._pages.numpy()
        pages = [raw[page] for page in self.first_pages_of(slots)]
        keys = [self._key(slot) for slot in slots[:: self.logical_page_size].tolist()]
        return pages, self.storage_format_tag, keys

    @overrides
    def get_data_page(self, index, flat: bool = True) -> torch.Tensor:
        """The page that begins at slot `index`, for a store; IndexError if none does.

        If `flat`, a copy `[copied_bytes / itemsize]`, with a checksum if the format has one; ValueError for a
        page that was lost in its backup. Otherwise a view that zero-copy stores read and write; for rows
        `[size_bytes / itemsize]`.
        """
        slot = int(index)
        (page,) = self.first_pages_of(torch.tensor([slot]))
        if not flat:
            return self._page_view(page)
        if self._lost.any(page):
            raise ValueError(f"the page of slot {slot} was lost in its backup and must not be stored")
        copied: np.ndarray = np.zeros(self.page_format.copied_bytes, dtype=np.uint8)
        copied[: self._pages.shape[1]] = self._pages[page].numpy()
        if self.page_format.has_checksum:
            rows = copied[: self.page_format.size_bytes]
            write_checksum(rows, self.storage_format_tag, self._key(slot))
        return torch.from_numpy(copied).view(self.stored_dtype)

    @overrides
    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """Memory for a page from a store, `[copied_bytes / itemsize]`, like a copy by `get_data_page`."""
        return torch.from_numpy(np.zeros(self.page_format.copied_bytes, np.uint8)).view(self.stored_dtype)

    @overrides
    def set_from_flat_data_page(self, index, data_page: torch.Tensor) -> None:
        """Copy a page from a store into the tier, or leave the tier unchanged.

        DamagedPage if it differs from the page that was stored under its key; IndexError if no page begins at
        `index`.
        """
        slot = int(index)
        (page,) = self.first_pages_of(torch.tensor([slot]))
        stored = data_page.contiguous().view(-1).view(torch.uint8).numpy()
        fmt = self.page_format
        if len(stored) != fmt.copied_bytes:
            raise DamagedPage(f"{len(stored)} bytes instead of {fmt.copied_bytes}")
        if fmt.has_checksum:
            problem = damage(stored[: fmt.size_bytes], self.storage_format_tag, self._key(slot))
            if problem is None and stored[fmt.size_bytes :].any():
                problem = "the bytes behind the page are not zero"
            if problem is not None:
                raise DamagedPage(problem)
        # By numpy: if torch cannot start threads for SGLang's thread, the process ends.
        self._pages.numpy()[page] = stored[: self._pages.shape[1]]
        self._lost.set(page, False)

    @overrides
    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Address and size in bytes of each page, for zero-copy stores.

        IndexError as `first_pages_of`; ValueError if the number of slots is not a multiple of the page size.
        """
        page_size = self.logical_page_size
        if len(indices) % page_size:
            raise ValueError(f"{len(indices)} slots are not a multiple of the page size {page_size}")
        pages = self.first_pages_of(indices)
        addresses = self._pages.data_ptr() + pages * self.page_format.size_bytes
        return addresses.tolist(), [self.page_format.size_bytes] * len(pages)
