"""Servers of a soak, and the servers of their cold runs."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

from scripts.kit.environment import on_path
from scripts.soak.in_server import BREAK
from sgl_kvpool import env
from sgl_kvpool.commands.named_model import find_model
from sgl_kvpool.commands.processes.server import Server, cpu_arguments, free_port
from sgl_kvpool.demo.model import model_path
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.transfer.host_options import NARROWEST_HOST_LAYOUT

#: Makes SGLang compare its own counts of tokens after every step, not only when it is idle, and search for
#: pages that are both free and in use, or free twice. A scheduler that finds a problem ends.
_SGLANG_CHECKS = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
#: Limits torch's caches of compiled matrix multiplications on a CPU. They have an entry per shape; with their
#: default of up to 1024 entries they take 1.3 GB in a soak, which would hide a leak.
_FEW_COMPILED = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16", "LRU_CACHE_CAPACITY": "16"}


@dataclass(frozen=True)
class Leg:
    """One server of a soak.

    `layout`, `arrangement`, `host_layout`: Values of the server's arguments.
    `arguments`: Other arguments.
    `store`: Whether SGLang's `file` store is behind the host tier.
    `model`: Checkpoint for a GPU, a path or a name on Hugging Face; None for the demo's model on the CPU.
    `device_tokens`: Tokens of the pool.
    `host_ratio`: Bytes of the host tier per byte of the pool.
    `sparse`: Whether the model has sparse attention (DSA), for which some arguments are refused.
    """

    name: str
    layout: str
    arrangement: str = "auto"
    host_layout: str = "same"
    page_size_tokens: int = 64
    arguments: tuple[str, ...] = ()
    store: bool = False
    model: str | None = None
    device_tokens: int = 2048
    host_ratio: int = 2
    sparse: bool = False

    @property
    def rounds_on_the_way(self) -> bool:
        """Whether rows loaded from the host may differ from the rows that were backed up."""
        return self.host_layout not in ("same", self.layout)

    def base(self, port: int) -> list[str]:
        """Arguments of this server and of its cold run's server."""
        if self.model is None:
            arguments = cpu_arguments(model_path(), port, max_total_tokens=self.device_tokens)
        else:
            arguments = ["--model-path", self.model, "--port", str(port)]
            arguments += ["--max-total-tokens", str(self.device_tokens)]
        return [
            *arguments,
            *("--kv-cache-layout", self.layout, "--page-size", str(self.page_size_tokens)),
            *("--random-seed", "0", "--enable-cache-report", "--enable-metrics"),
        ]


#: Settings with every arrangement and write policy, two of them with a store. Layouts take them in turn.
_SETTINGS: tuple[dict[str, Any], ...] = (
    {
        "arrangement": "token_major",
        "page_size_tokens": 16,
        # Admits more requests than SGLang's default.
        "arguments": ("--schedule-conservativeness", "0.1"),
    },
    {
        "arrangement": "page_major",
        "page_size_tokens": 32,
        "arguments": ("--hicache-write-policy", "write_back"),
    },
    {
        "arrangement": "layer_major",
        "page_size_tokens": 16,
        "arguments": ("--hicache-write-policy", "write_through_selective", "--hicache-io-backend", "direct"),
        "store": True,
    },
    {"arrangement": "page_major", "page_size_tokens": 32, "store": True},
)
_OWN = tuple(
    Leg(layout.value, layout.value, **settings)
    for layout, settings in zip(MLAKVCacheLayout, cycle(_SETTINGS), strict=False)
)
#: Servers in order: one of each layout, the first of them followed by one with a narrower host tier.
LEGS = (
    _OWN[0],
    Leg(
        f"{_OWN[0].layout}-on-{NARROWEST_HOST_LAYOUT}", _OWN[0].layout, "page_major",
        NARROWEST_HOST_LAYOUT, store=True,
    ),
    *_OWN[1:],
)  # fmt: skip


def of_model(leg: Leg, model: str) -> Leg:
    """A leg of a checkpoint on a GPU; one with sparse attention has only one page size and arrangement.

    ValueError: if the model does not exist, or its config.json is invalid.
    """
    leg = replace(leg, model=model, device_tokens=8192)
    text = find_model(model).config
    config = {} if text is None else json.loads(text)  # a name on Hugging Face counts as dense
    text_config = config.get("text_config")  # multimodal models
    configs = (config, text_config if isinstance(text_config, dict) else {})
    if all(one.get("index_topk") is None for one in configs):
        return leg
    return replace(leg, sparse=True, page_size_tokens=64, arrangement="layer_major")


def _environment(leg: Leg, extra: dict[str, str]) -> dict[str, str]:
    return {
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "scripts.soak.in_server" + (".demo" if leg.model is None else ""),
        "PYTHONPATH": on_path()["PYTHONPATH"],
        # Otherwise a chunk's queries attend its rows as computed, and queries of later chunks attend them as
        # stored. The variable has no effect on sparse attention, and a server of such a model refuses it.
        **({} if leg.sparse else {env.PREFILL_READS_ROWS: "1"}),
        **(_FEW_COMPILED if leg.model is None else {}),
        **extra,
    }


def soaked_server(
    leg: Leg, folder: Path, store: str | Path, server_args: Sequence[str], breakages: Sequence[str]
) -> Server:
    """The soaked server, not yet started. Its log goes to `folder`, its store to `store`."""
    arguments = [
        *leg.base(free_port()),
        *("--kv-cache-arrangement", leg.arrangement, "--kv-host-layout", leg.host_layout),
        *("--enable-hierarchical-cache", "--hicache-ratio", str(leg.host_ratio)),
        # A prompt of half the pool is prefilled in chunks, with other requests in between.
        *("--chunked-prefill-size", str(leg.device_tokens // 8 // 64 * 64)),
        *leg.arguments,
    ]
    extra = {**_SGLANG_CHECKS, BREAK: ",".join(breakages)}
    if leg.store:
        config = json.dumps({"prefetch_threshold": leg.page_size_tokens})
        arguments += ["--hicache-storage-backend", "file", "--served-model-name", "soak"]
        arguments += ["--hicache-storage-backend-extra-config", config]
        extra["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(store)
    return Server([*arguments, *server_args], folder / f"{leg.name}.log", _environment(leg, extra))


def cold_server(leg: Leg, folder: Path, server_args: Sequence[str]) -> Server:
    """The cold run's server, not yet started: without prefix cache, host tier and store."""
    arguments = [*leg.base(free_port()), "--disable-radix-cache", *server_args]
    return Server(arguments, folder / f"{leg.name}-cold.log", _environment(leg, {}))
