"""The papers' figures, tables and claims beside ours: one file or folder per paper, each a Paper in the registry."""

from debubble.reproduce.registry import Entry, Exhibit, Paper, Report, Result, Table, papers, report

__all__ = ["Entry", "Exhibit", "Paper", "Report", "Result", "Table", "papers", "report"]
