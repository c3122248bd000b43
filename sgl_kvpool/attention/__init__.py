"""Attention over rows of a KV pool, and which attention backends can read which layout."""
