"""Measured runs that no cost was fitted to, and how far off their predictions are."""
