"""`sgl-kvpool demo --cluster`: a store, prefill and decode servers and a router, for some layouts in turn."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sgl_kvpool.commands.arguments import naming
from sgl_kvpool.commands.evaluate.measure import ask
from sgl_kvpool.commands.processes.local_server import free_port, running
from sgl_kvpool.commands.processes.progress import progress
from sgl_kvpool.commands.processes.server import FAILURES, in_words
from sgl_kvpool.commands.tables import aligned
from sgl_kvpool.demo.cluster import servers
from sgl_kvpool.demo.cluster.mooncake_store import MooncakeStore
from sgl_kvpool.demo.model import model_path
from sgl_kvpool.folders import replace_file
from sgl_kvpool.layout import MLAKVCacheLayout

#: Default layouts: each takes a minute and a half on two cores.
LAYOUTS = (MLAKVCacheLayout.BF16, MLAKVCacheLayout.FP4)

#: Two of four prompts fit into the prefill server's pool, so the others are in its host tier only.
_PROMPTS = 4

#: Modules of the extra `distributed`.
NEEDED = ("mooncake", "nixl", "sglang_router")
_FOLDER, _RESULTS = "cluster", "cluster.json"


def compare_clusters(layouts: Sequence[MLAKVCacheLayout], folder: Path) -> int:
    """Start a store, and one cluster per layout in turn; print a table, write `folder`/cluster.

    Returns exit status 1 if a server failed, or an answer differs from that of one server.
    """
    model = model_path()
    folder = folder / _FOLDER
    with naming("--out", folder):
        folder.mkdir(parents=True, exist_ok=True)
    (folder / _RESULTS).unlink(missing_ok=True)
    texts = servers.prompts(_PROMPTS)
    print(
        f"model: {model}\n"
        f"{_PROMPTS} prompts of {servers.PROMPT_TOKENS} bytes, pages of {servers.PAGE_SIZE}; "
        "device: cpu; the servers, the router and Mooncake's master listen on 127.0.0.1,\n"
        "Mooncake's store service and clients on all interfaces (0.0.0.0): use a machine of your own",
        flush=True,
    )
    results: list[dict[str, Any]] = []
    status = 0
    try:
        with progress("cluster") as reached, MooncakeStore(folder) as store:
            for number, layout in enumerate(layouts, 1):
                what = f"[{number}/{len(layouts)}] {layout}"
                reached(what)
                results.append(_compare(layout, texts, store, folder))
                print(f"{what}: asked", flush=True)
    except FAILURES as error:
        print(f"failed: {in_words(error)}\nthe logs: {folder}", flush=True)
        status = 1
    if results:
        print(f"\n{_table(results)}\n")
        text = json.dumps({"prompts": texts, "results": results}, indent=1)
        replace_file(folder / _RESULTS, text + "\n")
        print(f"all numbers: {folder / _RESULTS}")
    if not all(result["same_answers"] for result in results):
        print("failed: prefill and decode servers gave other answers than one server")
        status = 1
    return status


def _compare(
    layout: MLAKVCacheLayout, texts: list[str], store: MooncakeStore, folder: Path
) -> dict[str, Any]:
    """Send the same requests to the cluster of a layout and to one server; the result's JSON."""
    port = free_port()
    prefill = servers.small_server(
        layout.value,
        servers.peer_arguments("prefill", "mooncake_tcp", port) + servers.store_arguments("mooncake"),
        folder / f"prefill-{layout}.log",
        {**servers.peer_environment(), **store.environment},
    )
    decode = servers.small_server(
        layout.value,
        servers.peer_arguments("decode", "mooncake_tcp"),
        folder / f"decode-{layout}.log",
        servers.peer_environment(),
    )
    front = servers.router(folder / f"router-{layout}.log", prefill=[(prefill, port)], decode=[decode])
    with running(prefill, decode), front:
        # SGLang's client has already stored an entry of its own.
        keys, stored_bytes = len(store.page_keys()), store.stored_bytes()
        answers = [ask(front, text) for text in texts]
        pages = len(texts) * servers.CACHED_PAGES
        servers.until(lambda: len(store.page_keys()) - keys >= pages, f"{pages} pages in the store")
        transferred_bytes = servers.metric_sum(prefill, "sglang:kv_transfer_total_mb_sum") * (1 << 20)
        stored_bytes = store.stored_bytes() - stored_bytes
        # The last prompt is on the device, the first prompt in the host tier only. After the flush, the
        # second prompt is in the store only.
        answers += [ask(front, texts[-1]), ask(front, texts[0])]
        prefill.get("/flush_cache?timeout=30")
        answers.append(ask(front, texts[1]))
    # All prompts fit into its pool, so all hits are on the device.
    with servers.small_server(
        layout.value, [], folder / f"one-{layout}.log", {}, pool_tokens=2 * servers.POOL_TOKENS
    ) as one:
        expected = [ask(one, text) for text in (*texts, texts[-1], texts[0], texts[1])]
    same = [[(a["ids"], a["logprobs"]) for a in some] for some in (answers, expected)]
    return {
        "layout": layout.value,
        # Of a page in all layers: sent from prefill to decode; in the store, with padding and checksum.
        "transferred_page_bytes": transferred_bytes / (len(texts) * (servers.CACHED_PAGES + 1)),
        "stored_page_bytes": stored_bytes / pages,
        "prompt_tokens": servers.PROMPT_TOKENS,
        # Tokens of a prompt that the prefill server found, by place.
        "found": {
            place: (answer["details"] or {}).get(place, 0)
            for place, answer in zip(("device", "host", "storage"), answers[-3:], strict=True)
        },
        # In tokens and log-probabilities.
        "same_answers": same[0] == same[1],
        "answers": answers,
    }


def _table(results: Sequence[dict[str, Any]]) -> str:
    page, prompt = "bytes per page", f"of {servers.PROMPT_TOKENS} tokens"
    rows: list[tuple[object, ...]] = [
        ("layout", page, page, prompt, prompt, prompt, "answers"),
        (
            "",
            "sent to decode",
            "in the store",
            "on device",
            "in host memory",
            "in the store",
            "as one server's",
        ),
    ]
    for result in results:
        size = [f"{result[f'{name}_page_bytes']:.0f}" for name in ("transferred", "stored")]
        found = [result["found"][place] for place in ("device", "host", "storage")]
        rows.append((result["layout"], *size, *found, "the same" if result["same_answers"] else "OTHERS"))
    return "\n".join(aligned(rows))
