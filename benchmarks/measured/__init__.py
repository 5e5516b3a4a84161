"""Measured runs that no cost was fitted to, and the errors of their predictions."""
