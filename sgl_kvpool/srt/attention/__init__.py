"""Attention backends and what they share."""
