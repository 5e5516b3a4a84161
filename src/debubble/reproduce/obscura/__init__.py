"""Obscura's tables and figures beside ours."""
