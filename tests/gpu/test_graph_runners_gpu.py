"""SGLang's own graph runners around kvpool_mla: a replay gives, bit for bit, what the backend gives."""

import gc
import itertools
import types
from types import SimpleNamespace

import codec_oracle as oracle
import graph_runners as runners
import pytest
import torch
from engine_cases import quick
from test_cuda_backend_gpu import DEVICE, PLACED, Case, no_waits

pytest.importorskip("sglang")
pytestmark = pytest.mark.gpu

LENGTHS = {
    "DECODE": ([30, 300, 7], [29, 299, 6]),
    "TARGET_VERIFY": ([30, 300, 7], [26, 296, 3]),
    "DRAFT_EXTEND_V2": ([30, 300, 7], [26, 296, 3]),
    "EXTEND": ([9, 140, 5, 73], [0, 100, 4, 0]),
}


@pytest.fixture(scope="module", autouse=True)
def frozen_garbage():
    """Runners collect garbage before each capture: half a second with SGLang's modules in it."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def decode(layout, mode, arrangement="layer_major", requests=(4,)):
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    args = runners.publish_one_rank(speculative=mode != "DECODE", requests=requests)
    case, model = Case(layout, *LENGTHS[mode], arrangement), runners.Model()
    runner = DecodeCudaGraphRunner(runners.model_runner(case, args, model))
    assert [key.size for key in runner.backend._graphs] == sorted(requests, reverse=True)
    wanted = runners.eager(case, model, runners.batch_of(case, mode))
    found = runners.replayed(runner, runners.batch_of(case, mode))
    assert (runner.raw_bs, runner.bs) == (3, 4)
    runners.as_eager(case, found, wanted)
    return case, model, runner


@pytest.mark.quick
def test_decode_in_graphs_of_several_sizes():
    """Three requests padded to four, then one, two and no requests in the graphs of one and two."""
    case, model, runner = decode("fp4", "DECODE", requests=(1, 2, 4))
    for requests in (1, 2, 0):
        batch, again = (first_requests(runners.batch_of(case, "DECODE"), requests) for _ in range(2))
        wanted = runners.eager(case, model, again) if requests else (None, runners.stored_rows(case))
        with no_waits():
            found = runner.execute(batch)
        assert (runner.raw_bs, runner.bs) == (requests, max(requests, 1))
        if requests:
            runners.as_eager(case, found, wanted)
        else:
            assert all(map(torch.equal, runners.stored_rows(case), wanted[1]))


def first_requests(batch, count):
    """A decode batch of the first requests; without any an idle one, as data-parallel ranks have."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    batch.batch_size = count
    for name in ("input_ids", "positions", "req_pool_indices", "seq_lens", "out_cache_loc"):
        setattr(batch, name, getattr(batch, name)[:count])
    if not count:
        batch.forward_mode = ForwardMode.IDLE
    return batch


@pytest.mark.quick
def test_verify_of_dspark_in_a_graph():
    """What the graph computes for DSPARK's input is what EAGLE's verification of the same batch gives."""
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

    args = runners.publish_one_rank(speculative=True, speculative_algorithm="DSPARK")
    case, model = Case("fp4", *LENGTHS["TARGET_VERIFY"]), runners.Model()
    runner = DecodeCudaGraphRunner(runners.model_runner(case, args, model))
    batch, of_eagle = (runners.batch_of(case, "TARGET_VERIFY") for _ in range(2))
    batch.spec_info = DFlashVerifyInput(batch.input_ids, batch.positions, runners.DRAFT_TOKENS)
    wanted = runners.eager(case, model, of_eagle)
    found = runners.replayed(runner, batch)
    assert (runner.raw_bs, runner.bs) == (3, 4)
    runners.as_eager(case, found, wanted)


@pytest.mark.parametrize(
    ("layout", "mode", "arrangement"),
    quick(
        itertools.product(oracle.LAYOUTS, ["DECODE", "TARGET_VERIFY"], PLACED),
        [("fp4", "TARGET_VERIFY", "layer_major")],
    ),
)
def test_every_layout_and_arrangement_in_a_graph(layout, mode, arrangement):
    decode(layout, mode, arrangement)


def draft_worker(case, model, args):
    """The attributes that graph runners read of SGLang's EagleDraftWorker, and its `draft_forward`."""
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

    from sgl_kvpool.srt.attention import decode_verify
    from sgl_kvpool.srt.attention.draft import KVPoolMultiStepDraftBackend

    runner = runners.model_runner(case, args, model, draft=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_verify, "get_buffer", lambda name, make: make())
        steps = KVPoolMultiStepDraftBackend(runner, 1, runners.DRAFT_TOKENS - 1)
    runner.draft_attn_backend = steps
    empty = [torch.zeros(8, runners.DRAFT_TOKENS - 1, dtype=torch.long, device=DEVICE) for _ in range(2)]
    worker = SimpleNamespace(
        draft_runner=runner, topk=1, speculative_num_steps=runners.DRAFT_TOKENS - 1,
        speculative_num_draft_tokens=runners.DRAFT_TOKENS, speculative_algorithm=runner.spec_algorithm,
        hot_token_id=None, index_share_for_mtp_iteration=False, seed_dsa_topk_from_draft_extend=False,
        dsa_seed_topk_width=0, draft_attn_backend=steps, draft_extend_attn_backend=case.backend,
        _topk1_parents_prealloc=empty[0], _topk1_score_indices_prealloc=empty[1],
    )  # fmt: skip
    worker.draft_forward = types.MethodType(EagleDraftWorker.draft_forward, worker)
    return worker


