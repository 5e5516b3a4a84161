"""Orders that are built rather than searched: list scheduling, building blocks, order following."""
