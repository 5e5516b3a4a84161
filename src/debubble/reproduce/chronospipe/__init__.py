"""ChronosPipe's tables and figures beside ours."""

from debubble.reproduce.chronospipe.report import chronospipe

__all__ = [
    "chronospipe",
]
