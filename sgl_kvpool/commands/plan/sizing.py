"""SGLang's decisions for one server on the described GPU: arguments, attention, and the cache.

Each server is sized in its own process, because SGLang's arguments and configuration are global.
"""

import contextlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from sgl_kvpool.commands.named_model import weights_gib
from sgl_kvpool.commands.plan import plannable
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.sglang_plugin.pool_request import PoolRequest
from sgl_kvpool.sglang_plugin.server import Server
from sgl_kvpool.srt.facts.readers import DSA_BACKEND, KVPOOL_BACKEND, PHASES, SGLANG_READERS
from sgl_kvpool.srt.facts.topk_transform import KVPOOL_DECODE
from sgl_kvpool.srt.pool.drafts import own_draft, packed_layers
from sgl_kvpool.transfer.host_options import NODE

_GIB = 1 << 30


@dataclass(frozen=True)
class Machine:
    """Memory of the machine before a server loads weights."""

    gpu_gib: float
    gpu_count: int
    #: Memory of each GPU in use before weights are loaded: CUDA's context, NCCL's buffers.
    taken_gib: float
    #: Weights of the whole model, divided equally among the ranks of tensor parallelism.
    weights_gib: float
    #: Whether `weights_gib` includes a separate draft; else its weights are added if its path is a folder.
    drafts_included: bool = False


def size_server(model_path: str, arguments: Sequence[str], machine: Machine) -> dict[str, Any]:
    """Resolve a server's arguments and size its cache, by SGLang's code.

    `model_path` is a folder from which SGLang reads the configuration; with SGLANG_USE_MODELSCOPE also a name
    on that hub. Returns values that JSON can hold, with sizes of one rank.

    Any exception, also SystemExit, with which SGLang or our rules refuse such a server.
    """
    from sglang.srt.runtime_context import SpawnRanks, get_schedule, publish
    from sglang.srt.server_args import prepare_server_args

    from sgl_kvpool.sglang_plugin import hook_groups

    hook_groups.apply((hook_groups.POOLS,))
    words = ("--model-path", model_path, "--device", "cuda", *arguments)
    server_args = _parsed(prepare_server_args, words)
    server_args.resolve_once()
    server = Server(server_args)
    view, model_config, layout = server.view, server.model_config, server.config.layout
    plannable.check_plannable(server)
    server_args.check_server_args()  # as SGLang's launcher, before it publishes them
    publish(server_args, role="scheduler", ranks=SpawnRanks(0, None, 0))
    plannable.check_geometry(model_config, Path(model_path))
    plannable.check_heads(model_config)
    # The resolved `dp_size` counts replicas. Groups of DP attention, which share the `tp_size` ranks, are in
    # `attn_dp_size`.
    ranks = view.tp_size * view.dp_size
    stages = [_configurator(server_args, view, model_config, stage) for stage in range(view.pp_size)]
    # The stage whose rows of a token are largest determines the tokens of a pipeline.
    stages.sort(key=lambda stage: _pool_configurator(stage)._cell_size, reverse=True)
    configurator = stages[0]
    caches = configurator.attn_dp_size * view.dp_size
    plannable.check_drafts(server, configurator)
    draft_gib = None
    # SGLang loads a draft's weights before it sizes the cache.
    if server.has_own_draft and not machine.drafts_included:
        draft_gib = weights_gib(Path(view.speculative_draft_model_path)) or 0.0
    all_weights_gib = machine.weights_gib + (draft_gib or 0.0)
    plannable.check_weights(all_weights_gib, machine, view, model_config)
    config, available_bytes = _sized(stages, machine, all_weights_gib / (view.tp_size * view.pp_size))
    sizes = _pool_configurator(configurator)
    states, draft = configurator.mambaish_config, own_draft(configurator)
    tier = None
    if layout is not None and view.enable_hierarchical_cache:
        tier = _host_tier(PoolRequest(configurator))
    return {
        "page_size": view.page_size,
        "tokens": configurator.logical_token_capacity(max_total_num_tokens=config.max_total_num_tokens),
        "is_capped": available_bytes // sizes._cell_size > (view.max_total_tokens or inf),
        "stages": view.pp_size,
        "max_running_requests": config.max_running_requests,
        "requested_running_requests": view.max_running_requests,
        "state_slots": 0 if states is None else get_schedule().max_mamba_cache_size,
        "state_slot_bytes": PoolRequest(configurator).slot_bytes,
        "cell_bytes": sizes._cell_size,
        # Bytes of a token in a draft's own pool, as our layouts count it; SGLang counts other bytes.
        "draft_pool_bytes": 0 if layout is None or draft is None else draft.token_bytes(layout),
        "workspace_bytes": sizes._fixed_overhead_bytes,
        "available_bytes": available_bytes,
        "mem_fraction_static": view.mem_fraction_static,
        # Schedulers with a cache of their own, of `tokens` tokens each.
        "caches": caches,
        # Ranks with a full copy of the rows of one cache.
        "row_copies": ranks // caches // view.dcp_size,
        "attention_copies": configurator.attn_dp_size,
        # Weights of a separate draft model that `weights_gib` does not include; 0 if unknown.
        "draft_weights_gib": draft_gib,
        "ranks_per_node": ranks * view.pp_size // view.nnodes,
        "attention": _attention(server),
        "host": tier,
        "model": _facts(server, stages),
    }


