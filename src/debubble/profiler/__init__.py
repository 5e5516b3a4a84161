"""Measures what a model's units cost on this machine.  Needs torch."""
