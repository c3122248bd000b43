"""A plan: SGLang's answers converted into tokens and requests. Imports neither torch nor SGLang."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sgl_kvpool.srt.host.tier_bytes import TierBytes

_GB = 1e9  # unit of --hicache-size
SCHEMA = 1
#: Limits of the tokens.
MEMORY, MAX_TOTAL = "memory for rows", "--max-total-tokens"
#: Tokens of a request, unless the model's context is shorter.
CONTEXT_TOKENS = 32768
#: Ways in which ranks share rows -> the argument of a way, whose value is --tp-size.
RANKS = {"TP": "", "DP attention": "--attn-dp-size", "DCP": "--dcp-size"}


#: Answers that are the same for all servers, and their values if every server is refused.
_OF_ALL_SERVERS: dict[str, Any] = {
    "model": {}, "mem_fraction_static": 0.0, "attention_copies": 1, "row_copies": 1, "stages": 1,
    "draft_weights_gib": None,
}  # fmt: skip


@dataclass(frozen=True)
class HostBytes:
    """Bytes per token and slot in a host tier."""

    #: Rows in the host's layout and index keys of a token in all layers, including packed drafts, with their
    #: share of the page's padding and checksum.
    token_bytes: int
    #: Index keys of a token in SGLang's pool beside its own tier of rows.
    index_bytes: int
    device_tokens: int
    #: Host bytes of a state slot in all linear layers; 0 for models without linear layers.
    slot_bytes: int = 0
    device_slots: int = 0
    #: Ranks over which the tokens of a page are spread: bytes are those of one rank for as many tokens.
    spread_ranks: int = 1
    #: Bytes of a token in a draft's own host pool, which has as many tokens; not part of --hicache-size.
    draft_bytes: int = 0
    #: Ranks of a node that share one copy of a page; --hicache-size is the part of one rank.
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
            rows=self.device_tokens * (self.token_bytes + self.index_bytes),
            states=self.device_slots * self.slot_bytes,
        ).split(size_gb)


@dataclass(frozen=True)
class HostTokens:
    """Tokens (in whole pages) and state slots that fit, and the bytes of one rank's part of them."""

    tokens: int
    slots: int
    total_bytes: int


