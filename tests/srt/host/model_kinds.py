"""Kinds of models by their attention and drafts, their real pools, and SGLang's context of their servers."""

from dataclasses import dataclass

import pools
import torch

#: A hybrid model of five layers: 1 and 4 are MLA layers, 0, 2 and 3 are linear layers.
ROW_LAYERS, STATE_LAYERS = [1, 4], [0, 2, 3]
#: NIXL's POSIX files, which SGLang's cleaner would delete on a disk that is 80 % full.
NIXL_POSIX = '{"plugin": {"posix": {"active": true}}, "l3_cleaner_enabled": false}'
#: --hicache-storage-backend-extra-config of stores; prefixes of one token are fetched too.
STORE_CONFIGURATIONS = {
    **dict.fromkeys(("file", "mooncake"), '{"prefetch_threshold": 1}'),
    "nixl": NIXL_POSIX[:-1] + ', "prefetch_threshold": 1, "use_direct_io": false}',
}


@dataclass(frozen=True)
class Kind:
    """Attention of the target, and its drafts: packed with it, or one with a tier of its own.

    A draft with "heads" stores keys and values of heads (EAGLE3), in SGLang's own host pool.
    """

    sparse: bool = False
    hybrid: bool = False
    packed: tuple[str, ...] = ()
    own: str | None = None


KINDS = {
    "dense": Kind(),
    "dense, packed draft": Kind(packed=("dense",)),
    "dense, own draft": Kind(own="dense"),
    "dense, own draft with heads": Kind(own="heads"),
    "DSA": Kind(sparse=True),
    "DSA, packed draft": Kind(sparse=True, packed=("sparse",)),
    "DSA, own draft": Kind(sparse=True, own="sparse"),
    "DSA, own draft with heads": Kind(sparse=True, own="heads"),
    "hybrid": Kind(hybrid=True),
    "hybrid, packed draft": Kind(hybrid=True, packed=("hybrid",)),
    "hybrid, plain packed draft": Kind(hybrid=True, packed=("dense",)),
    "hybrid DSA": Kind(hybrid=True, sparse=True),
    "hybrid DSA, packed draft": Kind(hybrid=True, sparse=True, packed=("hybrid",)),
    "hybrid DSA, plain packed draft": Kind(hybrid=True, sparse=True, packed=("sparse",)),
    "hybrid DSA, own draft": Kind(hybrid=True, sparse=True, own="sparse"),
}


def publish_server(
    patch, *, page_size, store=None, backend="file", rank=0, shared=None, model_name="model", **arguments
):
    """Publish SGLang's context of a server with a host tier; returns its arguments. `store` is a folder."""
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(
        model_path="dummy", device="cpu", enable_hierarchical_cache=True, page_size=page_size,
        hicache_storage_backend=store and backend, served_model_name=model_name,
        hicache_storage_backend_extra_config=store and STORE_CONFIGURATIONS[backend],
        hicache_storage_prefetch_policy="wait_complete", **arguments,
    )  # fmt: skip
    # The chunk size of a hybrid model's kernels; there is no model config to derive it from.
    args._mamba_cache_chunk_size = page_size
    if shared is not None:
        from sgl_kvpool.sglang_plugin.options import record
        from sgl_kvpool.transfer.host_options import HostTierOptions

        record(args, host_tier=HostTierOptions(sharing=shared))
    get_parallel().clear_stamp()  # set for the previous server
    publish(args, role="scheduler", ranks=SpawnRanks(rank, None, 0))
    if store:
        patch.setenv(f"SGLANG_HICACHE_{backend.upper()}_BACKEND_STORAGE_DIR", str(store))
    return args


def request_pool(kind="kda", slots=6, context=64):
    """SGLang's request table with the states of a hybrid model."""
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    return HybridReqToTokenPool(
        size=4, mamba_size=slots, mamba_spec_state_size=0, max_context_len=context, device="cpu",
        enable_memory_saver=False, cache_params=pools.cache_params(kind, STATE_LAYERS),
        mamba_layer_ids=STATE_LAYERS, enable_mamba_extra_buffer=True,
    )  # fmt: skip


def pool_of(kind, layout, page_size, pages, requests=None, draft=None, arrangement="layer_major", **options):
    """The pool of a kind's target, or of one of its drafts, with a layer: it has the target's states."""
    from sglang.srt.runtime_context import get_parallel

    what = draft or ("hybrid" if kind.hybrid else "sparse" if kind.sparse else "dense")
    if draft and (ranks := get_parallel().attn_dcp_size) > 1:  # each has all rows of a draft
        page_size *= ranks
        options |= {} if draft == "heads" else {"dcp_replicated": True}
    sizes = {"page_size": page_size, "size": pages * page_size}
    if what == "hybrid":
        return pools.hybrid_pool(
            layout, arrangement, sparse=kind.sparse, layers=[0] if draft else ROW_LAYERS,
            mamba_pool=requests.mamba_pool, **sizes, **options,
        )  # fmt: skip
    if what == "heads":
        return heads_pool(**sizes)
    if what == "sparse":
        skip = {} if draft else {"skip_topk_layers": [False, True, False]}
        return pools.dsa_pool(layout, start_layer=0, layer_num=1 if draft else 3, **sizes, **skip, **options)
    return pools.device_pool(
        layout, arrangement, layers=1 if draft else 3, start_layer=0, **sizes, **options
    )  # fmt: skip


def heads_pool(**sizes):
    """SGLang's pool of keys and values of heads."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return MHATokenToKVPool(
        dtype=torch.bfloat16, head_num=8, head_dim=64, layer_num=1, device="cpu", enable_memory_saver=False,
        **sizes,
    )  # fmt: skip