def _parsed(parse: Callable, arguments: Sequence[str]) -> Any:
    """SGLang's ServerArgs; ValueError with the parser's message for wrong arguments."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return parse(list(arguments))
    except SystemExit as ended:
        lines = errors.getvalue().strip().splitlines()
        raise ValueError(lines[-1] if lines else "these arguments start no server") from ended


def _configurator(server_args: Any, view: Any, model_config: Any, stage: int) -> Any:
    """SGLang's KVCacheConfigurator of a target's stage, as its model runner makes it, but without a model."""
    from types import SimpleNamespace

    import torch
    from sglang.srt.distributed.utils import get_pp_indices
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.model_executor.model_runner_components.layer_setup import resolve_layer_indices
    from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import (
        resolve_spec_aux_hidden_state_config,
    )
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    algorithm = SpeculativeAlgorithm.from_string(view.speculative_algorithm)
    dtypes = {"auto": model_config.dtype, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16}
    dtypes["fp8_e4m3"] = torch.float8_e4m3fn
    model = None
    if view.pp_size > 1:
        start_layer, end_layer = get_pp_indices(model_config.num_hidden_layers, stage, view.pp_size)
        model = SimpleNamespace(start_layer=start_layer, end_layer=end_layer)
    if view.kv_cache_dtype not in dtypes:
        raise ValueError(f"--kv-cache-dtype {view.kv_cache_dtype} is not supported by `plan`; leave it out")
    return KVCacheConfigurator(
        device="cuda",
        gpu_id=0,
        attn_dp_size=get_parallel().attn_dp_size,
        pp_size=view.pp_size,
        pp_group=None,
        model=None,
        model_config=model_config,
        server_args=server_args,
        kv_cache_dtype=dtypes[view.kv_cache_dtype],
        kv_cache_dtype_str=view.kv_cache_dtype,
        model_dtype=model_config.dtype,
        page_size=view.page_size,
        sliding_window_size=None,
        spec_algorithm=algorithm,
        is_draft_worker=False,
        post_capture_kv_active=False,  # only for multi-head models in SGLang
        spec_aux_config=resolve_spec_aux_hidden_state_config(
            server_args=server_args,
            model_config=model_config,
            spec_algorithm=algorithm,
            is_draft_worker=False,
        ),
        is_hybrid_swa=False,
        is_hybrid_swa_compress=False,
        use_mla_backend=True,
        layer_info=resolve_layer_indices(model=model, model_config=model_config, is_draft_worker=False),
        forward_stream=None,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=None,
        memory_pool_config=None,
    )


def _sized(stages: list[Any], machine: Machine, rank_weights_gib: float) -> tuple[Any, int]:
    """SGLang's MemoryPoolConfig of the first stage, and the bytes for rows from which SGLang computed it."""
    from types import SimpleNamespace

    import torch
    from sglang.srt.mem_cache import kv_cache_configurator
    from sglang.srt.runtime_context import get_parallel

    free_gib = machine.gpu_gib - machine.taken_gib
    left_gib = free_gib - rank_weights_gib
    kv_cache_configurator.get_available_gpu_memory = lambda *_, **__: left_gib
    found: list[int] = []
    from_budget = type(stages[0]).config_from_budget
    capacities: list[int] = []

    def watched(self: Any, budget_bytes: int, **kwargs: Any) -> Any:
        found.append(budget_bytes)
        return from_budget(self, budget_bytes, **kwargs)

    def minimum(tensor: Any, **_: Any) -> None:  # by which the stages agree
        capacities.append(int(tensor))
        tensor.fill_(min(capacities))

    type(stages[0]).config_from_budget = watched
    torch.distributed.all_reduce = minimum
    # This process has no process groups, and the memory is the same on every rank.
    with get_parallel().override(world_group=SimpleNamespace(cpu_group=None)):
        for stage in reversed(stages):
            config = stage._resolve_memory_pool_config(free_gib)
    return config, found[-1]


