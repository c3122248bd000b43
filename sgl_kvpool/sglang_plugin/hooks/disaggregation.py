"""Hooks of prefill and decode servers (`--disaggregation-mode`): peers must store the same rows.

SGLang's transfer engines copy bytes by pointers, lengths and page sizes, which a layer-major pool of any
layout reports correctly. Before a transfer, the decode server compares its `KVArgs.kv_cache_dtype_str` with
the prefill server's, but several layouts declare the same dtype to SGLang. So the row format is added to
that string, for example `bfloat16+kvpool:fp4-r512-p64-b416-v1`. A decode server without this plugin compares
the string too.

With decode context parallelism, `KVArgs.kv_layout`, which SGLang sets for DeepSeek-V4 alone, says which ranks
share rows. SGLang sends rows of one rank to any number of ranks, and rows of several ranks to as many; what
else a decode server asks for would end the thread by which a prefill server hears of all requests.
"""

import torch

from sgl_kvpool.sglang_plugin.options import config_of
from sgl_kvpool.sglang_plugin.registry import around, uses
from sgl_kvpool.srt.peers import MARK, SIZES, pools_behind, ranks_name, rows_name

_CONN, _GROUP = "sglang.srt.disaggregation.common.conn", "disaggregation"
uses(
    "sglang.srt.disaggregation.base.conn.KVArgs.__annotations__",
    _GROUP,
    members=("kv_cache_dtype_str", "kv_data_ptrs", "kv_item_lens", "kv_layout", "num_draft_entries"),
)
# What prefill and decode servers on a CPU set, by transfer backend.
uses(
    "sglang.srt.disaggregation.mooncake.conn.MooncakeKVSender.supports_host_tensor_indices",
    "disaggregation over mooncake on a CPU",
)
uses(
    "sglang.srt.disaggregation.nixl.conn._normalize_kv_mem_kinds",
    "disaggregation over nixl on a CPU",
    takes=("kinds", "expected_len"),
)

uses(f"{_CONN}.PrefillServerInfo.__annotations__", _GROUP, members=(*SIZES, "kv_cache_dtype", "kv_layout"))


@around(f"{_CONN}.CommonKVManager.__init__", _GROUP, reads=("is_mla_backend",))
def _init_kv_manager(original, self, args, disaggregation_mode, server_args, *more, **named):
    """Add the row format, and the ranks that share rows, to what the original registers for peers."""
    layout = config_of(server_args).layout
    if layout is None:
        return original(self, args, disaggregation_mode, server_args, *more, **named)
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.disaggregation.base.conn import StateType
    from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class
    from sglang.srt.runtime_context import get_device, get_disagg, get_parallel

    # Rows in SGLang's own format get no mark, since peers without the plugin read and write them.
    if not layout.is_sglang_native:
        if MARK not in args.kv_cache_dtype_str:
            args.kv_cache_dtype_str += MARK + rows_name(pools_behind(args), bool(args.num_draft_entries))
    elif StateType.DSA not in args.state_types and model_config_of(server_args).dtype is torch.bfloat16:
        # What a dense server without the plugin reports: its argument; `auto` are rows in the model's dtype.
        args.kv_cache_dtype_str = server_args.kv_cache_dtype
    if get_device().device == "cpu":
        # Two values that SGLang supports there, but does not set. Its prefill server passes page indices to
        # Mooncake through pinned memory and a CUDA event if the sender supports tensors (prefill.py:1746),
        # otherwise as numpy arrays. SGLang declares all buffers to NIXL as VRAM (nixl/conn.py:206).
        # The backend's name is resolved: `mooncake_tcp` is `mooncake` by now.
        backend = TransferBackend(get_disagg().disaggregation_transfer_backend)
        sender = get_kv_class(backend, KVClassType.SENDER)
        if hasattr(sender, "supports_host_tensor_indices"):
            sender.supports_host_tensor_indices = False
        args.kv_data_mem_kinds = ["DRAM"] * len(args.kv_data_ptrs)
    if get_parallel().dcp_size > 1:
        # SGLang's checksums of pages have it too: those of a rank are not compared with those of all rows.
        args.kv_layout = ranks_name(get_parallel(), args)
    original(self, args, disaggregation_mode, server_args, *more, **named)
    if disaggregation_mode.value == "decode":
        self.kv_layout = None  # compared in `peers.check_peer`; SGLang's error would name other arguments
