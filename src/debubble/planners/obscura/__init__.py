"""Obscura: the search over recomputation and migration by its step model."""
