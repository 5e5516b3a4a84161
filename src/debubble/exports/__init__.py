"""Plan -> the files with which another framework runs it, and what that framework cannot express."""

from debubble.exports.registry import Export, Exporter, exporter, exports
from debubble.registry import index_by_name

__all__ = ["Export", "Exporter", "exporter", "exports"]

index_by_name(__name__)
