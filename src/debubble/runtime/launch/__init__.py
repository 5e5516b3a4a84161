"""Starts the ranks of a run on this machine, and says why one has failed."""
