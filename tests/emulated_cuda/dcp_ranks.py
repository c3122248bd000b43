"""One rank of decode context parallelism: SGLang's DeepSeek layer over our pool, in every form of attention.

Ranks have other heads, and their own weights for them. Each compares its output with float64, which reads
every stored row in the pool of the rank that owns it.
"""

import os
import random
from pathlib import Path

import numpy as np
import test_cuda_backend_gpu as backend_cases
import test_deepseek_layer_gpu as layer_cases
import torch
import torch.distributed as dist
from codec_oracle import decode
from host_tier import controller_over, tier_of
from test_deepseek_layer_gpu import LAYER, LONGEST, NOPE, OUTPUT_ERROR, RANK, ROPE, V_DIM, distance

from sgl_kvpool.sglang_plugin import hook_groups
from sgl_kvpool.sglang_plugin.hooks import attention
from sgl_kvpool.srt.self_check import check_backend, check_rows, check_tier
from sgl_kvpool.transfer.host_options import HostTierOptions

HEADS = backend_cases.HEADS
#: Prefills of two requests, one behind the other, and a decode: lengths, and how many are stored before.
FIRST, SECOND, DECODE = ([8, 4], [0, 0]), ([14, 19], [8, 4]), ([15, 20], [14, 19])
#: Prefixes that end within a group of ranks, as behind a chunk of odd length.
UNEVEN = ([15, 21], [13, 19])


