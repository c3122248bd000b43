"""Capacity of a host tier, by the arithmetic of SGLang's host pools (`pool_host/base.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_kvpool.srt.host.tier_bytes import TierBytes

__all__ = ["HostBytes", "HostTokens", "host_tokens", "largest_whole_gb"]

_GB = 1e9  # unit of --hicache-size


@dataclass(frozen=True)
class HostBytes:
    """Bytes per token and slot in a host tier.

    Attributes
    ----------
    token_bytes : int
        Rows of a token in all layers, including packed drafts, in the host's layout, with their share of the
        page's padding and checksum.
    index_bytes : int
        Index keys of a token in all layers with index keys, which share the page numbers of the rows.
    device_tokens : int
        Tokens of the device pool.
    slot_bytes : int
        Host bytes of a state slot in all linear layers; 0 for models without linear layers.
    device_slots : int
    draft_bytes : int
        Bytes of a token in a draft's own host pool, which has as many tokens; not part of --hicache-size.
    sharing_ranks : int
        Ranks of a node that share one copy of a page; --hicache-size is the part of one rank.
    """

    token_bytes: int
    index_bytes: int
    device_tokens: int
    slot_bytes: int = 0
    device_slots: int = 0
    draft_bytes: int = 0
    sharing_ranks: int = 1

    @property
    def page_token_bytes(self) -> int:
        """Bytes of a token in all pools that store whole pages."""
        return self.token_bytes + self.index_bytes + self.draft_bytes

    @property
    def has_states(self) -> bool:
        """Whether rows and states share --hicache-size."""
        return bool(self.slot_bytes and self.device_slots)

    def split(self, size_gb: float) -> tuple[float, float]:
        """GB of rows and of states out of --hicache-size."""
        if not self.has_states:
            return size_gb, 0.0
        return TierBytes(
            rows=self.device_tokens * self.token_bytes,
            index_keys=self.device_tokens * self.index_bytes,
            states=self.device_slots * self.slot_bytes,
            device_rows=0,
        ).split(size_gb)


@dataclass(frozen=True)
class HostTokens:
    """Tokens (in whole pages) and state slots that fit, and the bytes of one rank's part of them."""

    tokens: int
    slots: int
    total_bytes: int


def host_tokens(held: HostBytes, size_gb: float, page_size: int) -> HostTokens:
    """Tokens and slots of a host tier.

    Parameters
    ----------
    held : HostBytes
    size_gb : float
        Value of --hicache-size for one rank, in units of 1e9 bytes.
    page_size : int
        Tokens per page.
    """
    row_gb, state_gb = held.split(size_gb)
    # SGLang adds and counts one page for padding; a page of states is one slot.
    pages = int(held.sharing_ranks * row_gb * _GB // held.token_bytes) // page_size + 1
    slots = int(state_gb * _GB // held.slot_bytes) + 1 if held.has_states else 0
    tokens = pages * page_size
    rows_bytes = tokens * held.page_token_bytes // held.sharing_ranks
    return HostTokens(tokens, slots, rows_bytes + slots * held.slot_bytes)


def largest_whole_gb(held: HostBytes, memory_gb: float, page_size: int) -> int:
    """The largest --hicache-size, in whole GB, whose tier takes at most `memory_gb` of one rank, or 0.

    The size counts rows, and states in hybrid models; index keys of sparse attention and drafts with pools of
    their own are added. Padding, one page and one slot, is not counted.
    """
    padding_bytes = page_size * held.page_token_bytes + held.slot_bytes
    size = int(memory_gb)
    while size > 0 and host_tokens(held, size, page_size).total_bytes - padding_bytes > memory_gb * _GB:
        size -= 1
    return size
