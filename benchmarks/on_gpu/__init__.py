"""Sections of `benchmarks/gpu.py`, each measured in a separate process."""