def host_tokens(held: HostBytes, size_gb: float, page_size: int) -> HostTokens:
    """Tokens and slots of a host tier; `size_gb`: --hicache-size of one rank, in units of 1e9 bytes."""
    row_gb, state_gb = held.split(size_gb)
    # SGLang adds and counts one page for padding; a page of states is one slot.
    pages = int(held.sharing_ranks * row_gb * _GB // held.token_bytes) // page_size + 1
    slots = int(state_gb * _GB // held.slot_bytes) + 1 if held.has_states else 0
    tokens = pages * page_size
    rows_bytes = tokens * held.page_token_bytes // held.sharing_ranks
    return HostTokens(tokens * held.spread_ranks, slots, rows_bytes + slots * held.slot_bytes)


def largest_whole_gb(held: HostBytes, memory_gb: float, page_size: int) -> int:
    """The largest --hicache-size, in whole GB, whose tier takes at most `memory_gb` of one rank, or 0.

    The size counts pages, and states in hybrid models; index keys in a pool of SGLang's and drafts with pools
    of their own are added. Padding, one page and one slot, is not counted.
    """
    padding_bytes = page_size * held.page_token_bytes + held.slot_bytes
    size = int(memory_gb)
    while size > 0 and host_tokens(held, size, page_size).total_bytes - padding_bytes > memory_gb * _GB:
        size -= 1
    return size


@dataclass(frozen=True)
class Candidate:
    """A server to plan: layouts on the device (None: SGLang without sgl-kvpool) and on the host.

    `ranks` is one of `RANKS`, or empty where the plan does not compare these.
    """

    layout: str | None
    host_layout: str | None = None
    ranks: str = ""

    def arguments(self, tp_size: int, others: Sequence[str], host_gb: int | None) -> list[str]:
        """Arguments of `sglang serve` without the model; `host_gb`: host tier's size per rank."""
        found = ["--tp-size", str(tp_size)] if tp_size > 1 else []
        if (flag := RANKS.get(self.ranks)) and tp_size > 1:
            found += [flag, str(tp_size)]
        if self.layout is not None:
            found += ["--kv-cache-layout", self.layout]
        if host_gb is not None and self.layout is not None:
            found += ["--enable-hierarchical-cache", "--hicache-size", str(host_gb)]
            if self.host_layout is not None:
                found += ["--kv-host-layout", self.host_layout]
        return [*found, *others]


@dataclass(frozen=True)
class PlannedServer:
    """Plan of one layout. Tokens, requests and slots are sums over all caches of the server."""

    #: Layouts; None on the device: SGLang without sgl-kvpool; None on the host: the device's layout.
    layout: str | None
    host_layout: str | None
    command: str
    ranks: str = ""
    refused: str | None = None
    #: Sizes on the device. `requests`: concurrent requests of the plan's length, up to SGLang's maximum.
    tokens: int = 0
    requests: int = 0
    max_running_requests: int = 0
    state_slots: int = 0
    page_size: int = 0
    #: Bytes of a token in all layers, including index keys and drafts.
    token_bytes: int = 0
    #: Part of `token_bytes` that is in a draft's own pool; 0 for SGLang as it is, which does not count it.
    draft_pool_bytes: int = 0
    limit: str = ""
    attention: dict[str, str] | None = None
    #: Sizes on the host. Requests take whole pages, in hybrid models also one slot each.
    host_tokens: int = 0
    host_slots: int = 0
    host_requests: int = 0
    #: --hicache-size per rank, in units of 1e9 bytes; 0 without a host tier.
    hicache_size_gb: int = 0
    host_sharing_ranks: int = 1
    #: Host bytes of a token that --hicache-size does not count: those in a draft's own pool, and index keys
    #: in SGLang's.
    host_index_bytes: int = 0
    #: Memory of a rank that is reserved before the pool is sized: workspaces, page buffers of a host tier.
    workspace_bytes: int = 0

    @property
    def name(self) -> str:
        name = self.layout or "SGLang as it is"
        if self.host_layout is not None:
            name += f", host {self.host_layout}"
        return f"{name}, {self.ranks}" if self.ranks else name


@dataclass(frozen=True)
class Plan:
    schema: int
    model_path: str
    model: dict[str, Any]
    machine: dict[str, Any]
    weights_known: bool
    tp_size: int
    host_gb: float | None
    context_tokens: int
    mem_fraction_static: float
    #: With DP attention, copies of the attention weights over all ranks; else 1.
    attention_copies: int
    #: Ranks with a full copy of the rows of one cache.
    row_copies: int
    ranks_per_node: int
    #: Stages of a pipeline. Bytes of tokens and states are those of the stage with the most rows.
    stages: int
    #: Weights of a separate draft model, not part of the machine's `weights_gib`; 0 if unknown, None without
    #: such a model or if they are part of `weights_gib`.
    draft_weights_gib: float | None
    servers: list[PlannedServer]

    @classmethod
    def of(
        cls,
        *,
        model: str,
        machine: dict[str, Any],
        weights_known: bool,
        tp_size: int,
        host_gb: float | None,
        context_tokens: int | None,
        servers: Sequence[tuple[Candidate, dict[str, Any]]],
        others: Sequence[str],
    ) -> Plan:
        """Plan from the answers of `ask`; ValueError if a request exceeds the model's context."""
        unsized = {**_OF_ALL_SERVERS, "ranks_per_node": tp_size}
        first = next((answer for _, answer in servers if "refused" not in answer), unsized)
        longest = first["model"].get("context_len", context_tokens or CONTEXT_TOKENS)
        if context_tokens is None:
            context_tokens = min(longest, CONTEXT_TOKENS)
        if context_tokens > longest:
            raise ValueError(
                f"--context {context_tokens} is longer than the model's context, {longest} tokens"
            )
        return cls(
            schema=SCHEMA,
            model_path=model,
            machine=machine,
            weights_known=weights_known,
            tp_size=tp_size,
            host_gb=host_gb,
            context_tokens=context_tokens,
            servers=[
                _planned(candidate, answer, model, tp_size, host_gb, context_tokens, others)
                for candidate, answer in servers
            ],
            **{name: first[name] for name in unsized},
        )


def _planned(
    candidate: Candidate,
    answer: dict[str, Any],
    model: str,
    tp_size: int,
    host_gb: float | None,
    context_tokens: int,
    others: Sequence[str],
) -> PlannedServer:
    others = [*others, *(word for pair in answer.get("added", ()) for word in pair.split("="))]

    def command(size_gb: int | None) -> str:
        words = ["--model-path", model, *candidate.arguments(tp_size, others, size_gb)]
        return shlex.join(["sglang", "serve", *words])

    if "refused" in answer:
        return PlannedServer(
            **vars(candidate), command=command(None),
            refused=answer["refused"],
        )  # fmt: skip
    page_size, caches = answer["page_size"], answer["caches"]
    request_tokens = -(-context_tokens // page_size) * page_size
    fitting = answer["tokens"] // request_tokens
    most = answer["max_running_requests"]
    size_gb, held, kept_requests, index_bytes = 0, HostTokens(0, 0, 0), 0, 0
    if host_gb is not None and answer["host"] is not None:
        kept = HostBytes(**answer["host"], device_tokens=answer["tokens"], device_slots=answer["state_slots"])
        size_gb = largest_whole_gb(kept, host_gb / answer["ranks_per_node"], page_size)
        if size_gb:
            held = host_tokens(kept, size_gb, page_size)
            kept_requests = held.tokens // request_tokens
            index_bytes = kept.page_token_bytes - kept.token_bytes
            if kept.has_states:
                kept_requests = min(kept_requests, held.slots)
    return PlannedServer(
        **vars(candidate),
        command=command(size_gb or None),
        tokens=answer["tokens"] * caches,
        requests=min(fitting, most) * caches,
        max_running_requests=most * caches,
        state_slots=answer["state_slots"] * caches,
        page_size=page_size,
        token_bytes=answer["cell_bytes"],
        draft_pool_bytes=answer["draft_pool_bytes"],
        limit=_limit(answer) if fitting > most else MAX_TOTAL if answer["is_capped"] else MEMORY,
        attention=answer["attention"],
        host_tokens=held.tokens * caches,
        host_slots=held.slots * caches,
        host_requests=kept_requests * caches,
        hicache_size_gb=size_gb,
        host_index_bytes=index_bytes,
        host_sharing_ranks=answer["host"]["sharing_ranks"] if size_gb else 1,
        workspace_bytes=answer["workspace_bytes"],
    )


def _limit(answer: dict[str, Any]) -> str:
    most = answer["requested_running_requests"]
    if answer["state_slots"] and (most is None or answer["max_running_requests"] * answer["caches"] < most):
        return "states of linear layers (--mamba-full-memory-ratio)"
    return "--max-running-requests"
