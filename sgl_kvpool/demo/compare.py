"""`sgl-kvpool demo`: real SGLang serves the demo model once per layout; one table says what came out."""

from __future__ import annotations

import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sgl_kvpool import env
from sgl_kvpool.demo.server import Server, ServerFailed, cpu_arguments, free_port
from sgl_kvpool.layout import MLAKVCacheLayout

__all__ = ["compare"]

#: Tokens that bf16 gets; every layout gets as many as fit into the same bytes.
_BF16_TOKENS = 16384

_PROMPTS = (
    "def parse(text, *, strict=False):\n    lines = text.splitlines()\n    for line in",
    "import os\n\nclass Reader:\n    def __init__(self, path):\n        self.path =",
)
_NEW_TOKENS = 48


def compare(layouts: Sequence[MLAKVCacheLayout]) -> int:
    """Serve every layout in turn and print a table; returns the exit status.

    The model has random weights, so its text means nothing: what the table shows is the size of a row, how
    many tokens the same memory holds, and how many greedy tokens equal those of the first layout.
    """
    from sgl_kvpool.demo.checkpoint import write_random_model

    for ending in (signal.SIGTERM, signal.SIGHUP):
        # As Ctrl-C does: leave through the `with` blocks, so that no server is left behind.
        signal.signal(ending, lambda received, frame: sys.exit(128 + received))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="sgl-kvpool-demo-") as folder:
        model_path = write_random_model(Path(folder) / "model")
        print("model: 3 layers of MLA (latent 512, rope 64), random weights; device: cpu", flush=True)
        for number, layout in enumerate(layouts, 1):
            print(f"[{number}/{len(layouts)}] {layout}: starting SGLang ...", end=" ", flush=True)
            log = Path(folder) / f"{layout}.log"
            try:
                rows.append(_serve(layout, model_path, log))
            except (ServerFailed, OSError) as error:
                kept = shutil.copy(log, tempfile.mkdtemp(prefix="sgl-kvpool-log-"))
                print(f"failed: {error}\nthe server's whole output is in {kept}")
                return 1
            print(f"served after {rows[-1]['start_seconds']:.0f} s", flush=True)
    _print(rows)
    return 0


def _serve(layout: MLAKVCacheLayout, model_path: Path, log: Path) -> dict[str, Any]:
    fmt = layout.row_format(512, 64)
    bf16 = MLAKVCacheLayout.BF16.row_format(512, 64)
    tokens = _BF16_TOKENS * bf16.row_bytes // fmt.row_bytes
    arguments = cpu_arguments(model_path, free_port(), max_total_tokens=tokens)
    began = time.monotonic()
    with Server(
        [*arguments, "--kv-cache-layout", layout.value], log, {env.PREFILL_READS_ROWS: "1"}
    ) as server:
        started = time.monotonic() - began
        info = server.info()
        gigabytes = re.search(r"sgl-kvpool: KV cache layout .* ([0-9.]+) GB", log.read_text(errors="replace"))
        sampling = {"temperature": 0, "max_new_tokens": _NEW_TOKENS, "ignore_eos": True}
        answers = server.generate(text=list(_PROMPTS), sampling_params=sampling)
    return {
        "layout": info["kv_cache_layout"],
        "row_bytes": fmt.row_bytes,
        "tokens": info["max_total_num_tokens"],
        "backend": info["attention_backend"],
        "pool_gb": gigabytes[1] if gigabytes else "?",
        "output_ids": [answer["output_ids"] for answer in answers],
        "text": answers[0]["text"],
        "start_seconds": started,
    }


def _print(rows: Sequence[dict[str, Any]]) -> None:
    first = rows[0]
    total = sum(map(len, first["output_ids"]))
    print()
    print(
        f"{'layout':16} {'bytes per token':>15} {'pool':>8} {'tokens it':>10} {'attention':>11} "
        f"{'greedy tokens':>14}  sample"
    )
    print(f"{'':16} {'and layer':>15} {'GB':>8} {'holds':>10} {'backend':>11} {'as ' + first['layout']:>14}")
    for row in rows:
        same = sum(
            a == b
            for mine, theirs in zip(row["output_ids"], first["output_ids"], strict=True)
            for a, b in zip(mine, theirs, strict=True)
        )
        print(
            f"{row['layout']:16} {row['row_bytes']:15} {row['pool_gb']:>8} {row['tokens']:10} "
            f"{row['backend']:>11} "
            f"{f'{same} of {total}':>14}  {row['text'][:24]!r}"
        )
    print(
        "\nThe weights are random: the two best tokens are often nearly tied, and one that differs changes\n"
        "all that follow. The sizes mean something here, the agreement of tokens does not."
    )
