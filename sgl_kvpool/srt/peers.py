"""What prefill and decode servers say of their rows, whom they accept, and how they ask and notify a peer."""

import asyncio
import functools
import ipaddress
import json
import logging
import math
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any
from weakref import WeakSet

import zmq

from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.refusal import Refusal, Way, use_words

logger = logging.getLogger(__name__)

_LAYOUT = "--kv-cache-layout"

#: Numbers of ranks that a prefill server reports; their limit, and that of a peer's characters in a message.
SIZES = ("dp_size", "attn_cp_size", "attn_tp_size", "pp_size")
_MOST_RANKS, _MOST_CHARACTERS = 1 << 16, 400
#: How a request names a rank.
_RANK = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
#: Limits of an answer, and of requests that prefill servers are being notified of.
_ANSWER_SECONDS, _ANSWER_BYTES, _MOST_NOTIFIED = 5.0, 1 << 16, 256
#: A prefill server forgets what it hears of a request in its own queue, and is notified again.
TOLD_TIMES, TOLD_EVERY_SECONDS = 8, 0.25
#: Separator between SGLang's dtype and the name of the rows.
MARK = "+kvpool:"

#: All pools of this process with a layout, the target's and the drafts': a KV manager gets the addresses of
#: buffers, not the pools.
POOLS: WeakSet = WeakSet()


def ranks_name(sizes: Any, args: Any) -> str:
    """Ranks that share the rows of a sequence, of SGLang's parallel context or a KV manager, and a draft."""
    draft = " with a draft" if args.num_draft_entries else ""
    return f"--dcp-size {sizes.dcp_size} of {sizes.attn_tp_size} attention ranks{draft}"


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
            f"--disaggregation-mode with --pp-size {get_parallel().pp_size} does not work with {_LAYOUT} "
            f"{pools[0].kv_cache_layout} and a checkpoint whose k_scale is not 1: every stage has scales of "
            "its own, and SGLang compares those of one stage",
            use_words("--pp-size=1"),
            Way(f"{_LAYOUT} {MLAKVCacheLayout.BF16}", add=(f"{_LAYOUT}={MLAKVCacheLayout.BF16}",)),
        )
    return f"{name}-k{scales}"


def pools_behind(args: Any) -> list[Any]:
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
                f"of {size} bytes, and no pool of sgl-kvpool has such pages; leave out {_LAYOUT} or "
                "--disaggregation-mode, and report the server's arguments"
            )
        found[pool] = None
    return list(found)


class PeerMismatch(RuntimeError):
    """A prefill server does not match this decode server."""


def check_peer(manager: Any, where: str, answer: dict[str, Any]) -> None:
    """Raise PeerMismatch where SGLang would not, or would name arguments that do not help."""
    from sglang.srt.disaggregation.common.conn import PrefillServerInfo

    sizes: dict[str, Any] = {name: answer.get(name) for name in SIZES}
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
            f"{_described(decode)}. Start both with the same {_LAYOUT}, model, checkpoint, draft model "
            f"(--speculative-algorithm) and release of sgl-kvpool; {MLAKVCacheLayout.BF16} also works with "
            "servers that do not have it."
        )
    if info.page_size not in (None, manager.kv_args.page_size):
        return  # SGLang's error comes first
    own = ranks_name(manager, manager.kv_args)
    if manager.kv_layout is None and info.kv_layout not in (None, own):
        raise PeerMismatch(
            f"{where} shares rows over {short(str(info.kv_layout))}, and this decode server over "
            f"{own}: SGLang sends to other ranks only what one rank has. Start the prefill "
            "server without --dcp-size, or both with the same ranks and draft."
        )


def short(text: str) -> str:
    """The beginning of a text that a peer may have chosen, as printable ASCII characters."""
    return text[:_MOST_CHARACTERS].encode("unicode_escape").decode()


def _described(text: str) -> str:
    layout = text.partition(MARK)[2].partition("-")[0]
    rows = f"rows of layout {short(layout)}" if layout else "SGLang's own rows"
    return f"{rows} ({short(text)})" if text else "rows that it does not report"


_notified = asyncio.Semaphore(_MOST_NOTIFIED)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="kvpool-peers", daemon=True).start()
    return loop


def start(work: Coroutine[Any, Any, Any]) -> Future[Any]:
    """Let the thread do some work; if no thread can be started, the work fails."""
    try:
        return asyncio.run_coroutine_threadsafe(work, _loop())
    except RuntimeError as error:
        work.close()
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return failed


async def ask(address: str, *rank: int) -> dict[str, Any]:
    """A prefill server's answer about a rank, or about all ranks if the numbers are -1."""
    import aiohttp

    limit = aiohttp.ClientTimeout(_ANSWER_SECONDS)
    url, query = f"http://{address}/route", dict(zip(_RANK, rank, strict=True))
    try:
        async with (
            aiohttp.ClientSession(timeout=limit, raise_for_status=True, trust_env=True) as session,
            session.get(url, params=query) as response,
        ):
            body = b""
            while part := await response.content.read(_ANSWER_BYTES + 1 - len(body)):
                body += part
        return {**json.loads(body)}
    except Exception as error:  # whatever a peer answers instead is no answer
        raise ValueError(short(repr(error))) from None


async def notify_of_refusal(address: str, answer: Future[dict[str, Any]], manager: Any, room: int) -> None:
    """Notify the first rank of each DP rank that may have a request; if it fails there, all ranks fail it."""
    from sglang.srt.disaggregation.common.conn import AbortNotification
    from sglang.srt.utils.network import NetworkAddress

    message = AbortNotification(room, manager.local_ip, manager.rank_port).to_zmq()

    async def notify(dp_rank: int) -> None:
        rank = await ask(address, dp_rank, 0, 0, 0)
        ip = str(ipaddress.ip_address(rank["rank_ip"]))  # a name could hold up ZeroMQ's thread
        # A context of its own would have threads of its own.
        with manager.server_socket.context.socket(zmq.PUSH) as socket:
            socket.linger, socket.ipv6 = 1000, True
            socket.connect(NetworkAddress(ip, int(rank["rank_port"])).to_tcp())
            for _ in range(TOLD_TIMES):
                socket.send_multipart(message, zmq.DONTWAIT)
                await asyncio.sleep(TOLD_EVERY_SECONDS)

    try:
        if _notified.locked():
            raise RuntimeError(f"{_MOST_NOTIFIED} others are being notified")
        async with _notified:
            dp_size, by_room = (answer.result()[name] for name in ("dp_size", "follow_bootstrap_room"))
            dp_ranks = [room % dp_size] if by_room else range(min(dp_size, _MOST_NOTIFIED))
            await asyncio.gather(*map(notify, dp_ranks))
    except Exception as error:  # whatever a peer answers is its own failure
        text = "sgl-kvpool: the prefill server at %s is not notified of a refused request: %s"
        logger.warning(text, short(address), short(repr(error)))