def publish_ranks(rank, ranks, folder, merge):
    """SGLang's runtime context and process groups of a server whose ranks share one prefix pool."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(
        model_path="dummy", device="cuda", tp_size=ranks, dcp_size=ranks, dcp_comm_backend=merge,
        enable_hierarchical_cache=True, hicache_ratio=2.0, hicache_mem_layout="page_first",
        hicache_io_backend="kernel",
    )  # fmt: skip
    publish(args, role="scheduler", ranks=SpawnRanks(rank, None, 0))
    meet = dist.FileStore(str(Path(folder) / "meet"), ranks)
    dist.init_process_group("gloo", store=meet, rank=rank, world_size=ranks)
    parallel_state.init_distributed_environment(ranks, rank, local_rank=0, backend="gloo")
    parallel_state.set_custom_all_reduce(False)
    parallel_state.initialize_model_parallel(backend="gloo")


class Layer(layer_cases.Layer):
    """This rank's heads of the layer, with its pool and backend."""

    def __init__(self, rank, ranks, layout, **options):
        self.rank, self.ranks = rank, ranks
        super().__init__(layout, **options)
        self._own_heads()
        pool, table = self.case.pool, self.case.table.req_to_token
        # Pages of SGLang's allocator: page_size slots of every rank, in a random order.
        page = pool.page_size * ranks
        pages = list(range(1, pool.size // pool.page_size))
        random.Random(5).shuffle(pages)
        count = -(-LONGEST // page)
        self.slots = [
            torch.tensor([p * page + i for p in pages[n * count : (n + 1) * count] for i in range(page)])[
                :LONGEST
            ].cuda()
            for n in range(2)
        ]
        for row, own in zip(self.case.requests, self.slots, strict=True):
            table[row, :LONGEST] = own.int()

    def _own_heads(self):
        """Weights of this rank's heads, absorbed as in `build_layer`."""
        layer, generator = self.attention, torch.Generator().manual_seed(100 + self.rank)
        with torch.no_grad():
            for name in ("q_b_proj", "kv_b_proj", "o_proj"):
                weight = getattr(layer, name).weight
                weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5)
            weights = layer.kv_b_proj.weight.data.unflatten(0, (-1, NOPE + V_DIM))
            w_kc, w_vc = weights.split([NOPE, V_DIM], dim=1)
            layer.w_kc = w_kc.transpose(1, 2).contiguous().transpose(1, 2)
            layer.w_vc = w_vc.contiguous().transpose(1, 2)

    def prepare(self, batch):
        """What SGLang's runner adds to a prefill (`EagerRunner.forward_extend`)."""
        from sglang.srt.layers.dcp.planner import prepare_decode_context_parallel_metadata
        from sglang.srt.model_executor.forward_batch_deepseek_mha_mixin import (
            create_chunked_prefix_cache_kv_indices,
        )

        if batch.forward_mode.is_decode():
            return
        pool = self.case.pool
        batch.attn_dcp_metadata = prepare_decode_context_parallel_metadata(
            batch.seq_lens, batch.extend_prefix_lens, batch.extend_prefix_lens_cpu, batch.extend_seq_lens,
            batch.req_pool_indices, self.case.table.req_to_token, batch.seq_lens_sum,
            pool.get_kv_buffer_shape()[0], pool.dtype, "cuda", create_chunked_prefix_cache_kv_indices,
        )  # fmt: skip

    def replayed(self, recorded, step):
        """A decode by a CUDA graph that was recorded for other lengths."""
        batch, hidden = self.inputs("DECODE", *recorded)
        other, other_hidden = self.inputs("DECODE", *step)
        graph = torch.cuda.CUDAGraph()
        with self.running(batch):
            self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                self.backend.init_forward_metadata_in_graph(batch)
                out, _ = self.forward(batch, hidden)
        for name in ("seq_lens", "out_cache_loc", "positions"):
            getattr(batch, name).copy_(getattr(other, name))
        hidden.copy_(other_hidden)
        graph.replay()
        return out.cpu()

    def stored(self, request, length):
        """Values of a request's first rows, each from the pool of the rank that owns it, float64."""
        pool = self.case.pool
        own = pool.get_row_buffer(LAYER).squeeze(1).cpu().contiguous()
        everyones = [torch.empty_like(own) for _ in range(self.ranks)]
        dist.all_gather(everyones, own)
        slots = self.slots[request][:length].cpu()
        rows = np.stack(
            [everyones[s % self.ranks][int(pool.slot_to_row(s // self.ranks))].numpy() for s in slots]
        )
        values = decode(rows, self.case.layout, RANK, ROPE, pool.k_scale(LAYER))
        return torch.from_numpy(values).double()


def forms(rank, ranks, layout, engine="kernel", **options):
    """Distances of each form's output from float64 over the rows that it should read."""
    layer = Layer(rank, ranks, layout, host_tier=HostTierOptions(engine=engine), **options)
    found = {}

    def check(name, step, mode, form, stored):
        out, method = layer.run(mode, *step)
        assert method == form, (name, method)
        found[name] = distance(out, layer.wanted(*step, stored))

    check("first prefill", FIRST, "EXTEND", "MHA_ONE_SHOT", [0, 0])
    prefixes = SECOND[1]
    layer.attention.chunked_prefix_cache_threshold = sum(prefixes) + 1
    check("absorbed prefill", SECOND, "EXTEND", "MLA", prefixes)
    layer.attention.chunked_prefix_cache_threshold = sum(prefixes)
    # With one rank, SGLang reads the new tokens' rows back too.
    check("one shot", SECOND, "EXTEND", "MHA_ONE_SHOT", prefixes)
    os.environ["SGLANG_MAX_KV_CHUNK_CAPACITY"] = "10"  # chunks of 5: their starts are not multiples of ranks
    check("chunked", SECOND, "EXTEND", "MHA_CHUNKED_KV", prefixes)
    del os.environ["SGLANG_MAX_KV_CHUNK_CAPACITY"]
    check("decode", DECODE, "DECODE", "MLA", DECODE[0])
    layer.attention.chunked_prefix_cache_threshold = sum(UNEVEN[1]) + 1
    check("uneven prefixes", UNEVEN, "EXTEND", "MLA", UNEVEN[1])
    later = [16, 21], [15, 20]
    found["graph"] = distance(layer.replayed(DECODE, later), layer.wanted(*later, later[0]))
    assert check_rows(layer.case.pool) == "rows of 3 of 3 layers"
    assert "attention of 3 requests" in check_backend(layer.backend, layer.attention.attn_mqa_for_dcp_decode)
    controller = controller_over(layer.case.pool, dist.group.WORLD, "kernel")
    controller.write_fence_stream = controller.load_fence_stream = torch.cuda.current_stream()
    assert check_tier(controller, lambda good: good) == "2 pages to the host tier and back"
    tier_of(controller).destroy()
    return found


def main(rank, ranks, folder, merge, cases):

    from sgl_kvpool.transfer import gpu_engine

    layer_cases.HEADS = HEADS // ranks
    publish_ranks(rank, ranks, folder, merge)
    attention.register_names()
    hook_groups.apply(hook_groups.named("host tier"))
    gpu_engine.KERNEL_BLOCKS = 3
    for layout, options in cases:
        for name, error in forms(rank, ranks, layout, **options).items():
            print(rank, layout, options, name, error, flush=True)
            assert error < OUTPUT_ERROR, (layout, options, name, error)
    dist.barrier()
