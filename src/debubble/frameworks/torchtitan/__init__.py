"""torchtitan: what it can run, its files written and read."""
