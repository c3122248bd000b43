"""Peers of `mla_decode`: kernels of SGLang, FlashInfer and FlashMLA, called as SGLang 0.5.23 calls them.

SGLang does not call `sglang_triton` and `flashinfer` over top-k lists.
Everything that SGLang prepares once per step (splits, plans, schedules, page tables) is prepared before the
clock starts. All peers are optional: a peer that cannot be imported or run is reported with the reason.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from scripts.bench.attention.cases import PAGE_SIZE, Workload
from scripts.bench.attention.inputs import RANK, ROPE, SCALE, Problem
from scripts.bench.measurements import OURS
from sgl_kvpool import MLAKVCacheLayout
from sgl_kvpool.attention.decode import DecodeWorkspace, mla_decode, workspace_bytes
from sgl_kvpool.attention.decode_config import decode_config


@dataclass
class Prepared:
    """A runner's calls on a problem, one per set of lists.

    `calls`: Each returns a result that can be viewed as [queries, heads, R].
    `buffers`: Tensors that the calls write, filled with NaN before a check.
    `problem`: Problem whose reference the results are compared with.
    `facts`: Extra fields of a result row.
    """

    calls: Sequence[Callable[[], torch.Tensor]]
    buffers: Sequence[torch.Tensor]
    problem: Problem
    facts: dict[str, Any] = field(default_factory=dict)


class Runner:
    needs_cuda = True

    def load(self, device: Any) -> None:
        """Import the kernel; an exception is reported as the reason why the runner is missing."""

    def refusal(self, workload: Workload) -> str | None:
        """Reason why the runner cannot compute a workload, or None."""
        return None

    def prepare(self, problem: Problem) -> Prepared:
        """Calls on a problem, with everything that SGLang prepares once per step."""
        raise NotImplementedError


class Kvpool(Runner):
    """`mla_decode`."""

    needs_cuda = False

    def load(self, device: Any) -> None:
        self.sm_count = device.sm_count

    def prepare(self, problem: Problem) -> Prepared:
        w, fmt = problem.workload, problem.fmt
        queries = w.queries_per_list
        out = problem.new_out()
        lse = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)
        buffers, workspace, facts = [out, lse], None, {}
        if out.is_cuda:
            size = workspace_bytes(
                fmt, w.heads, w.queries, w.rows_per_list, queries_per_list=queries, sm_count=self.sm_count
            )
            workspace = DecodeWorkspace(size, out.device)
            buffers.append(workspace.buffer)
            config = decode_config(fmt, w.heads, queries, w.batch, w.rows_per_list, self.sm_count)
            facts = {"tile_query_heads": config.tile.query_heads, "splits": config.splits}

        def call(kv_indices: torch.Tensor) -> torch.Tensor:
            return mla_decode(
                problem.q, problem.pool, kv_indices, problem.kv_lens, fmt, SCALE, queries_per_list=queries,
                page=problem.page, out=out, lse=lse, workspace=workspace,
            )[0]  # fmt: skip

        return Prepared([partial(call, ids) for ids in problem.kv_indices], buffers, problem, facts)


def _bf16(problem: Problem) -> torch.Tensor:
    """Rows in the form of SGLang's pools, [slots, 1, R + P]."""
    return problem.pool.view(torch.bfloat16)[:, None]


