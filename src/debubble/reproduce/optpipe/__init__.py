"""OptPipe's tables and figures beside ours."""

from debubble.reproduce.optpipe.report import optpipe

__all__ = [
    "optpipe",
]
