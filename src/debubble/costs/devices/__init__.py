"""Devices and clusters: their rates, how they are joined, and the times of single operations on them."""