def _pool_configurator(configurator: Any) -> Any:
    from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator

    return create_memory_pool_configurator(configurator)


def _host_tier(server: PoolRequest) -> dict[str, int]:
    """Host bytes: the fields of `planned.HostBytes` except the device's sizes."""
    from sgl_kvpool.srt.host.page_format import HostPageFormat

    configurator, states_bytes = server.configurator, server.slot_bytes
    view, page_size = server.view, server.view.page_size
    # Ranks of a node that share one copy of a host page.
    is_shared = server.config.host_tier.sharing == NODE
    sharing_ranks = min(server.same_rows_ranks, view.tp_size // view.nnodes) if is_shared else 1
    both = server.layout, server.host_layout
    device_row, host_row = (server.row_format_in(each).row_bytes for each in both)
    packed = packed_layers(configurator) * view.dcp_size  # each rank has all rows of a draft
    rows, draft = server.stage_rows + packed, own_draft(configurator)
    on_device, on_host = (0 if draft is None else draft.token_bytes(each) for each in both)
    # The device bytes that SGLang counts per token besides the rows; SGLang's tier has them in another pool.
    keys = _pool_configurator(configurator)._cell_size - rows * device_row - on_device
    in_page = rows * host_row + (keys if server.has_our_tier else 0)
    return {
        "token_bytes": HostPageFormat.of_rows(page_size * in_page, page_size).bytes_per_token(page_size),
        "index_bytes": 0 if server.has_our_tier else keys,
        "spread_ranks": view.dcp_size,
        "draft_bytes": on_host,
        "slot_bytes": HostPageFormat.of_states(states_bytes).size_bytes if states_bytes else 0,
        "sharing_ranks": sharing_ranks,
    }


def _facts(server: Server, stages: list[Any]) -> dict[str, Any]:
    model_config, with_rows = server.model_config, server.layers_with_rows
    return {
        "name": server.model_name,
        "kind": "sparse" if server.is_dsa else "dense",
        "linear_layers": 0 if with_rows is None else model_config.num_hidden_layers - len(with_rows),
        "layers_with_rows": sum(PoolRequest(stage).stage_rows for stage in stages) + packed_layers(stages[0]),
        "kv_lora_rank": model_config.kv_lora_rank,
        "qk_rope_head_dim": model_config.qk_rope_head_dim,
        "context_len": model_config.context_len,
    }


def _attention(server: Server) -> dict[str, str]:
    """Prefill and decode backends of a layout, or of SGLang's own pool, and the reason for them."""
    from sgl_kvpool.srt.facts.topk_transform import is_ours, table_names

    layout, view = server.config.layout, server.view
    if not server.is_dsa:
        prefill, decode = (name or "SGLang's choice at start" for name in server.backends)
        why = _why(layout, KVPOOL_BACKEND in (prefill, decode), sparse=False)
        return {"prefill": prefill, "decode": decode, "why": why}
    pair = view.dsa_prefill_backend, view.dsa_decode_backend
    if layout is not None:
        pair = table_names(*pair, ours=is_ours(layout, view.dcp_size))
    why = _why(layout, pair[1] == KVPOOL_DECODE, sparse=True)
    if layout is not None and view.dcp_size > 1:
        pair = KVPOOL_DECODE, KVPOOL_DECODE
        why = f"stored rows by {KVPOOL_DECODE}; SGLang's kernel for rows of several ranks is for Blackwell"
    prefill, decode = (f"{DSA_BACKEND}/{name}" for name in pair)
    return {"prefill": prefill, "decode": decode, "why": why}


def _why(layout: MLAKVCacheLayout | None, is_ours: bool, *, sparse: bool) -> str:
    if layout is None:
        return "SGLang's choice"
    if not is_ours:
        return f"SGLang's choice, which reads {layout} rows as they are stored"
    if sparse:
        return (
            f"decode by {KVPOOL_DECODE}, because no kernel of SGLang's reads {layout} rows; prefill attends "
            "decoded rows"
        )
    casting = SGLANG_READERS[layout].casting_backends
    casts = " and ".join(sorted(name for name, phases in casting.items() if phases == PHASES))
    if casts:
        others = f"{casts} would cast the whole pool of a layer in every call"
    elif not SGLANG_READERS[layout].backends:
        others = f"no other backend reads {layout} rows"
    else:
        return "as the arguments require"
    return f"{others}; {KVPOOL_BACKEND} reads the rows of the batch once, in their stored size"
