"""Byte views of any SGLang pool and buffers of pages, for software beside the server; docs/connectors.md.

No server imports this package.
"""
