"""Benchmarks that drive the real core, most of them without a model: `python -m pagedkv.bench`."""
