"""ChronosPipe's figures, tables and claims beside ours."""

from debubble.reproduce.chronospipe import paper

__all__ = ["paper"]
