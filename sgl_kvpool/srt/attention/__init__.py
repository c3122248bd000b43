"""Attention backends and their common parts."""
