"""Costs computed from a model's sizes and a device's rates, for what was not measured."""
