"""Options of a host tier, and the values of SGLang's options that it supports. Imports no torch or SGLang."""

from dataclasses import dataclass

from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.memory.arrangement import KVArrangement

#: Values of --hicache-mem-layout.
HOST_LABELS = ("page_first", "page_first_direct")
#: Values of --hicache-io-backend.
HOST_IO_BACKENDS = ("kernel", "direct")
#: Host memory that SGLang keeps free when it makes a host tier: its HICACHE_HOST_MEMORY_RESERVE_BYTES,
#: repeated for modules that do not import SGLang.
RESERVED_BYTES = 10 << 30

#: Value of --kv-host-layout for the device's layout.
SAME = "same"
#: Values of --kv-host-layout: layouts narrower than 16-bit rows, except those that use k_scale, whose bytes
#: depend on the layer's scale too.
HOST_LAYOUTS = (SAME, *(x.value for x in MLAKVCacheLayout if x.is_narrow and not x.uses_k_scale))
#: The narrowest host layout for rows of DeepSeek's models.
NARROWEST_HOST_LAYOUT = min(HOST_LAYOUTS[1:], key=lambda x: MLAKVCacheLayout(x).row_format(512, 64).row_bytes)
#: Values of --kv-host-engine besides "auto", by where the pool is.
GPU_ENGINE_NAMES = ("staged", "copy_engine", "kernel")
CPU_ENGINE = "cpu"
HOST_ENGINES = (*GPU_ENGINE_NAMES, CPU_ENGINE)
#: Values of --kv-host-sharing besides "auto": one copy of a page for the ranks of a machine, or one for each.
NODE, RANK = "node", "rank"


@dataclass(frozen=True)
class HostTierOptions:
    """Options of a host tier: of `HOST_LAYOUTS`, `HOST_ENGINES` (or "auto"), and `NODE` or `RANK`."""

    layout: str = SAME
    engine: str = "auto"
    sharing: str = RANK
    may_unshare: bool = False  # "auto" chose `NODE`: `RANK` replaces it where the system refuses

    def serves(self, layout: MLAKVCacheLayout, arrangement: KVArrangement, device: str) -> bool:
        """Whether sgl-kvpool provides the host tier of such a pool.

        On a GPU, SGLang's own host pool, which has been run there, serves the rows of SGLang's own tensors.
        Ours serves the other layouts and arrangements, any pool if an option is set, and all pools on a CPU.
        """
        stock = not layout.is_packed and arrangement.has_contiguous_layers
        return device == "cpu" or not stock or self != HostTierOptions()

    def host_layout(self, device: MLAKVCacheLayout) -> MLAKVCacheLayout:
        return device if self.layout == SAME else MLAKVCacheLayout(self.layout)
