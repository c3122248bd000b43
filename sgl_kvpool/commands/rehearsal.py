"""What warmup and doctor set up instead of a server: its arguments, and a pool."""

from typing import Any

from sgl_kvpool.srt.facts.readers import sglang_dsa_reads
from sgl_kvpool.srt.pool.row_pool import PoolOptions


def publish(device: str, **arguments: Any) -> None:
    """Set the global state in which SGLang's classes expect a server's arguments (fields of `ServerArgs`)."""
    from sglang.srt.runtime_context import SpawnRanks
    from sglang.srt.runtime_context import publish as publish_arguments
    from sglang.srt.server_args import ServerArgs

    # The path is never opened.
    server_args = ServerArgs(model_path="none", device=device, **arguments)
    publish_arguments(server_args, role="scheduler", ranks=SpawnRanks(0, None, 0))


def make_pool(options: PoolOptions, *, is_dsa: bool = False, **sizes: Any) -> Any:
    """Our pool, for models with sparse attention if `is_dsa`.

    `sizes` are SGLang's arguments: size, page_size, kv_lora_rank, qk_rope_head_dim, layer_num, device.
    """
    from sgl_kvpool.srt.pool.dsa import LayoutDSATokenToKVPool
    from sgl_kvpool.srt.pool.mla import SGLANG_DTYPES, LayoutMLATokenToKVPool

    layout = options.layout
    sizes["dtype"] = SGLANG_DTYPES[layout.sglang_kv_cache_dtype(is_dsa=is_dsa)]
    if not is_dsa:
        return LayoutMLATokenToKVPool(**sizes, enable_memory_saver=False, options=options)
    fmt = layout.pool_row_format(sizes["kv_lora_rank"], sizes["qk_rope_head_dim"], is_dsa=True)
    scaled = layout.is_packed and sglang_dsa_reads(layout)
    return LayoutDSATokenToKVPool(
        **sizes, enable_memory_saver=False, options=options, index_head_dim=128,
        kv_cache_dim=fmt.row_bytes if scaled else fmt.head_dim,
    )  # fmt: skip
