"""Attention: plain, masked, over a ring of ranks, and over slices of sequences."""
