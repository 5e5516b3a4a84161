"""SCOPE's figures and claims beside ours."""

from debubble.reproduce.scope import paper

__all__ = ["paper"]
