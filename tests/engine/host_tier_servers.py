"""Servers with a host tier and SGLang's `file` store: what they are started with and asked, and their store.

Two folders, each for some layouts in turn: the first server of a folder fills it, the next has another layout
and finds nothing, and then each layout is served once more, in another arrangement, and finds its own pages.
The first servers are also those that tests/engine/test_serving.py asks about their layout.
"""

import os
import time
from itertools import pairwise
from pathlib import Path
from urllib.error import HTTPError

from codec_oracle import LAYOUTS

PAGE_SIZE, DEVICE_TOKENS, HOST_TOKENS = 16, 1024, 8192
#: Layouts that share a folder, in the order of their servers.
SHARED = [tuple(LAYOUTS[:2]), tuple(LAYOUTS[2:])]
#: Arrangement of the second server of each layout; that of the first is layer_major.
AGAIN_ARRANGEMENT = {
    **dict.fromkeys(LAYOUTS, "page_major"),
    **dict.fromkeys(["fp8_block_scale", "fp4"], "token_major"),
}
#: Names of the servers by layout.
FIRST = {layout: f"{layout}-layer_major" for layout in LAYOUTS}
AGAIN = {layout: f"{layout}-{AGAIN_ARRANGEMENT[layout]}" for layout in LAYOUTS}
#: Server: the server that has to end before it starts.
AFTER = {
    name: before
    for layouts in SHARED
    for before, name in pairwise([servers[layout] for servers in (FIRST, AGAIN) for layout in layouts])
}

ARGUMENTS = [
    *("--enable-hierarchical-cache", "--hicache-ratio", str(HOST_TOKENS // DEVICE_TOKENS)),
    *("--max-total-tokens", str(DEVICE_TOKENS), "--page-size", str(PAGE_SIZE)),
    *("--enable-metrics", "--enable-cache-report"),
]
STORE_ARGUMENTS = [
    *("--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete"),
    # SGLang fetches 256 tokens and more from a store unless told otherwise.
    *("--hicache-storage-backend-extra-config", '{"prefetch_threshold": 16}'),
    *("--served-model-name", "tiny"),
]
#: The server that takes SGLang for a version that is not tested, and checks itself when it starts.
SELF_CHECKED = FIRST["fp4"]
#: A server without a store whose backups all fail.
LOSSY = "fp4-lossy"
#: The server that is paused and flushed.
PAUSED = FIRST["fp8_block_scale"]
#: Servers with other values of SGLang's host tier options than the defaults.
CHOICES = {
    FIRST["bf16"]: ["--hicache-io-backend", "direct"],
    FIRST["fp8"]: ["--hicache-mem-layout", "page_first_direct"],
    AGAIN["fp8_block_scale"]: ["--hicache-write-policy", "write_back"],
    AGAIN["fp4"]: ["--hicache-write-policy", "write_through_selective"],
}

#: Other texts, long enough to push everything else out of the device pool together.
FILLERS = ["".join(chr(33 + (i * (7 + k) + k) % 90) for i in range(400)) for k in range(4)]
#: Which page of the first filler is damaged between the two servers of a layout.
DAMAGED_PAGE = 20


def environment(here, root, name):
    """Environment of a server; `root` is common to all servers."""
    layout = name.rpartition("-")[0]
    folder = root / f"store-{next('-'.join(layouts) for layouts in SHARED if layout in layouts)}"
    return {
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "roomy_models",
        "PYTHONPATH": str(here),
        "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder),
    }


def stored(folder, layout):
    """Files of a layout's pages in a store."""
    folder = Path(folder)
    return sorted(folder.glob(f"*_tiny-{layout}-r512-*.bin")) if folder.exists() else []


def damage(folder, layout):
    """Damage one file of the first filler; how depends on the layout, alike for both FP4 layouts."""
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    keys = get_storage_hash_str(list(FILLERS[0].encode()), None, page_size=PAGE_SIZE)
    bad, other = (next(Path(folder).glob(f"{keys[page]}_tiny-{layout}-r512-*.bin"))
                  for page in (DAMAGED_PAGE, DAMAGED_PAGE - 1))  # fmt: skip
    raw = bytearray(bad.read_bytes())
    if layout == "bf16":
        bad.write_bytes(raw[: len(raw) // 2])
    elif layout == "fp8":
        raw[1234] ^= 0x10
        bad.write_bytes(raw)
    elif layout == "fp8_block_scale":
        bad.write_bytes(other.read_bytes())
    else:
        bad.write_bytes(os.urandom(len(raw)))


def ask(server, long_prompt, greedy):
    """A hit on the device, the fillers, which push it out, and a hit on the host."""

    def generate(text):
        return server.generate(text=text, sampling_params=greedy, return_logprob=True)

    found = {"device_hit": generate(long_prompt), "fillers": [generate(text) for text in FILLERS]}
    found["host_hit"] = generate(long_prompt)
    found["metrics"] = server.get("/metrics").decode()
    return found


def pause_and_flush(server, greedy):
    """Pause while an answer's pages are still being stored; status of each flush until one is 200."""
    server.generate(text="".join(chr(33 + i * 11 % 90) for i in range(400)), sampling_params=greedy)
    server.post("/pause_generation", mode="retract")
    statuses, deadline = [], time.monotonic() + 20
    while statuses[-1:] != [200] and time.monotonic() < deadline:
        try:
            server.get("/flush_cache")
            statuses.append(200)
        except HTTPError as error:
            statuses.append(error.code)
            time.sleep(0.5)
    server.post("/continue_generation")
    return statuses


def wait_for_store(folder, quiet_seconds=2.0, limit_seconds=60.0):
    """Wait until the store's threads have written what they were given."""
    deadline, names, since = time.monotonic() + limit_seconds, None, time.monotonic()
    while time.monotonic() < deadline:
        now = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        if now != names:
            names, since = now, time.monotonic()
        elif time.monotonic() - since > quiet_seconds:
            return
        time.sleep(0.1)
