"""Benchmarks of kernels, transfers and reading: `python -m scripts.bench`."""
