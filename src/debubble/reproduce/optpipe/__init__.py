"""OptPipe's figures, tables and claims beside ours."""

from debubble.reproduce.optpipe import paper

__all__ = ["paper"]
