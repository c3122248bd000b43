"""Loaded by SGLang in each scheduler process: digests of all rows of a backup, before ranks divide them.

One line for each backup, in a file for each rank of the folder that the variable ROWS_SEEN names.
"""

import os
from pathlib import Path

import torch
import xxhash
from sglang.srt.runtime_context import get_parallel

from sgl_kvpool.srt.host.rows import HierarchicalMLAHostPool

_backup = HierarchicalMLAHostPool.backup_from_device_all_layer


def backup(self, device_pool, host_indices, device_indices, io_backend):
    folder = os.environ.get("ROWS_SEEN")
    if folder is not None:
        digest = xxhash.xxh3_64()
        for layer in device_pool.kv_buffer:
            digest.update(layer[device_indices].contiguous().view(torch.uint8).numpy())
        with (Path(folder) / f"rows-{get_parallel().tp_rank}").open("a") as file:
            file.write(f"{len(device_indices)} {digest.hexdigest()}\n")
    _backup(self, device_pool, host_indices, device_indices, io_backend)


HierarchicalMLAHostPool.backup_from_device_all_layer = backup
