"""Checks of an idle server: censuses, metrics, log."""

import re
import time
from collections.abc import Sequence
from typing import Any

from scripts.soak.in_server import CENSUS
from sgl_kvpool.commands.processes.server import Server, ServerFailed

#: Least number of answers for a meaningful soak; of censuses for a comparison of memory: before traffic,
#: after the first round, and the last.
ANSWERS, CENSUSES = 20, 3
#: SGLang's counts of tokens that moved, by our names of the directions.
MOVED = {
    "to_host": "sglang:hicache_backup_tokens_total",
    "to_device": "sglang:load_back_tokens_total",
}

#: Patterns that must not be in a log.
_BAD_LINES = re.compile(
    r"Traceback \(most recent call last\)|leak detected|use-after-free|double free|Double-|Segmentation|"
    r"sgl-kvpool: .*(failed|lost|bad pages)|Scheduler hit an exception",
    re.IGNORECASE,
)
_SAMPLE = re.compile(r"^([\w:]+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


def idle_census(server: Server) -> dict[str, Any]:
    """Census of a server once it is idle and two censuses agree, or the last census after a minute."""
    deadline = time.monotonic() + 60
    last: dict[str, Any] = {}
    while True:
        state = server.info()["internal_states"][0]
        if CENSUS not in state:
            raise ServerFailed(
                f"the server sends no census: it did not import scripts.soak.in_server; see {server.log}"
            )
        census = state[CENSUS]
        settled = {k: v for k, v in census.items() if k != "resident_bytes"}
        if (settled == last and census["idle"]) or time.monotonic() > deadline:
            return census
        last = settled
        time.sleep(0.5)


def census_problems(census: dict[str, Any], *, flushed: bool = False) -> list[str]:
    """Problems in a census of an idle server; `flushed`: whether everything must be free."""
    found = []
    if not census["idle"] or any(census["busy"].values()):
        found.append(f"requests or transfers left: {census['busy']}")
    requests = census["requests"]
    if requests["free_slots"] != requests["slots"]:
        found.append(f"{requests['slots'] - requests['free_slots']} request slots are not free")
    device, host = census["device"], census["host"]
    for name, tier in (("device", device), ("host", host)):
        if tier is None:
            continue
        if tier["nowhere"]:
            found.append(f"{name}: {tier['nowhere']} pages leaked, such as {tier['nowhere_pages']}")
        if tier["twice"]:
            found.append(f"{name}: {tier['twice']} pages in two places, such as {tier['twice_pages']}")
        if tier["free"] * tier["page_size_tokens"] != tier["available_tokens"]:
            found.append(
                f"{name}: SGLang counts {tier['available_tokens']} tokens free, its list {tier['free']} pages"
            )
        if flushed and tier["free"] != tier["pages"]:
            found.append(f"{name}: {tier['free']} of {tier['pages']} pages free after a flush")
    in_tree = device["evictable_tokens"] + device["protected_tokens"]
    if device["available_tokens"] + in_tree != device["size_tokens"]:
        found.append(f"device: SGLang's sums do not give {device['size_tokens']} tokens: {device}")
    if in_tree != device["in_tree"] * device["page_size_tokens"]:
        found.append(f"device: {device['in_tree']} pages in the tree, but SGLang's counts differ: {device}")
    if device["protected_tokens"]:
        found.append(f"device: {device['protected_tokens']} tokens locked without a running request")
    if host is not None and host["marked_otherwise"]:
        found.append(
            f"host: {host['marked_otherwise']} pages marked as used, not in the tree, or the reverse"
        )
    if host is not None and host["lost_in_tree"]:
        found.append(f"host: {host['lost_in_tree']} pages of the tree were lost in their backup")
    if census["tree"]["problem"]:
        found.append(f"SGLang's check of its tree: {census['tree']['problem']}")
    if census["bytes"] and census["bytes"]["different_pages"]:
        found.append(
            f"{census['bytes']['different_pages']} pages differ between device and host: host pages "
            f"{census['bytes']['different']}"
        )
    watch = census["transfers"]
    if watch and watch["problems"] and not flushed:  # reported before the flush
        found.append(f"{watch['wrong_pages']} pages transferred wrongly: {watch['problems']}")
    return found


def memory_problems(censuses: Sequence[dict[str, Any]], limit_bytes: int) -> list[str]:
    """Problem if the scheduler's memory grew by more than a limit after the first round of traffic."""
    if len(censuses) < CENSUSES:
        return []
    first, last = (census["resident_bytes"] for census in (censuses[1], censuses[-1]))
    if last - first <= limit_bytes:
        return []
    return [
        f"the scheduler's memory grew from {first / 1e6:.0f} to {last / 1e6:.0f} MB after the first round"
    ]


def counters(metrics: str) -> dict[str, float]:
    """Sums over processes of a server's `/metrics`, by name and relevant labels."""
    keep = ("direction", "kind", "cache_source", "reason")
    found: dict[str, float] = {}
    for name, labels, value in _SAMPLE.findall(metrics):
        kept = [f'{k}="{v}"' for k, v in re.findall(r'(\w+)="([^"]*)"', labels) if k in keep]
        key = name + ("{" + ",".join(kept) + "}" if kept else "")
        found[key] = found.get(key, 0.0) + float(value)
    return found


def metrics_problems(values: dict[str, float], census: dict[str, Any]) -> list[str]:
    """Failures that the server counted, and our transferred bytes that differ from SGLang's token counts."""
    found = [
        f"{name} is {value:.0f}"
        for name, value in values.items()
        if name.startswith("sgl_kvpool_failures_total") and value
    ]
    host = census["host"]
    if host is None or not census["bytes"]:
        return found
    for direction, tokens in MOVED.items():
        ours = values.get(f'sgl_kvpool_transfer_bytes_total{{direction="{direction}"}}', 0)
        theirs = values.get(tokens, 0)
        if ours != theirs * host["token_bytes"]:
            found.append(
                f"{ours:.0f} bytes moved {direction}; SGLang counts {theirs:.0f} tokens, of "
                f"{host['token_bytes']} bytes"
            )
    return found


def watch_problems(values: dict[str, float], census: dict[str, Any]) -> list[str]:
    """Tokens that SGLang backed up or loaded and that the comparison of transfers, on a CPU, did not see."""
    watched = census["transfers"] or {"backed_up_pages": 0, "loaded_pages": 0}
    found = []
    for pages, name in zip(("backed_up_pages", "loaded_pages"), MOVED.values(), strict=True):
        compared = watched[pages] * census["device"]["page_size_tokens"]
        if compared != values.get(name, 0):
            found.append(
                f"{name} is {values.get(name, 0):.0f}, but the transfers of {compared} were compared"
            )
    return found


def log_problems(log: str) -> list[str]:
    """The first 10 unexpected lines of a server's log."""
    lines = [line for line in log.splitlines() if _BAD_LINES.search(line)]
    return [line[:400] for line in lines[:10]]


def too_few(record: dict[str, Any], device_tokens: int, *, has_store: bool) -> list[str]:
    """Conditions that the traffic of a soak did not reach, so that its checks are not meaningful.

    `record`: Of `leg.soak`.
    `device_tokens`: Tokens of the pool.
    """
    found = []
    if record["answers_complete"] < ANSWERS:
        found.append(f"{record['answers_complete']} answers, fewer than {ANSWERS}")
    if record["answers_given_up"] < 2:
        found.append(f"aborted requests: {record['answers_given_up']}, fewer than 2")
    evicted = record["server_counts"]["evicted_tokens"]
    if evicted <= device_tokens:
        found.append(f"{evicted} tokens evicted from a pool of {device_tokens}")
    # Bytes moved are compared with these counters, and 0 bytes would equal 0 tokens.
    found += [
        f"{name.replace('_', ' ')}: 0"
        for name in ("backed_up_tokens", "loaded_tokens")
        if not record["server_counts"][name]
    ]
    if record["censuses"] < CENSUSES:
        found.append(f"{record['censuses']} censuses, fewer than {CENSUSES}: growth of memory not checked")
    tiers = {"device": "on the device", "host": "in the host tier", "storage": "in the store"}
    if not has_store:
        del tiers["storage"]
    found += [
        f"nothing found {where}" for tier, where in tiers.items() if not record["found_tokens"].get(tier)
    ]
    return found
