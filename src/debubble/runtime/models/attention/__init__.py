"""Attention: its core, under masks, over a ring of ranks, and in slices of sequences."""
