"""Obscura's figures, tables and equations, computed."""
