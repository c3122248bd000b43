"""SGLang's managers of prefill and decode servers over real pools, and its bootstrap server.

Both managers are SGLang's `CommonKVManager`, the base class of the managers of all transfer engines except
`fake`, with the arguments that SGLang's queues pass for real pools.
"""

import socket
import time
from types import SimpleNamespace

import pytest
import torch
from codec_oracle import LAYOUTS, ROW_BYTES
from pools import LAYERS, device_pool

from sgl_kvpool.commands.processes.server import free_port
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.sglang_plugin import hook_groups
from sgl_kvpool.sglang_plugin import options as record
from sgl_kvpool.sglang_plugin.hooks import pools

#: Layouts of a prefill and of a decode server: each with itself, and with the next one.
PAIRS = [(LAYOUTS[i], LAYOUTS[(i + n) % len(LAYOUTS)]) for n in (0, 1) for i in range(len(LAYOUTS))]
#: The string of each layout, fixed byte for byte because servers of other releases read it.
STRINGS = {
    **{name: f"bfloat16+kvpool:{name}-r512-p64-b{size}-v1" for name, size in ROW_BYTES.items()},
    "bf16": "auto",
    "fp8": "fp8_e4m3+kvpool:fp8-r512-p64-b576-v1",
    "fp8_block_scale": "bfloat16+kvpool:fp8_block_scale-r512-p64-b656-v1",
    "fp4": "bfloat16+kvpool:fp4-r512-p64-b416-v1",
    "fp4_fp8_rope": "bfloat16+kvpool:fp4_fp8_rope-r512-p64-b352-v1",
}


@pytest.fixture
def bootstrap(published):
    """Address of SGLang's bootstrap server, where decode servers look prefill servers up."""
    from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

    port = free_port()
    server = CommonKVBootstrapServer("127.0.0.1", port)
    for _ in range(500):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    yield f"127.0.0.1:{port}"
    server.close()


@pytest.fixture
def no_groups(published):
    """A process without process groups; a manager reads the pipeline group."""
    from sglang.srt.runtime_context import get_parallel

    # This must enclose SGLang's snapshot of the context, because a snapshot holds the record changed here.
    with get_parallel().override(pp_group=None):
        yield


@pytest.fixture
def manager_of(bootstrap, no_groups, published, kept_context, monkeypatch):
    """`manager_of(mode, pool, layout, draft, ...)`: SGLang's manager of a server, made by SGLang's queue.

    `layout` is the server's requested layout; None is a server without the plugin. `sizes` are arguments of
    a server of several ranks, and `manager` is the class of a transfer engine's manager.
    """
    from sglang.srt.disaggregation import decode, prefill
    from sglang.srt.disaggregation.base.conn import KVArgs
    from sglang.srt.disaggregation.common.conn import CommonKVManager
    from sglang.srt.disaggregation.utils import KVClassType, MetadataBuffers, TransferBackend
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
    from sglang.srt.server_args import ServerArgs

    monkeypatch.setattr(record, "_requested", set())
    hook_groups.apply(hook_groups.named("disaggregation"))
    classes = {KVClassType.KVARGS: KVArgs}
    for module in (prefill, decode):
        # The engines' own classes need their library and a network card.
        monkeypatch.setattr(module, "get_kv_class", lambda backend, kind: classes[kind])
    made, kept = [], []
    queues = {"prefill": prefill.PrefillBootstrapQueue, "decode": decode.DecodePreallocQueue}

    def build(
        mode, pool, layout="as the pool", draft=None, says_dtype=True, with_rows=None, rank=0,
        manager=CommonKVManager, model_dtype=torch.bfloat16, **sizes,
    ):  # fmt: skip
        classes[KVClassType.MANAGER] = manager
        model = SimpleNamespace(num_hidden_layers=LAYERS, hf_text_config=None)
        if with_rows is not None:  # a hybrid model; its other layers have states
            config = SimpleNamespace(full_attention_layer_ids=with_rows)
            model = SimpleNamespace(num_hidden_layers=2 * LAYERS, hf_text_config=config)
        args = ServerArgs(
            model_path="dummy", device=pool.device, host="127.0.0.1", page_size=pool.page_size,
            disaggregation_mode=mode, disaggregation_bootstrap_port=int(bootstrap.rpartition(":")[2]),
            **sizes,
        )  # fmt: skip
        get_parallel().clear_stamp()  # the rank of the manager before
        publish(args, role="scheduler", ranks=SpawnRanks(rank, None, 0))
        if layout == "as the pool":
            layout = pool.kv_cache_layout.value
        record.record(args, layout=layout and MLAKVCacheLayout(layout))  # as in a record from the launcher
        args._model_config = SimpleNamespace(dtype=model_dtype)
        shown = {torch.bfloat16: "bfloat16", torch.float8_e4m3fn: "fp8_e4m3"}[pool.dtype]
        if layout is None and shown == "bfloat16" and not pool.use_dsa:
            shown = args.kv_cache_dtype  # SGLang does not resolve the argument of a dense server
        runner = SimpleNamespace(kv_cache_dtype_str=shown if says_dtype else None)
        queue = object.__new__(queues[mode])
        vars(queue).update(
            transfer_backend=TransferBackend.MOONCAKE, tp_rank=rank, pp_rank=0, is_mla_backend=True,
            token_to_kv_pool=pool, draft_token_to_kv_pool=draft, enable_staging=False,
            metadata_buffers=MetadataBuffers(4, 16, torch.float32, 0),
            scheduler=SimpleNamespace(
                rust_server=None, server_args=args, enable_hisparse=False,
                tp_worker=SimpleNamespace(model_runner=runner), model_config=model,
            ),
        )  # fmt: skip
        kept.append(queue)  # its buffers, of which the manager has addresses
        made.append(queue._init_kv_manager())
        return made[-1]

    yield build
    engines = [manager for manager in made if type(manager) is not CommonKVManager]
    for manager in engines:  # whose threads end within half a second
        manager._stopped = True
    for manager in made:
        manager.teardown() if manager in engines else manager.server_socket.close(0)


def pool_of(layout, make=device_pool, **extra):
    """A pool after our hook of SGLang's builder."""
    decided = SimpleNamespace()
    record.record(decided, is_decided=True, layout=MLAKVCacheLayout(layout))
    builder = SimpleNamespace(server_args=decided, use_mla_backend=True, is_draft_worker=True)
    pool = make(layout, **extra)
    return pools._build_token_to_kv_pool(lambda self, **_: pool, builder, sizes=None)
