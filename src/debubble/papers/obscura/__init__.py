"""Obscura (Huang et al., USENIX ATC 2025): recomputation hidden in bubbles that a transformed 1F1B makes."""
