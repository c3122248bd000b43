"""What a host tier with a layout takes of SGLang's choices. A leaf module."""

__all__ = ["HOST_IO_BACKENDS", "HOST_LABELS"]

#: Values of --hicache-mem-layout.
HOST_LABELS = ("page_first", "page_first_direct")
#: Values of --hicache-io-backend.
HOST_IO_BACKENDS = ("kernel", "direct")
