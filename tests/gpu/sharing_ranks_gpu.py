"""One of two processes that share a host tier on one device: stores its pages, and loads all of them.

`python sharing_ranks_gpu.py RANK FOLDER DEVICE`, with pytest's path. Needs SGLang, and no server.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from sgl_kvpool.layout import MLAKVCacheLayout

RANKS, LAYERS, PAGES, PAGE_SIZE = 2, 3, 9, 4
GUARD = 0xEE
#: Layout on the device, and on the host.
PAIRS = [*((layout.value, "same") for layout in MLAKVCacheLayout), ("bf16", "fp4"), ("fp8", "fp4_fp8_rope")]


def encoded(layout, tokens):
    """Rows of each layer, `[tokens, row_bytes]` uint8: what both ranks compute of the same tokens."""
    from sgl_kvpool.codec import encode_rows

    values = torch.randn(LAYERS, tokens, 576, generator=torch.Generator().manual_seed(0))
    fmt = MLAKVCacheLayout(layout).row_format(512, 64)
    return [encode_rows(layer[:, :512], layer[:, 512:], fmt).view(torch.uint8) for layer in values]


def there_and_back(ranks, layout, host, device):
    """Two trips of all pages: whether they came back unchanged, whether alike both times, and a digest."""
    from pools import device_pool

    from sgl_kvpool.srt.host.rows import HierarchicalMLAHostPool
    from sgl_kvpool.transfer.host_options import HostTierOptions

    options = {"device": device, "host_tier": HostTierOptions(host, sharing="node"), "start_layer": 0}
    pool = device_pool(layout, page_size=PAGE_SIZE, pages=PAGES, layers=LAYERS, **options)
    tier = HierarchicalMLAHostPool(pool, 1.0, 0, PAGE_SIZE, "page_first", node_ranks=ranks)
    tokens = (PAGES - 1) * PAGE_SIZE
    slots = torch.arange(PAGE_SIZE, PAGES * PAGE_SIZE, device=device)
    kept = tier.alloc(tokens)
    made = encoded(layout, tokens)

    def device_rows(layer):
        rows = pool.kv_buffer[layer].view(torch.uint8)
        return rows.view(rows.shape[0], -1)

    def trip():
        tier.backup_from_device_all_layer(pool, kept, slots, "kernel")
        finish()
        ranks.gather(None)  # as SGLang's agreement on finished backups
        stored = tier.kv_buffer.view(torch.uint8).clone()
        for layer in range(LAYERS):  # all first: engine staged loads layers in groups
            device_rows(layer).fill_(GUARD)
        for layer in range(LAYERS):
            tier.load_to_device_per_layer(pool, kept, slots, layer, "kernel")
        finish()
        ranks.gather(None)
        return stored, [device_rows(layer)[slots].cpu() for layer in range(LAYERS)]

    def finish():
        if device != "cpu":
            torch.cuda.synchronize()

    for layer in range(LAYERS):
        device_rows(layer)[slots] = made[layer].to(device)
    finish()
    stored, found = trip()
    same = all(torch.equal(a, b) for a, b in zip(found, made, strict=True))
    again_stored, again = trip()
    tier.destroy()  # or CUDA refuses to register the next tier at the same address
    return {
        "pages": tier.page_num,
        "same": same,
        "stable": torch.equal(stored, again_stored)
        and all(torch.equal(a, b) for a, b in zip(found, again, strict=True)),
        "digest": hash(stored.numpy().tobytes()),
        "empty": not bool(stored[: tier.page_num - 1].any()),
    }


def main(rank, folder, device):
    from sglang.srt.mem_cache.pool_host import base
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    from sgl_kvpool.srt.host.shared_segment import NodeRanks

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    meet = dist.FileStore(str(folder / "meet"), RANKS)
    dist.init_process_group("gloo", store=meet, rank=rank, world_size=RANKS)
    publish(ServerArgs(model_path="dummy", device=device), role="scheduler", ranks=SpawnRanks(0, None, 0))
    ranks = NodeRanks.of(dist.group.WORLD)
    # As SGLang does: batches of copies are refused on the default stream.
    if device != "cpu":
        torch.cuda.set_stream(torch.cuda.Stream())
    found = {f"{layout}-{host}": there_and_back(ranks, layout, host, device) for layout, host in PAIRS}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