class SglangTriton(Runner):
    """SGLang's Triton decode, with the number of splits that its backend chooses."""

    def load(self, device: Any) -> None:
        from sglang.kernels.jit.utils.arch import is_arch_support_pdl
        from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
        from sglang.kernels.ops.attention.metadata import get_num_kv_splits_triton

        self.decode, self.choose_splits = decode_attention_fwd, get_num_kv_splits_triton
        self.use_pdl, self.sm_count = is_arch_support_pdl(), device.sm_count

    def refusal(self, workload: Workload) -> str | None:
        return "SGLang verifies with its extend kernel" if workload.queries_per_list > 1 else None

    def prepare(self, problem: Problem) -> Prepared:
        decode, buffers = self.decoder(problem)
        rows = _bf16(problem)
        calls = [lambda ids=ids: decode(rows, ids) for ids in problem.kv_indices.long().flatten(1)]
        return Prepared(calls, buffers, problem)

    def decoder(
        self, problem: Problem
    ) -> tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], list[torch.Tensor]]:
        """A function of rows [slots, 1, R + P] and all lists, and the tensors that it writes."""
        from triton import next_power_of_2

        w, where = problem.workload, problem.q.device
        # As TritonAttnBackend: a split per multiprocessor or per 32 rows, both counts rounded up to a power
        # of two, whichever is fewer, at least 8.
        most = max(8, min(next_power_of_2(self.sm_count), next_power_of_2(-(-w.rows_per_list // 32))))
        starts = torch.arange(w.batch + 1, dtype=torch.int32, device=where) * w.rows_per_list
        logits = torch.empty(w.batch, w.heads, most, RANK, dtype=torch.float32, device=where)
        lse = torch.empty(w.batch, w.heads, most, dtype=torch.float32, device=where)
        splits = torch.empty(w.batch, dtype=torch.int32, device=where)
        self.choose_splits[(1,)](
            splits, problem.kv_lens, w.batch, 1, w.heads, 1, most, self.sm_count,
            MAX_NUM_SEQ=max(256, next_power_of_2(w.batch)),
        )  # fmt: skip
        out = problem.new_out()

        def decode(rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            self.decode(
                problem.q, rows, rows[..., :RANK], out, starts, ids, logits, lse, splits, most, SCALE, 1.0,
                1.0, has_mla=True, use_pdl=self.use_pdl,
            )  # fmt: skip
            return out

        return decode, [out, logits, lse]


class SglangFp4(SglangTriton):
    """SGLang's FP4 path: dequantise the whole layer, then attend BF16 rows."""

    def load(self, device: Any) -> None:
        super().load(device)
        from sglang.srt.layers.quantization.kvfp4_tensor import FP4MXBlock16KVQuantizeUtil

        self.codec = FP4MXBlock16KVQuantizeUtil

    def prepare(self, problem: Problem) -> Prepared:
        decode, buffers = self.decoder(problem)
        # Encode in chunks: the encoder needs some hundred times the memory of its input.
        chunks = [self.codec.batched_quantize(chunk) for chunk in _bf16(problem).split(1 << 16)]
        values, scales = (torch.cat(part) for part in zip(*chunks, strict=True))
        bf16 = MLAKVCacheLayout.BF16.row_format(RANK, ROPE)
        stored = self.codec.batched_dequantize(values, scales)[:, 0].contiguous().view(torch.uint8)

        def call(ids: torch.Tensor) -> torch.Tensor:
            return decode(self.codec.batched_dequantize(values, scales), ids)

        calls = [lambda ids=ids: call(ids) for ids in problem.kv_indices.long().flatten(1)]
        return Prepared(calls, buffers, problem.on_rows(stored, bf16), {"pool_slots_read": len(values)})


class Flashinfer(Runner):
    """`BatchMLAPagedAttentionWrapper`, planned with pages of one token, as SGLang does."""

    _WORKSPACE_BYTES = 128 << 20

    def load(self, device: Any) -> None:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        self.wrapper = BatchMLAPagedAttentionWrapper

    def prepare(self, problem: Problem) -> Prepared:
        w, where = problem.workload, problem.q.device
        room = torch.empty(self._WORKSPACE_BYTES, dtype=torch.uint8, device=where)
        q_starts = torch.arange(w.batch + 1, dtype=torch.int32, device=where) * w.queries_per_list
        starts = torch.arange(w.batch + 1, dtype=torch.int32, device=where) * w.rows_per_list
        lengths = torch.full((w.batch,), w.rows_per_list, dtype=torch.int32, device=where)
        q = problem.q[..., :RANK], problem.q[..., RANK:]
        rows = _bf16(problem)
        cache = rows[..., :RANK], rows[..., RANK:]
        out = problem.new_out()
        calls = []
        for rows_of in problem.kv_indices.flatten(1):
            wrapper = self.wrapper(
                room, use_cuda_graph=True, qo_indptr=q_starts.clone(), kv_indptr=starts.clone(),
                kv_indices=rows_of.clone(), kv_len_arr=lengths.clone(), backend="auto",
            )  # fmt: skip
            wrapper.plan(
                qo_indptr=q_starts, kv_indptr=starts, kv_indices=rows_of, kv_len_arr=lengths,
                num_heads=w.heads, head_dim_ckv=RANK, head_dim_kpe=ROPE, page_size=1,
                causal=w.queries_per_list > 1, sm_scale=SCALE, q_data_type=torch.bfloat16,
                kv_data_type=torch.bfloat16,
            )  # fmt: skip
            calls.append(
                lambda wrapper=wrapper: wrapper.run(
                    q_nope=q[0], q_pe=q[1], ckv_cache=cache[0], kpe_cache=cache[1], out=out
                )
            )
        return Prepared(calls, [out], problem)


class Flashmla(Runner):
    """FlashMLA's dense decode of BF16 rows; the first call makes the schedule, which later calls reuse."""

    def load(self, device: Any) -> None:
        import flash_mla
        from flash_mla._loader import get_ops

        get_ops(True)
        self.module = flash_mla

    def prepare(self, problem: Problem) -> Prepared:
        w = problem.workload
        rows = problem.pool.view(torch.bfloat16).view(-1, PAGE_SIZE, 1, RANK + ROPE)
        lengths = torch.full((w.batch,), w.rows_per_list, dtype=torch.int32, device=rows.device)
        q = problem.q.view(w.batch, w.queries_per_list, w.heads, RANK + ROPE)

        def call(table: torch.Tensor, schedule: Any) -> torch.Tensor:
            return self.module.flash_mla_with_kvcache(
                q, rows, table, lengths, RANK, schedule, softmax_scale=SCALE, causal=True,
                is_fp8_kvcache=False, use_legacy=True,
            )[0]  # fmt: skip

        return Prepared(self.scheduled(call, problem.page_tables), [], problem)

    def scheduled(self, call: Callable[..., torch.Tensor], lists: torch.Tensor) -> list[Callable]:
        """One call per set of lists, each with its own schedule."""
        schedules = [self.module.get_mla_metadata()[0] for _ in lists]
        return [lambda pair=pair: call(*pair) for pair in zip(lists, schedules, strict=True)]


class FlashmlaSparseFp8(Flashmla):
    """FlashMLA's decode of top-k lists over 656-byte rows.

    Heads are padded to 64 or 128 as SGLang does, before the clock starts.
    """

    def prepare(self, problem: Problem) -> Prepared:
        w = problem.workload
        rows = problem.pool.view(-1, PAGE_SIZE, 1, problem.fmt.row_bytes).view(torch.float8_e4m3fn)
        padded = 64 if w.heads <= 64 else 128
        q = problem.q.new_zeros(w.batch, 1, padded, RANK + ROPE)
        q[:, 0, : w.heads] = problem.q

        def call(indices: torch.Tensor, schedule: Any) -> torch.Tensor:
            out, _ = self.module.flash_mla_with_kvcache(
                q, rows, None, None, RANK, schedule, softmax_scale=SCALE, is_fp8_kvcache=True,
                indices=indices[:, None], use_legacy=True, kv_format="V32",
            )  # fmt: skip
            return out[:, 0, : w.heads]

        return Prepared(self.scheduled(call, problem.kv_indices), [], problem, {"padded_heads": padded})


def runners() -> dict[str, Runner]:
    """All runners by name; their kernels are imported by `load`."""
    return {
        OURS: Kvpool(),
        "sglang_triton": SglangTriton(),
        "flashinfer": Flashinfer(),
        "flashmla": Flashmla(),
        "flashmla_sparse_fp8": FlashmlaSparseFp8(),
        "sglang_fp4": SglangFp4(),
    }
