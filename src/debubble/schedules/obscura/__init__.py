"""Obscura: recomputation in bubbles, the strawman that it starts from, and swapping."""
