"""Two ranks (rank_processes.py) of prefill context parallelism: SGLang's strategy and DSA backend.

Each rank has every second token; keys are gathered and stored by both.
"""

import shutil
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from dsa_case import HEADS, RANK, ROPE, Case, SparseKernel, in_forward
from rank_processes import go_through

RANKS = 2
CONFIG = Path(__file__).resolve().parents[2] / "commands" / "plan" / "configs" / "deepseek_v32.json"
READS_ROWS = ("flashmla_sparse", "flashmla_sparse")
#: Lengths and prefixes of requests. 57 tokens are padded to 30 per rank; requests of one new token have none
#: on one of the ranks.
BATCHES = {
    "padded": ([9, 40, 8], [0, 0, 0]),
    "short": ([1, 40, 1, 8], [0, 0, 0, 0]),
    "short-after-prefixes": ([30, 40, 7], [29, 10, 6]),
}
CASES = [
    f"{layout} {batch} {topk}"
    for layout in ("fp4", "fp4_fp8_rope", "fp8_block_scale")
    for batch in BATCHES
    for topk in ("fused", "unfused")
]


def case_of(layout, batch, **more):
    return Case(layout, *BATCHES[batch], READS_ROWS[0], pair_of(layout), **more)


def pair_of(layout):
    return "flashmla_kv" if layout == "fp8_block_scale" else READS_ROWS[1]


class Rank:
    """This process, one of the ranks."""

    def __init__(self, rank, folder):
        from sglang.srt.distributed import parallel_state
        from sglang.srt.layers.attention import dsa_backend
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import ServerArgs

        from sgl_kvpool.sglang_plugin import hook_groups

        self.rank, self.folder = rank, folder
        model = folder / f"model-{rank}"
        model.mkdir()
        shutil.copy(CONFIG, model / "config.json")
        patch = pytest.MonkeyPatch()
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))  # of the arguments' resolution
        args = ServerArgs(
            model_path=str(model), device="cpu", tp_size=RANKS, attn_cp_size=RANKS, enable_prefill_cp=True,
            cp_strategy="interleave",
        )  # fmt: skip
        publish(args, role="scheduler", ranks=SpawnRanks(rank, None, None))
        # With NCCL, SGLang makes a communicator of it for CPU ranks too, which fails.
        patch.setenv("SGLANG_NCCL_SO_PATH", str(folder / "no-nccl.so"))
        store = dist.FileStore(str(folder / "rendezvous"), RANKS)
        wait = timedelta(seconds=60)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=wait)
        parallel_state.init_distributed_environment(RANKS, rank, local_rank=rank, backend="gloo")
        parallel_state.initialize_model_parallel(backend="gloo")
        hook_groups.apply(hook_groups.named("sparse attention"))
        patch.setattr(dsa_backend, "_compiled_cat", torch.cat)
        patch.setattr(torch.cuda, "current_stream", lambda: None)  # of the gathering of keys
        # SGLang has registered the operator that calls this for GPUs only.
        group = parallel_state.GroupCoordinator
        patch.setattr(group, "all_gather_into_tensor", group._all_gather_into_tensor)
        SparseKernel(patch)

    def run(self, name):
        """Attention of this rank's tokens and the stored rows, in a file, and the number of tokens."""
        from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend

        layout, batch, topk = name.split()
        fused = {"use_fused_topk": True, "dsa_topk_backend": DSATopKBackend.FLASHINFER}
        case = case_of(layout, batch, **(fused if topk == "fused" else {}))
        with in_forward(case.backend):
            found = self.attend(case)
        rows = [buffer.view(torch.uint8).clone() for buffer in case.pool.kv_buffer]
        torch.save((found, rows), self.folder / f"{name}-{self.rank}.pt")
        return len(found)

    def attend(self, case):
        from sglang.srt.layers.attention.dsa_backend import prepare_kv_for_attention
        from sglang.srt.layers.cp.utils import get_cp_strategy, prepare_cp_forward

        strategy, batch = get_cp_strategy(), case.batch("EXTEND")
        prepare_cp_forward(batch)
        case.backend.init_forward_metadata(batch)
        keys = torch.cat([k[p:] for k, p in zip(case.keys, case.prefixes, strict=True)])
        generator = torch.Generator().manual_seed(8)
        q = torch.randn(len(keys), HEADS, RANK + ROPE, generator=generator).bfloat16()
        q, own = (strategy.shard_hidden_states(x, batch) for x in (q, keys))
        k, k_rope = prepare_kv_for_attention(
            SimpleNamespace(attn_mqa=case.layer), batch, own[..., :RANK], own[..., RANK:],
            defer_materialization=False,
        )  # fmt: skip
        lists = strategy.shard_local_tokens(case.chosen())
        if case.backend.use_fused_topk:  # the indexer gives positions among the keys
            starts = case.backend.forward_metadata.topk_indices_offset[:, None]
            lists = torch.where(lists >= 0, lists + starts, -1).int()
        out = case.backend.forward_extend(
            q[..., :RANK].reshape(len(q), -1), k, k, case.layer, batch, q_rope=q[..., RANK:], k_rope=k_rope,
            topk_indices=lists,
        )  # fmt: skip
        return out.view(len(q), HEADS, RANK)[: batch.attn_cp_metadata.per_rank_logical_token[self.rank]]


if __name__ == "__main__":
    go_through(Rank, CASES)
