"""Benchmarks that drive the real core without a model: `python -m pagedkv.bench`."""
