"""The self-check of a scheduler that is about to serve: its pools, its attention backend, its host tier."""

import logging
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from sgl_kvpool.refusal import Refusal
from sgl_kvpool.sglang_plugin import hook_points, startup
from sgl_kvpool.sglang_plugin.hooks import attention
from sgl_kvpool.sglang_plugin.options import LAYOUT
from sgl_kvpool.sglang_plugin.registry import around
from sgl_kvpool.srt import peers
from sgl_kvpool.srt.attention.dsa_backend import attend, reader_of
from sgl_kvpool.srt.facts.readers import KVPOOL_BACKEND
from sgl_kvpool.srt.host import agreement
from sgl_kvpool.srt.host.tier_bytes import holds_our_rows

logger = logging.getLogger(__name__)

_NO_RUN = "no committed test run of these kernels on such a GPU"
_WITHOUT_LAYOUT = f"serve without {LAYOUT.flag}"
_WITHOUT_TIER = f"serve without --enable-hierarchical-cache, or without {LAYOUT.flag}"


@around("sglang.srt.managers.scheduler.Scheduler.__init__", "pools", reads=("server_args", "port_args"))
def _init_scheduler(original, self, *args, **kwargs):
    """Run the self-check at the end of the constructor; a refusal of either ends the process."""
    with startup.ending_when_refused():
        original(self, *args, **kwargs)
        run(self)


def run(scheduler: Any) -> None:
    """Run the self-check of a scheduler, if it is due; log one line.

    The scheduler is at the end of its constructor: CUDA graphs are captured, and no request has arrived.
    Refusal if a check found a difference, or could not be run.
    """
    import torch

    runner = scheduler.tp_worker.model_runner
    why = _why_due(str(runner.device))
    if why is None:
        return
    began, problem = time.monotonic(), None
    found: list[str] = []
    try:
        found += _local_checks(runner)
    except Exception as error:  # the server must not serve after any exception
        problem = _refusal(error, why, _WITHOUT_LAYOUT)
    controller = _controller(scheduler.tree_cache)
    if controller is not None:
        # The tier's check runs collectives: every rank starts it or none does.
        if not agreement.all_ranks(controller, problem is None) and problem is None:
            problem = Refusal(f"the self-check at start ({why}) failed on another rank, see its line")
        elif problem is None:
            try:
                from sgl_kvpool.srt.self_check import check_tier

                found.append(check_tier(controller, lambda good: agreement.all_ranks(controller, good)))
            except Exception as error:  # as above
                problem = _refusal(error, why, _WITHOUT_TIER)
    if problem is not None:
        raise problem
    # Nothing orders the streams of the event loop after that of the checks.
    torch.get_device_module(runner.device).synchronize()
    seconds = time.monotonic() - began
    logger.info("sgl-kvpool: self-check passed in %.2f s (%s): %s", seconds, why, ", ".join(found))


def _why_due(device: str) -> str | None:
    if hook_points.version_problem() is not None:
        return "this SGLang is not a tested one"
    return _NO_RUN if device.startswith("cuda") else None


def _refusal(error: Exception, why: str, way_out: str) -> Refusal:
    from sgl_kvpool.srt.self_check import Difference

    if isinstance(error, Difference):
        return Refusal(
            f"the self-check at start ({why}) found a difference: {error}; {way_out}, and report this line"
        )
    return Refusal(
        f"the self-check at start ({why}) could not be run: {error!r}; {way_out}, and report this line"
    )


def _local_checks(runner: Any) -> Iterator[str]:
    """Check rows of target and drafts, then the target's attention; yield a text for each check."""
    from sglang.srt.runtime_context import attention_backends

    from sgl_kvpool.srt.attention.layers import nested, outer_absorbed_layers
    from sgl_kvpool.srt.self_check import check_backend, check_lists, check_rows

    pool = runner.token_to_kv_pool
    yield check_rows(pool)
    for draft in list(peers.POOLS):
        if draft is not pool.row_pool:
            yield f"{check_rows(draft)} of a draft model"
    layers = outer_absorbed_layers(runner.model, pool)
    # Without our backend, its hook groups were not checked, so its modules may fail to import on this SGLang.
    ours = attention.backend_class(runner.device) if KVPOOL_BACKEND in attention_backends() else ()
    for backend in nested(runner.attn_backend):
        for layer in layers:
            if isinstance(backend, ours):
                yield check_backend(backend, layer)
            elif reader_of(backend) is not None:
                # SGLang's sparse backend needs a model's indexer, so the check calls the backend's reader.
                by_lists = partial(attend, backend)
                found = check_lists(pool, layer.layer_id, layer.tp_q_head_num, layer.scaling, by_lists)
                ranks = backend.dcp_size
                yield found + (f" with the heads of {ranks} ranks" if ranks > 1 else "")


def _controller(tree: Any) -> Any:
    """SGLang's controller of our host tier; None if the server has no such tier."""
    controller = getattr(tree, "cache_controller", None)
    if controller is None or not holds_our_rows(controller.mem_pool_host.anchor_entry.host_pool):
        return None
    return controller
