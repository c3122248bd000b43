"""Our pools in SGLang's table of pools that its canary (`--kv-canary`) can watch."""

from sgl_kvpool.sglang_plugin.registry import installs, uses

_API = "sglang.srt.kv_canary.pool_patcher.api"

uses(f"{_API}.register_pool_attacher", "canary", takes=("pool_class", "attacher"))


@installs("canary")
def _register() -> None:
    from sglang.srt.kv_canary.pool_patcher.api import register_pool_attacher

    from sgl_kvpool.srt.pool.canary import attach
    from sgl_kvpool.srt.pool.dsa import LayoutDSATokenToKVPool
    from sgl_kvpool.srt.pool.hybrid import LayoutHybridLinearKVPool
    from sgl_kvpool.srt.pool.mla import LayoutMLATokenToKVPool

    for pool_class in (LayoutMLATokenToKVPool, LayoutDSATokenToKVPool, LayoutHybridLinearKVPool):
        register_pool_attacher(pool_class, attach)
