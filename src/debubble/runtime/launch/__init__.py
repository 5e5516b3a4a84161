"""Starts the ranks of a run on this machine, and reports why one failed."""
