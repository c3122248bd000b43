"""Combinations that are refused at server start, and why."""
