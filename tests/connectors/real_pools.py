"""Real SGLang pools of each kind, small and on the CPU, and their tensors listed by hand."""

import numpy as np
import torch
from codec_oracle import LAYOUTS
from pools import device_pool, dsa_pool, hybrid_pool, state_pool

MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "device": "cpu", "enable_memory_saver": False}
SHARED = {"skip_topk_layers": [False, True, False]}


def mha(page_size=4, size=12, heads=3, dim=8, v_dim=6, layers=2, **extra):
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    arguments = {"v_head_dim": v_dim, "start_layer": 5, **extra}
    return MHATokenToKVPool(size, page_size, torch.bfloat16, heads, dim, layers, "cpu", False, **arguments)


def mla(dtype=torch.bfloat16, **extra):
    return device_pool("bf16", stock=True, dtype=dtype, **{"pages": 4, **extra})


def mla_fp4():
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPoolFP4

    return MLATokenToKVPoolFP4(size=12, page_size=4, dtype=torch.uint8, layer_num=3, start_layer=5, **MLA)


def ours(layout, arrangement="layer_major", **extra):
    return device_pool(layout, arrangement, **{"pages": 4, **extra})


def dsa(layout="fp8_block_scale", **extra):
    return dsa_pool(layout, **{"stock": True, **SHARED, **extra})


def ours_dsa(layout, **extra):
    return dsa(layout, stock=False, **extra)


def swa(**extra):
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    return SWAKVPool(
        size=12, size_swa=8, page_size=4, dtype=torch.bfloat16, head_num=3, head_dim=8,
        swa_attention_layer_ids=[0, 2, 4], full_attention_layer_ids=[1, 3], device="cpu", **extra,
    )  # fmt: skip


def mamba(layer_ids=(0, 2)):
    return state_pool(layers=layer_ids)


def hybrid(layout="bf16", stock=True, **extra):
    return hybrid_pool(layout, stock=stock, layers=[1, 3, 5], mamba_pool=mamba(), **extra)


def leaf_tensors(pool):
    """Tensors of a pool's rows, keys and states, by hand: (group, layer, part) to [pages or slots, ...]."""
    kind = type(pool).__name__
    if kind == "SWAKVPool":
        full = {("full", [1, 3][i], p): t for (_, i, p), t in positions(pool.full_kv_pool).items()}
        return full | {("window", [0, 2, 4][i], p): t for (_, i, p), t in positions(pool.swa_kv_pool).items()}
    if "Hybrid" in kind:
        rows = {("kv", [1, 3, 5][i], part): t for (_, i, part), t in positions(pool.full_kv_pool).items()}
        return rows | leaf_tensors(pool.mamba_pool)
    if kind == "MambaPool":
        cache = pool.mamba_cache
        kinds = {"conv_0": cache.conv[0], "ssm": cache.temporal}
        return {("state", layer, part): t[i] for i, layer in enumerate((0, 2)) for part, t in kinds.items()}
    first = 2 if "DSA" in kind else 5
    return {("kv", first + i, part): t for (_, i, part), t in positions(pool).items()}


def positions(pool):
    """Like `leaf_tensors`, with positions instead of layer ids."""
    if hasattr(pool, "k_buffer"):
        found = {("kv", i, "k"): t for i, t in enumerate(pool.k_buffer)}
        return found | {("kv", i, "v"): t for i, t in enumerate(pool.v_buffer)}
    found = {("kv", i, "kv"): t for i, t in enumerate(pool.kv_buffer)}
    if getattr(pool, "kv_scale_buffer", None) is not None:
        found |= {("kv", i, "scale"): t for i, t in enumerate(pool.kv_scale_buffer)}
    if hasattr(pool, "index_k_with_scale_buffer"):
        index = enumerate(pool.index_k_with_scale_buffer)
        found |= {("kv", i, "indexer"): t for i, t in index if len(t)}
    return found


POOLS = {
    "mha": mha,
    "mha-page-1": lambda: mha(page_size=1, size=11),
    "mha-hnd": lambda: mha(),
    "mla-bf16": mla,
    "draft": lambda: mla(layers=1),  # an MTP layer
    "mla-fp8": lambda: mla(torch.float8_e4m3fn),
    "mla-fp4-split": mla_fp4,
    **{f"ours-{name}": (lambda n=name: ours(n)) for name in LAYOUTS},
    "dsa-656": dsa,
    "dsa-bf16": lambda: dsa("bf16"),
    **{f"ours-dsa-{name}": (lambda n=name: ours_dsa(n)) for name in LAYOUTS},
    "swa": swa,
    "hybrid-mla": hybrid,
    **{f"hybrid-ours-{name}": (lambda n=name: hybrid(n, stock=False)) for name in LAYOUTS},
    "hybrid-mha": lambda: hybrid(use_mla=False),
    "mamba": mamba,
}  # fmt: skip


def as_bytes(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


def fill(tensors):
    """Bytes with a period of 251, in a different order in every tensor."""
    for number, tensor in enumerate(tensors.values()):
        raw = np.arange(tensor.nbytes, dtype=np.int64)
        raw = ((raw * (2 * number + 3) + number) % 251).astype(np.uint8)
        tensor.copy_(torch.from_numpy(raw).view(tensor.dtype).view(tensor.shape))
