"""Checkpoints: folders, manifest, state, and reading them under another layout."""
