"""What a host tier with a layout takes of SGLang's choices. A leaf module."""

__all__ = ["HOST_IO_BACKENDS", "HOST_LABELS", "KEPT_FREE_BYTES"]

#: Values of --hicache-mem-layout.
HOST_LABELS = ("page_first", "page_first_direct")
#: Values of --hicache-io-backend.
HOST_IO_BACKENDS = ("kernel", "direct")
#: Host memory that SGLang keeps free when it makes a host tier: its HICACHE_HOST_MEMORY_RESERVE_BYTES, for
#: those who do not import SGLang.
KEPT_FREE_BYTES = 10 << 30
