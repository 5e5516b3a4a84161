"""Partitions of units into stages: balanced, improved by local search, with recomputation."""
