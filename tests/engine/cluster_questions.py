"""Servers of the demo's small model with pages of 64 tokens, with or without a store, and their prompts."""

from programs import clean_environment

from sgl_kvpool.demo.cluster import servers
from sgl_kvpool.demo.cluster.servers import PAGE_SIZE
from sgl_kvpool.metrics import FAILURES

LAYERS = 3
TOKENS, PAGES, CACHED = servers.PROMPT_TOKENS, servers.CACHED_PAGES, servers.CACHED_PAGES * PAGE_SIZE
PROMPTS = servers.prompts(6)


def server(folder, name, layout, *arguments, environment):
    """A server that is not started yet; prefill reads rows."""
    environment = clean_environment(**{"KVPOOL_PREFILL_READS_ROWS": "1", **environment})
    return servers.small_server(layout, arguments, folder / f"{name}.log", environment)


def with_store(folder, name, layout, environment, backend, *arguments):
    """A server with a host tier over a store."""
    return server(
        folder, name, layout, *servers.store_arguments(backend), *arguments, environment=environment
    )


def same(answers):
    """The parts of answers that have to be equal between servers of one layout."""
    return [(answer["ids"], answer["logprobs"]) for answer in answers]


def failures(server):
    """`failures_in` of a server's metrics."""
    return failures_in(server.get("/metrics").decode())


def failures_in(metrics):
    """`sgl_kvpool_failures_total` by kind, those that are not 0; a kind without a line is an error."""
    found = {}
    for line in metrics.splitlines():
        if line.startswith("sgl_kvpool_failures_total{"):
            kind = line.partition('kind="')[2].partition('"')[0]
            found[kind] = found.get(kind, 0) + int(float(line.rpartition(" ")[2]))
    assert set(found) == set(FAILURES)
    return {kind: count for kind, count in found.items() if count}
