"""The sections of `benchmarks/gpu.py`: what each measures, in a process of its own."""
