"""KV-cache layouts for MLA models in SGLang. Importing this package imports neither torch nor SGLang."""

from sgl_kvpool.layout import FORMAT_VERSION, MLAKVCacheLayout, RowFormat
from sgl_kvpool.memory.arrangement import KVArrangement
from sgl_kvpool.version import VERSION

__version__ = VERSION
__all__ = ["FORMAT_VERSION", "KVArrangement", "MLAKVCacheLayout", "RowFormat", "__version__"]
