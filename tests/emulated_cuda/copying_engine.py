"""An Engine with a checkpoint that copies (`copying_deepseek`), whose caches are changed while it runs."""

import hashlib
import json
import sys
import time
from pathlib import Path

from emulated_cuda.byte_engine import Printed
from emulated_cuda.model_engine import COMMON, allow_short_lists, tokens

#: Prompts that share all but their end, from which they are continued; all are longer than a top-k list.
SHARED, OWN, PROMPTS = 2560, 128, 3
NEW = 8
DRAFTS = {
    "speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}  # fmt: skip


def prompts(shared=SHARED, own=OWN):
    return [tokens(1, shared) + tokens(seed, own) for seed in range(2, 2 + PROMPTS)]


def _pools(scheduler):
    drafts = [runner.token_to_kv_pool for runner in scheduler.draft_worker._draft_model_runners()]
    return scheduler.token_to_kv_pool_allocator.get_kvcache(), *drafts


def _zero_rows_of_drafts(scheduler, batch):
    for pool in _pools(scheduler)[1:]:
        for rows in pool.kv_buffer:
            rows.zero_()
    return True


def _zero_keys(scheduler, batch):
    """Index keys of the prompts' ends, which hold what is copied, no longer select their tokens."""
    import torch

    table = scheduler.req_to_token_pool.req_to_token
    for place, request in zip(batch.req_pool_indices.tolist(), batch.reqs, strict=True):
        end = len(request.origin_input_ids)
        slots = table[place, end - OWN + 1 : end].long()  # whole pages, also of odd lengths
        for pool in _pools(scheduler):
            for keys in pool.index_pages:
                pages = slots // (pool.page_size * pool.dcp_size)
                keys[torch.unique(pages.cpu()).to("cuda")] = 0
    return False


def _abort(scheduler, batch):
    from sglang.srt.managers.io_struct import AbortReq

    scheduler.abort_request(AbortReq(abort_all=True))
    return False


#: What is done to the caches before a decode batch -> whether before all that follow, too.
CHANGES = {"zero rows of drafts": _zero_rows_of_drafts, "zero index keys": _zero_keys, "abort": _abort}


def _evict_and_clear(scheduler):
    """Push everything out to the host."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    scheduler.tree_cache.evict(EvictParams(num_tokens=1 << 20))
    for pool in _pools(scheduler):
        for buffer in (*pool.kv_buffer, *pool.index_pages):
            buffer.zero_()


def _rank():
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_rank


def _digest_of_keys(scheduler):
    """Digest of the index keys of target and draft; page 0 takes what padded tokens write."""
    found = hashlib.sha256()
    for pool in _pools(scheduler):
        for keys in pool.index_pages:
            found.update(keys[1:].cpu().numpy().tobytes())
    return found.hexdigest()


def install(flag):
    """Let each rank change its caches as its file of `flag` says: `before a request,before decoding`.

    Before each batch, a rank appends its mode and a digest of its index keys to its file of `keys`, and the
    largest slot of the request table and the number of its pool's rows to its file of `slots`.
    """
    import torch
    from sglang.srt.managers.scheduler import Scheduler

    run_batch, receive = Scheduler.run_batch, Scheduler.process_input_requests

    def own_flag():
        return flag.with_name(f"flag{_rank()}")

    def run_changed(self, batch, *args, **options):
        torch.cuda.synchronize()
        with flag.with_name(f"keys{_rank()}").open("a") as keys:
            print(batch.forward_mode.name, _digest_of_keys(self), file=keys)
        with flag.with_name(f"slots{_rank()}").open("a") as slots:
            print(int(self.req_to_token_pool.req_to_token.max()), _pools(self)[0].size, file=slots)
        own = own_flag()
        change = CHANGES.get(own.read_text().partition(",")[2])
        if change is not None and batch.forward_mode.is_decode():
            torch.cuda.synchronize()
            if not change(self, batch):
                own.write_text("")
            torch.cuda.synchronize()
        return run_batch(self, batch, *args, **options)

    def receive_changed(self, requests):
        own = own_flag()
        before, _, change = own.read_text().partition(",")
        if requests and before == "evict":
            torch.cuda.synchronize()
            _evict_and_clear(self)
            torch.cuda.synchronize()
            own.write_text("," + change)
        return receive(self, requests)

    Scheduler.run_batch, Scheduler.process_input_requests = run_changed, receive_changed


def main(model, flag, phases, lengths=(SHARED, OWN), **options):
    """Answers to all prompts at once, of one Engine; `lengths` are those of their common and own parts.

    `phases` are (name, before: "" or "evict", name of what is changed before decoding, or "", new tokens).
    """
    from emulated_cuda import memory
    from sgl_kvpool.commands.processes import forks

    memory.ALLOCATOR.problems = Printed()
    flag = Path(flag)
    flags = [flag.with_name(f"flag{rank}") for rank in range(options.get("tp_size", 1))]
    for each in flags:
        each.write_text("")
    install(flag)
    if lengths != (SHARED, OWN):
        allow_short_lists()
    forks.fork_children()
    import sglang

    engine = sglang.Engine(model_path=model, device="cuda", **COMMON | DRAFTS | options)
    answers = {}
    for name, before, change, count in phases:
        began = time.monotonic()
        for each in flags:
            each.write_text(f"{before},{change}")
        sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": count}
        answers[name] = engine.generate(input_ids=prompts(*lengths), sampling_params=sampling)
        found = [(a["output_ids"], a["meta_info"].get("spec_accept_length")) for a in answers[name]]
        print("answered", name, round(time.monotonic() - began, 1), found, file=sys.stderr, flush=True)
    engine.shutdown()
    print("\n" + json.dumps(answers))
