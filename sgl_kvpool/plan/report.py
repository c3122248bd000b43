"""A plan as text for a terminal."""

from __future__ import annotations

from sgl_kvpool.plan.planned import Plan

__all__ = ["text"]


def text(plan: Plan) -> str:
    """The plan for a terminal."""
    return "\n".join([*_head(plan), "", *_table(plan), "", *_reasons(plan), *_commands(plan)])


def _head(plan: Plan) -> list[str]:
    machine, facts = plan.machine, plan.model
    lines = []
    if facts:
        kind = {"sparse": "MLA with sparse attention (DSA)", "dense": "MLA"}[facts["kind"]]
        linear = f" and {facts['linear_layers']} linear layers" if facts["linear_layers"] else ""
        lines.append(
            f"{facts['name']}: {kind}, {facts['layers_with_rows']} layers with rows{linear}, latent "
            f"{facts['kv_lora_rank']}, rope {facts['qk_rope_head_dim']}, context {facts['context_len']}"
        )
    weights = f"{machine['weights_gib']:.1f} GiB of weights"
    if not plan.weights_known:
        weights = "NO WEIGHTS (unknown: give --weights-gb; real numbers are smaller)"
    if plan.draft_weights_gib is not None:
        weights += f" and {plan.draft_weights_gib:.1f} GiB of a draft's"
        if not plan.draft_weights_gib:
            weights += " (unknown: give the sum of both to --weights-gb; real numbers are smaller)"
    lines.append(
        f"{plan.tp_size} x Hopper GPU of {machine['gpu_gib']:g} GiB, {machine['taken_gib']:g} GiB taken "
        f"before loading, {weights}, --mem-fraction-static {plan.mem_fraction_static:g}"
    )
    if plan.attention_copies > 1:
        lines.append(
            f"DP attention: the ranks hold the attention weights {plan.attention_copies} times; sizes are "
            "too large unless --weights-gb counts them so"
        )
    lines.append("sizes are SGLang's own for these arguments; nothing here was run on a GPU")
    return lines


def _table(plan: Plan) -> list[str]:
    base = next((server.tokens for server in plan.servers if server.tokens), 0)
    has_host = any(server.hicache_size_gb for server in plan.servers)
    has_states = any(server.state_slots for server in plan.servers)
    head = f"{'layout':26} {'bytes per token':>15} {'tokens':>10} {'':>6} {'requests':>9}"
    head += f" {'state slots':>11}" if has_states else ""
    head += f" {'host tokens':>12} {'requests':>9}" if has_host else ""
    lines = [f"requests of {plan.context_tokens} tokens at a time", head]
    for server in plan.servers:
        if server.refused is not None:
            lines.append(f"{server.name:26} {'refused, see below':>15}")
            continue
        line = (
            f"{server.name:26} {server.token_bytes:15} {server.tokens:10} {server.tokens / base:5.2f}x "
            f"{server.requests:9}"
        )
        line += f" {server.state_slots:11}" if has_states else ""
        if has_host:
            shown = (server.host_tokens, server.host_requests) if server.hicache_size_gb else ("-", "-")
            line += f" {shown[0]:>12} {shown[1]:>9}"
        lines.append(line)
    return lines


def _reasons(plan: Plan) -> list[str]:
    lines = ["attention (prefill, decode):"]
    for server in plan.servers:
        if server.host_layout is not None and server.refused is None:
            continue  # as with the same layout on the host
        if server.attention is None:
            lines.append(f"  {server.name}: refused: {server.refused}")
        else:
            found = server.attention
            lines.append(f"  {server.name}: {found['prefill']}, {found['decode']}: {found['why']}")
    bounds = {server.limit for server in plan.servers if server.tokens and server.limit != "memory for rows"}
    lines += [f"requests are bounded by {bound} where more would fit" for bound in sorted(bounds)]
    if plan.host_gb is not None and not any(server.hicache_size_gb for server in plan.servers):
        lines.append(
            f"no host tier: {plan.host_gb:g} GB are less than 1 GB per rank, the smallest --hicache-size"
        )
    return lines


def _commands(plan: Plan) -> list[str]:
    commands = [s.command for s in plan.servers if s.layout is not None and s.refused is None]
    return ["", "to start one:", *(f"  {command}" for command in commands)] if commands else []
