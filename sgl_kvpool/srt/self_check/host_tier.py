"""Check of a host tier: pages to the host and back, through SGLang's controller and allocators."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from sgl_kvpool.srt.self_check.pages import Difference, PageBytes, encoded, random_values, require_same_bytes
from sgl_kvpool.transfer.conversion import RowConversion
from sgl_kvpool.transfer.slots import pages_of

if TYPE_CHECKING:
    from sgl_kvpool.srt.host.rows import HierarchicalMLAHostPool
    from sgl_kvpool.srt.pool.mla import LayoutMLATokenToKVPool

#: Number of distinct rows; the tokens of the pages repeat them, and each layer starts with another row.
_ROWS = 61


def check_tier(controller: Any, all_ranks: Callable[[bool], bool]) -> str:
    """Back up pages of all layers, compare the host's rows, load them into other pages of the device.

    Host and device slots come from SGLang's allocators and are freed again; all pages are restored. Ranks
    that share a tier compare one another's pages. `controller` is SGLang's of a `HierarchicalMLAHostPool`,
    without a transfer in progress. `all_ranks` returns whether a condition holds on all ranks of the
    scheduler; every rank makes the same calls.

    Difference, if this rank or another one has found one.
    """
    check = _TierCheck(controller)
    if not all_ranks(check.pages > 0):
        return "no free page for the host tier's check"
    problem: Exception | None = None
    try:
        # Each step runs on all ranks or on none, since the controller's calls contain collectives.
        for step in (check.fill, check.back_up, check.compare_host, check.load, check.compare_device):
            try:
                step()
            except Exception as error:  # after any exception, since other ranks wait for the result
                problem = error
            if not all_ranks(problem is None):
                raise problem or Difference("the host tier: another rank found a difference, see its log")
    finally:
        check.restore()
    return f"{check.pages} pages to the host tier and back"


class _TierCheck:
    """The steps of `check_tier`, and what they have to restore."""

    def __init__(self, controller: Any):
        self._controller = controller
        self._allocator = controller.mem_pool_device_allocator
        anchor = controller.mem_pool_host.anchor_entry
        self._tier: HierarchicalMLAHostPool = anchor.host_pool
        self._pools: list[LayoutMLATokenToKVPool] = [
            pool.row_pool for pool in (anchor.device_pool, *anchor.packed_draft_device_pools)
        ]
        shared = self._tier.shared
        free = min(self._allocator.available_size() // 2, controller.mem_pool_host.available_size())
        # At least one page for each rank to store.
        self.pages = min(
            2 if shared is None else shared.ranks.count + 1, free // self._tier.logical_page_size
        )
        self._rank = 0 if shared is None else shared.ranks.rank
        self._ranks = 1 if shared is None else shared.ranks.count
        self._taken: list[torch.Tensor] = []
        self._former: list[tuple[PageBytes, torch.Tensor]] = []
        self._host: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # slots, own pages, bytes
        self._sent: list[torch.Tensor] = []
        self._sent_keys: list[torch.Tensor] = []
        self._loaded: list[tuple[PageBytes, PageBytes]] = []

    def fill(self) -> None:
        slots = self._allocator.alloc(self.pages * self._tier.logical_page_size)
        self._taken.append(slots)
        generator = torch.Generator().manual_seed(2)
        for pool, (pages, keys) in zip(self._pools, self._kept(slots), strict=True):
            scales = [pool.k_scale(layer) for layer in pool.row_layer_ids]
            fmt, shape = pool.row_format, (self.pages, pool.page_size, pool.row_format.row_bytes)
            rows = {scale: encoded(random_values(_ROWS, fmt, seed=1), fmt, scale) for scale in set(scales)}
            layers = [rows[scale][self._order(index, pool)].view(shape) for index, scale in enumerate(scales)]
            sent = torch.stack(layers) if layers else torch.empty((0, *shape), dtype=torch.uint8)
            pages.write(sent)
            self._sent.append(sent)
            self._sent_keys.append(
                torch.randint(256, keys.read().shape, dtype=torch.uint8, generator=generator)
            )
            keys.write(self._sent_keys[-1])

    def back_up(self) -> None:
        """Back up all pages by SGLang's controller; each of the ranks that share a tier stores its own."""
        controller, tier = self._controller, self._tier
        host = controller.write(self._taken[0], flush=False)
        if host is None:
            raise Difference("the host tier: SGLang's controller refused a backup, see the log")
        pages = torch.from_numpy(pages_of(host, tier.logical_page_size))
        own = pages[pages % self._ranks == self._rank]
        self._host = (host, own, tier.kv_buffer[own].clone())
        controller.start_writing()
        controller.ack_write_queue.pop().finish_event.synchronize()

    def compare_host(self) -> None:
        """Compare the host's rows, also those stored by other ranks: all ranks have finished `back_up`."""
        assert self._host is not None
        host, tier = self._host[0], self._tier
        if (problem := tier.host_indices_problem(host)) is not None:
            raise Difference(f"the host tier: {problem}, see the log")
        pages = torch.from_numpy(pages_of(host, tier.logical_page_size))
        expected = [rows for part in self._in_host_layout for rows in part]
        for index, (layer, rows) in enumerate(zip(tier.data_refs, expected, strict=True)):
            require_same_bytes(
                layer[pages].view(torch.uint8).flatten(2),
                rows,
                f"rows of {tier.row_format.layout} in the host tier",
                lambda page, token, index=index: (
                    f"layer {index} of {len(expected)}, token {token} of host page {pages[page]}"
                ),
            )
        require_same_bytes(
            tier.index_keys[pages],
            torch.cat([keys.transpose(0, 1).flatten(1) for keys in self._sent_keys], dim=1),
            "index keys in the host tier",
            lambda page: f"host page {pages[page]}",
        )

    def load(self) -> None:
        """Load the pages into other device pages by SGLang's controller, layer by layer."""
        assert self._host is not None
        controller = self._controller
        slots = controller.load(self._host[0])
        if slots is None:
            raise Difference("the host tier: SGLang's controller refused a load, see the log")
        self._taken.append(slots)
        self._loaded = self._kept(slots)
        controller.start_loading()
        controller.ack_load_queue.pop().finish_event.synchronize()

    def compare_device(self) -> None:
        """Compare loaded rows with the sent rows, or with the codec's result if the host's layout differs."""
        expected = zip(self._in_device_layout(), self._sent_keys, strict=True)
        for pool, both, sent in zip(self._pools, self._loaded, expected, strict=True):
            names = f"rows of {pool.row_format.layout}", "index keys"
            for pages, wanted, name in zip(both, sent, names, strict=True):
                require_same_bytes(
                    pages.read(),
                    wanted,
                    f"{name} loaded from the host tier",
                    lambda layer, page, token: f"layer {layer}, token {token} of page {page} of the transfer",
                )

    def restore(self) -> None:
        for pages, former in self._former:
            pages.write(former)
        for slots in self._taken:
            self._allocator.free(slots)
        if self._host is not None:
            host, own, former = self._host
            self._tier.kv_buffer[own] = former
            self._controller.mem_pool_host.free(host)

    def _kept(self, slots: torch.Tensor) -> list[tuple[PageBytes, PageBytes]]:
        """Rows and index keys of device slots in every pool; their bytes are kept for `restore`."""
        numbers = pages_of(slots.cpu(), self._tier.logical_page_size).tolist()
        pages = [(PageBytes(pool, numbers), PageBytes.of_index_keys(pool, numbers)) for pool in self._pools]
        self._former += [(one, one.read()) for both in pages for one in both]
        return pages

    def _order(self, layer: int, pool: LayoutMLATokenToKVPool) -> torch.Tensor:
        """Index of the distinct row of each token of a layer."""
        return (torch.arange(self.pages * pool.page_size) + 7 * layer) % _ROWS

    def _conversion(self, pool: LayoutMLATokenToKVPool) -> RowConversion | None:
        """Conversion of a pool's rows to the host's; None if both have the same format."""
        if self._tier.row_format == pool.row_format:
            return None
        scales = tuple(pool.k_scale(layer) for layer in pool.row_layer_ids)
        return RowConversion(source=pool.row_format, target=self._tier.row_format, k_scales=scales)

    @cached_property
    def _in_host_layout(self) -> list[torch.Tensor]:
        """Expected rows of each pool on the host, `[layers, pages, page_size, row_bytes]`."""
        conversions = map(self._conversion, self._pools)
        return [_converted(sent, one) for sent, one in zip(self._sent, conversions, strict=True)]

    def _in_device_layout(self) -> list[torch.Tensor]:
        """Expected rows of each pool on the device after the load, with the same axes."""
        conversions = map(self._conversion, self._pools)
        return [
            sent if one is None else _converted(host, one.reversed())
            for sent, host, one in zip(self._sent, self._in_host_layout, conversions, strict=True)
        ]


def _converted(rows: torch.Tensor, conversion: RowConversion | None) -> torch.Tensor:
    if conversion is None:
        return rows
    layers = [conversion.convert(layer.flatten(0, 1), index) for index, layer in enumerate(rows)]
    return torch.stack(layers).view(*rows.shape[:3], -1)
