"""The papers' figures, tables and claims beside ours: one file or folder per paper, each a Paper in the registry."""

from debubble.reproduce.registry import Entry, EntryResult, Paper, PaperReport, Table, papers, report

__all__ = ["Entry", "EntryResult", "Paper", "PaperReport", "Table", "papers", "report"]
