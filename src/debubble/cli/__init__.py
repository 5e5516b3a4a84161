"""The command line: one file per subcommand; each parses and calls, nothing else."""

from debubble.cli.app import main

__all__ = ["main"]
