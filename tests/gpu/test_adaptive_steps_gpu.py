"""SGLang's adaptive speculation: backends and graphs for each number of steps, over one pool of rows."""

import json
from types import SimpleNamespace

import graph_runners
import pytest
import torch
from graph_runners import Model, as_eager, batch_of, eager, model_runner, publish_one_rank, replayed
from test_cuda_backend_gpu import DEVICE, Case, no_waits
from test_graph_runners_gpu import LENGTHS, draft_batch

pytest.importorskip("sglang")
pytestmark = pytest.mark.gpu

#: Without steps each request verifies the token that it would decode. The server starts with `FIRST`.
STEPS = (0, 2, graph_runners.DRAFT_TOKENS - 1)
FIRST = 2


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A case, its model and SGLang's workers, which have built a state for each number of steps."""
    from sglang.srt.runtime_context import max_speculative_num_draft_tokens
    from sglang.srt.speculative import eagle_worker_v2

    from sgl_kvpool.sglang_plugin import hook_groups

    hook_groups.apply(hook_groups.named("speculative decoding"))
    config = tmp_path / "steps.json"
    config.write_text(json.dumps({"1": {"candidate_steps": STEPS}}))
    args = publish_one_rank(
        speculative=True, attention_backend="kvpool_mla", speculative_adaptive=True,
        speculative_adaptive_config=str(config), speculative_num_steps=FIRST,
        speculative_num_draft_tokens=FIRST + 1,
    )  # fmt: skip
    longest = max_speculative_num_draft_tokens()
    case = Case("fp4", *LENGTHS["DECODE"], most_queries=longest)  # all but the last token are stored
    model = Model()
    target = model_runner(case, args, model)
    target.init_new_workspace = False
    target._get_attention_backend = lambda init_new_workspace: case._backend(longest)
    own = model_runner(case, args, model, draft=True)
    own.draft_attention_backend = None
    drafts = object.__new__(eagle_worker_v2.EagleDraftWorker)  # its constructor loads a model
    vars(drafts).update(
        server_args=args, gpu_id=0, device=DEVICE, topk=1, target_worker=SimpleNamespace(device=DEVICE),
        draft_runner=own, speculative_algorithm=own.spec_algorithm, hot_token_id=None,
        index_share_for_mtp_iteration=False, seed_dsa_topk_from_draft_extend=False, dsa_seed_topk_width=0,
        draft_attn_backend=None, draft_extend_attn_backend=None, cuda_graph_runner=None,
        cuda_graph_runner_for_draft_extend=None, speculative_num_steps=FIRST,
        speculative_num_draft_tokens=FIRST + 1, _specialized_graph_memory_usage={},
        _specialized_graph_time_usage={},
    )  # fmt: skip
    own.draft_attn_backend = None
    monkeypatch.setattr(eagle_worker_v2, "EagleDraftWorker", lambda *_: drafts)
    worker = eagle_worker_v2.EAGLEWorkerV2(args, 0, 0, SimpleNamespace(model_runner=target))
    worker.adaptive_controller.init_states([4])
    return case, model, worker


def verify(case, model, worker):
    """The target's graph for these steps against the backend that the server started with."""
    queries, runner = worker.speculative_num_draft_tokens, worker._target_worker.model_runner
    case.prefixes = [length - queries for length in case.lengths]
    wanted = eager(case, model, batch_of(case, "TARGET_VERIFY", queries))
    batch = batch_of(case, "TARGET_VERIFY", queries)
    as_eager(case, replayed(runner.decode_cuda_graph_runner, batch), wanted)


def drafted(case, worker):
    """The tokens that the draft's graph for these steps proposes."""
    runner = worker._draft_worker.cuda_graph_runner
    case.prefixes = LENGTHS["TARGET_VERIFY"][1]
    batch = draft_batch(case, worker.speculative_num_steps)
    with no_waits():
        return runner.execute(batch)[2].clone()


def extend(case, model, worker):
    """The draft's extend by as many tokens as were verified, on its own backend."""
    queries, backend = worker.speculative_num_draft_tokens, case.backend
    case.prefixes = [length - queries for length in case.lengths]
    wanted = eager(case, model, batch_of(case, "DRAFT_EXTEND_V2", queries))
    case.backend = worker._draft_worker.draft_extend_attn_backend
    assert case.backend is not backend
    found, rows = eager(case, model, batch_of(case, "DRAFT_EXTEND_V2", queries))
    case.backend = backend
    assert torch.equal(found.hidden_states, wanted[0].hidden_states)
    assert all(map(torch.equal, rows, wanted[1]))


@pytest.mark.quick
def test_numbers_of_steps_in_turn(server):
    case, model, worker = server
    states, tokens = worker.adaptive_controller._states, {}
    assert sorted(states) == sorted(STEPS)
    for steps in (3, 0, 2, 3):
        worker.apply_runtime_state(states[steps])
        assert worker.speculative_num_draft_tokens == steps + 1
        verify(case, model, worker)
        extend(case, model, worker)
        if steps:
            tokens[steps] = drafted(case, worker)
    assert torch.equal(tokens[2], tokens[3][:, :2])
    assert len(tokens[3].unique()) > 4  # they depend on what the steps attended
