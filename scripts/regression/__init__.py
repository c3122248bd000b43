"""Modules of `scripts/h100_regression.py`. They have not run on a GPU yet."""
