"""Servers of every layout and shape, the steps of `h100_regression.py`. They have not run on a GPU yet."""
