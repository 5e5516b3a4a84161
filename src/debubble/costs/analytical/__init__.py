"""Analytical costs, computed from a model's sizes and a device's rates where nothing was measured."""
