"""A plan: what SGLang answered, made into tokens and requests. Imports neither torch nor SGLang."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sgl_kvpool.commands.plan.host_tier import HostBytes, HostTokens, host_tokens, largest_whole_gb

__all__ = ["CONTEXT_TOKENS", "SCHEMA", "Plan", "PlannedServer"]

SCHEMA = 1
#: Tokens of a request, unless the model's context is shorter.
CONTEXT_TOKENS = 32768


@dataclass(frozen=True)
class Candidate:
    """A server to ask about: layouts on the device (None: SGLang as it is) and on the host."""

    layout: str | None
    host_layout: str | None = None

    def arguments(self, tp_size: int, others: Sequence[str], host_gb: int | None) -> list[str]:
        """Of `sglang.launch_server`, without the model. A host tier needs a size in GB of a rank."""
        found = ["--tp-size", str(tp_size)] if tp_size > 1 else []
        if self.layout is not None:
            found += ["--kv-cache-layout", self.layout]
        if host_gb is not None:
            found += ["--enable-hierarchical-cache", "--hicache-size", str(host_gb)]
            if self.host_layout is not None:
                found += ["--kv-host-layout", self.host_layout]
        return [*found, *others]


@dataclass(frozen=True)
class PlannedServer:
    """One layout. Tokens, requests and slots are of the whole server, all its caches together.

    Attributes
    ----------
    layout, host_layout : str or None
        None: SGLang as it is; the layout of the device.
    command : str
        Starts it, in a shell.
    refused : str or None
        Why SGLang would not start it; the sizes are 0 then.
    tokens, requests, max_running_requests, state_slots : int
        On the device. Requests of the plan's length at a time, at most as many as SGLang runs.
    page_size : int
        Tokens of a page.
    token_bytes : int
        Of a token in all layers, index keys and drafts among them.
    limit : str
        What bounds `requests`.
    attention : dict or None
        Fields of `kernels.Attention`.
    host_tokens, host_slots, host_requests : int
        On the host. Requests in whole pages; those of hybrid models take a slot each.
    hicache_size_gb : int
        Of a rank, in units of 1e9 bytes; 0 without a host tier.
    host_sharing_ranks : int
        Ranks that keep one copy of a host page together.
    host_index_bytes : int
        Of a token on the host, index keys and a draft's own pool, which --hicache-size does not count.
    workspace_bytes : int
        Of a rank, taken before the pool.
    """

    layout: str | None
    host_layout: str | None
    command: str
    refused: str | None = None
    tokens: int = 0
    requests: int = 0
    max_running_requests: int = 0
    state_slots: int = 0
    page_size: int = 0
    token_bytes: int = 0
    limit: str = ""
    attention: dict[str, str] | None = None
    host_tokens: int = 0
    host_slots: int = 0
    host_requests: int = 0
    hicache_size_gb: int = 0
    host_sharing_ranks: int = 1
    host_index_bytes: int = 0
    workspace_bytes: int = 0

    @property
    def name(self) -> str:
        """For tables."""
        if self.layout is None:
            return "SGLang as it is"
        return self.layout if self.host_layout is None else f"{self.layout}, host {self.host_layout}"


@dataclass(frozen=True)
class Plan:
    """What was requested, and every server.

    Attributes
    ----------
    attention_copies : int
        With DP attention: how often the ranks together hold the attention weights. Else 1.
    row_copies : int
        Ranks that hold the rows of one cache, each all of them.
    ranks_per_node : int
    draft_weights_gib : float or None
        Of a draft model of its own, counted besides the machine's `weights_gib`; 0 if they are not known,
        None if there is none or they are among the others.
    """

    schema: int
    model_path: str
    model: dict[str, Any]
    machine: dict[str, Any]
    weights_known: bool
    tp_size: int
    host_gb: float | None
    context_tokens: int
    mem_fraction_static: float
    attention_copies: int
    row_copies: int
    ranks_per_node: int
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
        """From the answers of `command.ask`; ValueError if a request is longer than the model's context."""
        sized = [answer for _, answer in servers if "refused" not in answer]
        facts = sized[0]["model"] if sized else {}
        longest = facts.get("context_len", context_tokens or CONTEXT_TOKENS)
        if context_tokens is None:
            context_tokens = min(longest, CONTEXT_TOKENS)
        if context_tokens > longest:
            raise ValueError(
                f"--context {context_tokens} is longer than the model's context, {longest} tokens"
            )
        return cls(
            schema=SCHEMA,
            model_path=model,
            model=facts,
            machine=machine,
            weights_known=weights_known,
            tp_size=tp_size,
            host_gb=host_gb,
            context_tokens=context_tokens,
            mem_fraction_static=sized[0]["mem_fraction_static"] if sized else 0.0,
            attention_copies=sized[0]["attention_copies"] if sized else 1,
            row_copies=sized[0]["row_copies"] if sized else 1,
            ranks_per_node=sized[0]["ranks_per_node"] if sized else tp_size,
            draft_weights_gib=sized[0]["draft_weights_gib"] if sized else None,
            servers=[
                _planned(candidate, answer, model, tp_size, host_gb, context_tokens, others)
                for candidate, answer in servers
            ],
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
        return shlex.join(["python", "-m", "sglang.launch_server", *words])

    if "refused" in answer:
        return PlannedServer(
            layout=candidate.layout, host_layout=candidate.host_layout, command=command(None),
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
        layout=candidate.layout,
        host_layout=candidate.host_layout,
        command=command(size_gb or None),
        tokens=answer["tokens"] * caches,
        requests=min(fitting, most) * caches,
        max_running_requests=most * caches,
        state_slots=answer["state_slots"] * caches,
        page_size=page_size,
        token_bytes=answer["cell_bytes"],
        limit="memory for rows" if fitting <= most else _limit(answer),
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
    asked = answer["asked_running_requests"]
    if answer["state_slots"] and (asked is None or answer["max_running_requests"] * answer["caches"] < asked):
        return "states of linear layers (--mamba-full-memory-ratio)"
    return "--max-running-requests"
