"""SGLang's overlap scheduling around decode graphs: tokens as one step after the other gives them.

The streams, their order, the relay of tokens, the barrier before the next write to the request table and the
copies of results are SGLang's (`Scheduler.run_batch` and `event_loop_overlap` call these functions); the
batches are made here.
"""

from types import MethodType, SimpleNamespace

import pytest
import torch
from graph_runners import VOCAB, Model, batch_of, computed, model_runner, publish_one_rank
from test_cuda_backend_gpu import DEVICE, Case
from test_graph_runners_gpu import frozen_garbage  # noqa: F401

pytest.importorskip("sglang")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
#: Rows of four requests before the first step; the last takes the place of the third after two steps.
STORED = [30, 300, 7, 12]
STEPS = 4


def to_gpu(values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype).pin_memory().to(DEVICE, non_blocking=True)


def requests_of(step):
    return [0, 1, 2] if step < 2 else [0, 1, 3]


class Overlapped:
    """Steps of decode, issued by a scheduler that does not wait for their results."""

    def __init__(self, case, runner):
        from sglang.srt.managers.overlap_utils import FutureMap
        from sglang.srt.managers.scheduler import Scheduler

        self.case, self.runner = case, runner
        self.schedule, self.forward, copies = (torch.cuda.Stream() for _ in range(3))
        self.scheduler = SimpleNamespace(
            schedule_stream=self.schedule, forward_stream=self.forward, copy_stream=copies,
            copy_stream_ctx=torch.cuda.stream(copies), enable_async_d2h_copy=False, _war_barrier_enabled=True,
            model_worker=SimpleNamespace(last_shared_read_runner=runner.model_runner),
        )  # fmt: skip
        for name in ("_apply_war_barrier", "_copy_result_to_cpu"):
            setattr(self.scheduler, name, MethodType(getattr(Scheduler, name), self.scheduler))
        self.future = FutureMap(
            torch.device(DEVICE), runner.model_runner.spec_algorithm, case.table, needs_cpu_seq_lens=False
        )
        #: SGLang keeps a batch's tensors for two steps (`batch_record_buf`).
        self.kept = []

    def step(self, number):
        """Schedule a step and launch it; its result, whose tokens are on their way to the host."""
        from sglang.srt.managers.overlap_utils import RelayPayload, resolve_forward_inputs
        from sglang.srt.managers.utils import GenerationBatchResult

        case, chosen = self.case, requests_of(number)
        batch = batch_of(case, "DECODE")
        lengths = [STORED[i] + number % 2 if i == 3 else STORED[i] + number for i in chosen]
        rows = [case.requests[min(i, 2)] for i in chosen]
        batch.batch_size, batch.req_pool_indices = len(chosen), to_gpu(rows)
        if number in (0, 2):  # the third row of the request table goes to another request
            own = case.slots[chosen[2]]
            case.table.req_to_token[rows[2], : len(own)] = own.int()
        batch.seq_lens = to_gpu([n + 1 for n in lengths])
        new = [case.slots[i][n : n + 1] for i, n in zip(chosen, lengths, strict=True)]
        batch.out_cache_loc, batch.positions = torch.cat(new), to_gpu(lengths)
        case.table.req_to_token[batch.req_pool_indices, batch.positions] = batch.out_cache_loc.int()
        # What SGLang's ScheduleBatch has besides.
        batch.prefill_input_ids_cpu, batch.enable_overlap = None, True
        batch.spec_algorithm = self.runner.model_runner.spec_algorithm
        batch.input_ids, batch.return_logprob, batch.return_hidden_states = None, False, False
        with torch.cuda.stream(self.forward):
            self.forward.wait_stream(self.schedule)
            resolve_forward_inputs(batch, self.future)
            output = self.runner.execute(batch)
            tokens = output.next_token_logits.argmax(-1)
            self.future.publish(batch.req_pool_indices, batch.seq_lens + 1)
            self.future.stash(batch.req_pool_indices, RelayPayload(bonus_tokens=tokens))
            result = GenerationBatchResult(logits_output=output, next_token_ids=tokens)
            result.copy_done = torch.cuda.Event()
            self.scheduler._copy_result_to_cpu(result, batch)
        self.scheduler._apply_war_barrier()
        self.kept = [*self.kept[-1:], (batch, tokens, new)]
        return result

    def run(self, first_tokens):
        """Tokens of all steps; the result of a step is read after the next one was launched."""
        tokens, pending = [], None
        torch.cuda.synchronize()
        with torch.cuda.stream(self.schedule):
            self.future.output_tokens_buf[to_gpu(self.case.requests[:3])] = to_gpu(first_tokens)
            for number in range(STEPS):
                launched = self.step(number)
                if pending is not None:
                    tokens.append(self.finish(pending))
                pending = launched
            tokens.append(self.finish(pending))
        torch.cuda.synchronize()
        return tokens

    def finish(self, result):
        result.copy_done.synchronize()
        return result.next_token_ids.tolist()


def overlapped(layout):
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    args = publish_one_rank()
    case, model = Case(layout, [n + STEPS for n in STORED], STORED), Model()
    runner = DecodeCudaGraphRunner(model_runner(case, args, model))
    return case, model, Overlapped(case, runner)


def one_after_the_other(case, model, first_tokens):
    """The same steps without graphs and streams, on a request table with a row for each request."""
    tokens, latest = [], [*first_tokens, None]
    for row, own in zip(case.requests, case.slots, strict=True):
        case.table.req_to_token[row, : len(own)] = own.int()
    for number in range(STEPS):
        chosen = requests_of(number)
        if number == 2:
            latest[3] = latest[2]  # the row's token, which the next request takes over
        lengths = [STORED[i] + number % 2 if i == 3 else STORED[i] + number for i in chosen]
        batch = batch_of(case, "DECODE")
        batch.batch_size = len(chosen)
        batch.req_pool_indices = torch.tensor([case.requests[i] for i in chosen], device=DEVICE)
        batch.seq_lens = torch.tensor(lengths, device=DEVICE) + 1
        batch.positions = torch.tensor(lengths, device=DEVICE)
        new = [case.slots[i][n : n + 1] for i, n in zip(chosen, lengths, strict=True)]
        batch.out_cache_loc = torch.cat(new)
        batch.input_ids = torch.tensor([latest[i] for i in chosen], device=DEVICE)
        found = computed(case, model, batch)
        tokens.append(found.next_token_logits.argmax(-1).tolist())
        for request, token in zip(chosen, tokens[-1], strict=True):
            latest[request] = token
    return tokens


@pytest.mark.quick
def test_tokens_of_overlapped_steps():
    case, model, server = overlapped("fp4")
    first = [5, 9, 33]
    wanted = one_after_the_other(case, model, first)
    assert len({token for step in wanted for token in step}) > STEPS
    assert server.run(first) == wanted
    assert all(0 <= token < VOCAB for step in wanted for token in step)
