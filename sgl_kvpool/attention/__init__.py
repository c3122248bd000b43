"""Attention over rows of a KV pool, and tables of the attention backends that can read each layout."""
