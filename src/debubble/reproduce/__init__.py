"""The papers' tables and figures beside ours: one file per paper, each a function that returns a Report."""

from debubble.reproduce.registry import Report, Table, report, reports

__all__ = ["Report", "Table", "report", "reports"]
