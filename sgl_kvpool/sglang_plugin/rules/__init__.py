"""Combinations that are refused at server start, and why; defaults of arguments that the user left open."""
