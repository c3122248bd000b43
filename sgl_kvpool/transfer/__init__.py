"""Transfers of pages between a pool and host memory, independent of SGLang."""
