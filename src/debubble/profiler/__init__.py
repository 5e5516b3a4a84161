"""Measurement of the costs of a model's units on this machine.  Requires torch."""
