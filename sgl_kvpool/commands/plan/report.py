"""A plan as text for a terminal."""

from sgl_kvpool.commands.plan.planned import MEMORY, Plan, PlannedServer
from sgl_kvpool.commands.tables import aligned


def text(plan: Plan) -> str:
    refused = {server.refused for server in plan.servers}
    if len(refused) == 1 and None not in refused:
        return "\n".join([*_head(plan), "", f"no server starts, with a layout or without: {refused.pop()}"])
    return "\n".join([*_head(plan), "", *_table(plan), "", *_notes(plan), *_reasons(plan), *_commands(plan)])


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
    fraction = f", --mem-fraction-static {plan.mem_fraction_static:g}" if facts else ""
    lines.append(
        f"{plan.tp_size * plan.stages} x Hopper GPU of {machine['gpu_gib']:g} GiB, "
        f"{machine['taken_gib']:g} GiB taken "
        f"before loading, {weights}{fraction}"
    )
    if plan.stages > 1:
        lines.append(
            f"pipeline of {plan.stages} stages, each with an equal part of the weights; bytes per token are "
            "those of the stage with the most rows, which determines the tokens"
        )
    if plan.attention_copies > 1:
        lines.append(
            f"DP attention: the ranks hold the attention weights {plan.attention_copies} times; sizes are "
            "too large unless --weights-gb counts all copies"
        )
    lines.append("sizes are SGLang's own for these arguments; nothing here was run on a GPU")
    return lines


def _table(plan: Plan) -> list[str]:
    base = next((server.tokens for server in plan.servers if server.tokens), 0)
    has_host = any(server.hicache_size_gb for server in plan.servers)
    has_states = any(server.state_slots for server in plan.servers)
    heads = ["layout", "bytes per token", "tokens", "", "requests", *["state slots"] * has_states]
    rows: list[list[object]] = [[*heads, *["host tokens", "requests"] * has_host]]
    for server in plan.servers:
        if server.refused is not None:
            rows.append([server.name, "refused, see below"])
            continue
        line = [
            server.name,
            server.token_bytes,
            server.tokens,
            f"{server.tokens / base:.2f}x",
            server.requests,
        ]
        held = (server.host_tokens, server.host_requests) if server.hicache_size_gb else ("-", "-")
        rows.append([*line, *[server.state_slots] * has_states, *(held if has_host else ())])
    return [f"requests of {plan.context_tokens} tokens at a time", *aligned(rows)]


def _notes(plan: Plan) -> list[str]:
    tiers = [server for server in plan.servers if server.hicache_size_gb]
    lines = _drafts(plan)
    if any(server.ranks for server in plan.servers):
        lines.append(
            "TP: each rank has all rows of one cache; DP attention: each has a cache of its own, and all "
            "attention weights, which --weights-gb counts once; DCP: each has a part of the rows of one cache"
        )
    elif plan.row_copies > 1:
        sharing = max((server.host_sharing_ranks for server in tiers), default=1)
        where = "on its GPU and in its host memory" if tiers and sharing == 1 else "on its GPU"
        lines.append(
            f"each of the {plan.row_copies} ranks of a cache has all rows of the cache {where}: tokens "
            "are counted once"
        )
        if sharing > 1:
            lines.append(
                f"in host memory {sharing} ranks of a node share one copy of a page "
                f"(--kv-host-sharing), so their tier holds {sharing} times the tokens of --hicache-size"
            )
    if tiers and plan.host_gb is not None:
        lines += [_sizes(tiers, plan.host_gb / plan.ranks_per_node), *_host_contents(tiers)]
    served = [server for server in plan.servers if server.refused is None and server.layout is not None]
    if plan.host_gb is not None and served and not tiers:
        lines.append(
            f"no host tier: {plan.host_gb:g} GB are less than 1 GB per rank, the smallest --hicache-size"
        )
    return [*lines, ""] if lines else []


def _drafts(plan: Plan) -> list[str]:
    """Why layouts have fewer tokens than SGLang as it is."""
    stock = next((server.tokens for server in plan.servers if server.layout is None), 0)
    fewer = [one for one in plan.servers if one.draft_pool_bytes and 0 < one.tokens < stock]
    if not fewer:
        return []
    sizes = "/".join(str(size) for size in dict.fromkeys(one.draft_pool_bytes for one in fewer))
    return [
        f"{'; '.join(one.name for one in fewer)}: fewer tokens than SGLang as it is, because SGLang counts "
        f"the draft as layers of the target, and layouts count its own pool of {sizes} bytes per token, "
        "which SGLang allocates too"
    ]


def _sizes(tiers: list[PlannedServer], rank_gb: float) -> str:
    """Note on --hicache-size and its differences by layout."""
    by_size: dict[int, list[str]] = {}
    for server in tiers:
        rows = server.host_layout or server.layout or ""
        by_size.setdefault(server.hicache_size_gb, []).append(rows)
    sizes = [
        f"{size} with {'/'.join(dict.fromkeys(rows))} rows on the host" for size, rows in by_size.items()
    ]
    line = f"--hicache-size {', '.join(sizes) if len(sizes) > 1 else tiers[0].hicache_size_gb}: "
    line += f"GB of the {rank_gb:g} GB that each rank of a node has"
    beside = {server.host_index_bytes for server in tiers}
    if beside != {0}:
        line += (
            f". It does not count {'/'.join(map(str, sorted(beside)))} bytes per token in pools of SGLang's "
            "for drafts or index keys; the narrower the rows, the larger their share"
        )
    if any(server.host_slots for server in tiers):
        line += ". Rows and states of linear layers share it"
    return line


def _host_contents(tiers: list[PlannedServer]) -> list[str]:
    lines = [
        "host tokens include copies of device tokens (--hicache-write-policy write_through, SGLang's "
        "default), so the sum of both counts these tokens twice"
    ]
    small = [server.name for server in tiers if server.host_tokens <= server.tokens]
    if small:
        lines.append(
            f"{'; '.join(small)}: the host tier has no more tokens than the device, so it adds little; "
            "give more --host-gb, or a narrower --kv-host-layout"
        )
    return lines


def _reasons(plan: Plan) -> list[str]:
    lines = ["attention (prefill, decode):"]
    refused: dict[str, list[str]] = {}
    for server in plan.servers:
        if server.refused is not None:
            refused.setdefault(server.refused, []).append(server.name)
        elif server.host_layout is None and server.attention is not None:
            found = server.attention  # the host's layout does not change it
            lines.append(f"  {server.name}: {found['prefill']}, {found['decode']}: {found['why']}")
    lines += [f"  {'; '.join(names)}: refused: {reason}" for reason, names in refused.items()]
    bounds = {server.limit for server in plan.servers if server.tokens and server.limit != MEMORY}
    lines += [f"requests are bounded by {bound} where more would fit" for bound in sorted(bounds)]
    return lines


def _commands(plan: Plan) -> list[str]:
    commands = [s.command for s in plan.servers if s.layout is not None and s.refused is None]
    if not commands:
        return []
    # The weights are a fact about the command too: a model that does not fit would not load.
    unknown = "" if plan.weights_known else " (weights are unknown, so it is not known whether they fit)"
    return ["", f"commands{unknown}:", *(f"  {command}" for command in commands)]
