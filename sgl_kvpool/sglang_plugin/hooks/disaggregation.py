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

import math
from typing import Any
from weakref import WeakSet

import torch

from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.refusal import Refusal, Way, use_words
from sgl_kvpool.sglang_plugin.options import LAYOUT, config_of
from sgl_kvpool.sglang_plugin.registry import around, uses

uses(
    "sglang.srt.disaggregation.base.conn.KVArgs.__annotations__",
    "disaggregation",
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

#: Numbers of ranks that a prefill server reports; their limit, and that of a peer's characters in a message.
_SIZES = ("dp_size", "attn_cp_size", "attn_tp_size", "pp_size")
_MOST_RANKS, _MOST_CHARACTERS = 1 << 16, 400
uses(
    "sglang.srt.disaggregation.common.conn.PrefillServerInfo.__annotations__",
    "disaggregation",
    members=(*_SIZES, "kv_cache_dtype", "kv_layout"),
)

#: Separator between SGLang's dtype and the name of the rows.
MARK = "+kvpool:"

#: All pools of this process with a layout, the target's and the drafts': a KV manager gets the addresses of
#: buffers, not the pools.
POOLS: WeakSet = WeakSet()


@around(
    "sglang.srt.disaggregation.common.conn.CommonKVManager.__init__",
    "disaggregation",
    reads=("is_mla_backend",),
)
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
            args.kv_cache_dtype_str += MARK + rows_name(_pools_behind(args), bool(args.num_draft_entries))
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
        args.kv_layout = ranks_name(get_parallel())
    original(self, args, disaggregation_mode, server_args, *more, **named)
    if disaggregation_mode.value == "decode":
        self.kv_layout = None  # compared in `check_peer`; SGLang's error would name other arguments


def ranks_name(sizes: Any) -> str:
    """Which ranks share the rows of a sequence; `sizes` are SGLang's parallel context or a KV manager."""
    return f"--dcp-size {sizes.dcp_size} of {sizes.attn_tp_size} attention ranks"


def rows_name(pools: list[Any], has_draft: bool = False) -> str:
    """Name of the rows of some pools, equal only where peers may copy them from each other.

    `pools` are the target's, then the draft's if it has a layout. The name has row formats, with sizes in
    bytes and version, `draft` for a draft whose rows have no name of their own, and a digest of the k_scales
    if one is not 1. It leaves out page size, number of pages and number of layers, which SGLang compares or
    handles. Refusal if a k_scale is not 1 under pipeline parallelism: a stage knows the k_scales of its own
    layers only.
    """
    from sglang.srt.runtime_context import get_parallel

    from sgl_kvpool.srt.pool.row_pool import k_scales_digest

    tags = list(dict.fromkeys(pool.row_format.tag for pool in pools))
    if has_draft and len(tags) == 1:
        # SGLang sends a draft's buffers to the last buffers of the peer, and does not compare whether the
        # peer has a draft too. If it had none, the rows of the peer's last layer would be overwritten.
        tags.append("draft")
    name = "+".join(tags)
    scales = k_scales_digest(pools)
    if not scales:
        return name
    if get_parallel().pp_size > 1:
        raise Refusal(
            f"--disaggregation-mode with --pp-size {get_parallel().pp_size} does not work with {LAYOUT.flag} "
            f"{pools[0].kv_cache_layout} and a checkpoint whose k_scale is not 1: every stage has scales of "
            "its own, and SGLang compares those of one stage",
            use_words("--pp-size=1"),
            Way(f"{LAYOUT.flag} {MLAKVCacheLayout.BF16}", add=(f"{LAYOUT.flag}={MLAKVCacheLayout.BF16}",)),
        )
    return f"{name}-k{scales}"


def _pools_behind(args: Any) -> list[Any]:
    """Our pools whose buffers a KV manager is about to describe to its peers, in the manager's order."""
    owners = {
        address: (pool, page_bytes)
        for pool in POOLS
        for address, _, page_bytes in zip(*pool.get_contiguous_buf_infos(), strict=True)
    }
    found: dict[Any, None] = {}
    of_target = len(args.kv_data_ptrs) - args.num_draft_entries
    for number, (address, size) in enumerate(zip(args.kv_data_ptrs, args.kv_item_lens, strict=True)):
        pool, page_bytes = owners.get(address, (None, size))
        if pool is None and number >= of_target:
            continue  # SGLang's string is right for the pool of a draft without MLA
        if pool is None or page_bytes != size:
            raise RuntimeError(
                f"SGLang describes buffer {number + 1} of {len(args.kv_data_ptrs)} to its peers with pages "
                f"of {size} bytes, and no pool of sgl-kvpool has such pages; leave out {LAYOUT.flag} or "
                "--disaggregation-mode, and report the server's arguments"
            )
        found[pool] = None
    return list(found)


class PeerMismatch(RuntimeError):
    """A prefill server does not match this decode server."""


def check_peer(manager: Any, where: str, answer: dict[str, Any]) -> None:
    """Raise PeerMismatch where SGLang would not, or would name arguments that do not help."""
    from sglang.srt.disaggregation.common.conn import PrefillServerInfo

    sizes: dict[str, Any] = {name: answer.get(name) for name in _SIZES}
    are_numbers = all(type(size) is int and size > 0 for size in sizes.values())
    if not are_numbers or math.prod(sizes.values()) > _MOST_RANKS:
        raise PeerMismatch(f"{where} reports {short(str(sizes))}; at most {_MOST_RANKS} ranks are possible")
    info = PrefillServerInfo(**answer)
    prefill, decode = info.kv_cache_dtype or "", manager.kv_cache_dtype_str
    if decode == "auto" and prefill in MLAKVCacheLayout.BF16.accepted_kv_cache_dtypes:
        answer["kv_cache_dtype"] = decode  # another name of the same rows
    elif prefill != decode and MARK in prefill + decode:
        raise PeerMismatch(
            f"KV cache layout mismatch: {where} stores {_described(prefill)}, and this decode server stores "
            f"{_described(decode)}. Start both with the same {LAYOUT.flag}, model, checkpoint, draft model "
            f"(--speculative-algorithm) and release of sgl-kvpool; {MLAKVCacheLayout.BF16} also works with "
            "servers that do not have it."
        )
    if info.page_size not in (None, manager.kv_args.page_size):
        return  # SGLang's error comes first
    if manager.kv_layout is None and info.kv_layout not in (None, ranks_name(manager)):
        raise PeerMismatch(
            f"{where} shares rows over {short(str(info.kv_layout))}, and this decode server over "
            f"{ranks_name(manager)}: SGLang sends to other ranks only what one rank has. Start the prefill "
            "server without --dcp-size, or both with the same ranks."
        )


def short(text: str) -> str:
    """The beginning of a text that a peer may have chosen, as printable ASCII characters."""
    return text[:_MOST_CHARACTERS].encode("unicode_escape").decode()


def _described(text: str) -> str:
    layout = text.partition(MARK)[2].partition("-")[0]
    rows = f"rows of layout {short(layout)}" if layout else "SGLang's own rows"
    return f"{rows} ({short(text)})" if text else "rows that it does not report"