def draft_batch(case, steps=runners.DRAFT_TOKENS - 1):
    """Drafting after `prefixes` tokens; the slots of `steps` tokens are in the request table already."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.speculative.eagle_info import EagleDraftInput

    batch, requests = case.batch("DECODE"), len(case.lengths)
    batch.seq_lens = torch.tensor(case.prefixes, device=DEVICE)
    new = [own[first : first + steps] for own, first in zip(case.slots, case.prefixes, strict=True)]
    batch.out_cache_loc, batch.positions = torch.cat(new), batch.seq_lens.clone()
    batch.capture_hidden_mode = CaptureHiddenMode.LAST
    batch.spec_info = EagleDraftInput(
        topk_p=torch.ones(requests, 1, device=DEVICE),
        topk_index=torch.tensor([[5], [9], [33]][:requests], device=DEVICE),
        hidden_states=torch.zeros(requests, runners.WIDTH, dtype=torch.bfloat16, device=DEVICE),
        capture_hidden_mode=CaptureHiddenMode.LAST,
    )
    batch.seq_lens_cpu = batch.seq_lens_sum = batch.sampling_info = None
    batch.can_run_decode_cuda_graph = True
    return batch


def drafting(layout, arrangement="layer_major"):
    from sglang.srt.speculative.eagle_draft_cuda_graph_runner import EAGLEDraftCudaGraphRunner

    args = runners.publish_one_rank(speculative=True)
    case, model = Case(layout, *LENGTHS["TARGET_VERIFY"], arrangement), runners.Model()
    worker = draft_worker(case, model, args)
    runner = EAGLEDraftCudaGraphRunner(worker)
    batch = draft_batch(case)
    worker.draft_attn_backend.init_forward_metadata(batch)
    wanted = [None if x is None else x.clone() for x in worker.draft_forward(batch)]
    rows = runners.stored_rows(case)
    found = runners.replayed(runner, draft_batch(case))
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)
    assert len(wanted[2].unique()) > 4  # tokens, which depend on what the steps attended
    assert all(map(torch.equal, runners.stored_rows(case), rows))


def draft_extend(layout, arrangement="layer_major"):
    from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EAGLEDraftExtendCudaGraphRunner

    args = runners.publish_one_rank(speculative=True)
    mode = "DRAFT_EXTEND_V2"
    case, model = Case(layout, *LENGTHS[mode], arrangement), runners.Model()
    runner = EAGLEDraftExtendCudaGraphRunner(draft_worker(case, model, args))
    wanted = runners.eager(case, model, runners.batch_of(case, mode))
    batch = runners.batch_of(case, mode)
    runners.as_eager(case, runners.replayed(runner, batch, batch.spec_info.select_index), wanted)


LAYOUTS = [*((layout, "layer_major") for layout in oracle.LAYOUTS), *(("fp4", one) for one in PLACED[1:])]


@pytest.mark.parametrize(("layout", "arrangement"), quick(LAYOUTS, [("fp4", "layer_major")]))
@pytest.mark.parametrize("run", [drafting, draft_extend])
def test_drafts_of_every_layout_and_arrangement_in_a_graph(layout, arrangement, run):
    run(layout, arrangement)


@pytest.mark.parametrize(
    ("layout", "arrangement"), quick(itertools.product(oracle.LAYOUTS, PLACED), [("fp4", "layer_major")])
)
def test_prefill_in_breakable_graphs(layout, arrangement):
    """123 tokens padded to 160; attention of two layers runs between the segments of the graph."""
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

    args = runners.publish_one_rank()
    case, model = Case(layout, *LENGTHS["EXTEND"], arrangement), runners.Model((1, 2))
    runners.store_prefixes(case, model.model.layers[1])
    runner = PrefillCudaGraphRunner(runners.model_runner(case, args, model))
    (graph,) = runner.backend._graphs.values()
    assert len(graph._segments) == 3
    wanted = runners.eager(case, model, runners.batch_of(case, "EXTEND"))
    batch = runners.batch_of(case, "EXTEND")
    assert runner.can_run_graph(batch)
    found = runner.execute(batch)
    assert len(found.hidden_states) == 123
    runners.as_eager(case, found, wanted)
