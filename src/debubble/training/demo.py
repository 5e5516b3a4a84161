"""Demo of the main workflow as command-line calls: profile, plan, train, compare.

It trains a small Llama on four processes of this machine, under a memory limit that plain 1F1B exceeds.  `python -m
debubble.training.demo [--data FILE] [--steps N] [--output DIR]`.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from debubble.processes import PYTHON, available_cores

MODEL = ["llama-tiny"]
SHAPE = ["--sequence-length", "256", "--dtype", "fp32"]
CLUSTER = ["--cluster", "4xCPU", "--micro-batches", "8", "--memory-limit", "48MiB"]


def demo(
    data: Annotated[Path | None, typer.Option(help="Text file or directory (default: Python's own sources).")] = None,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 60,
    output: Annotated[Path, typer.Option(help="Folder for everything that is written.")] = Path("runs/demo"),
) -> None:
    """Profile a small Llama on this machine, plan it for 4 processes, train it, and compare plan and measurement."""
    console = Console(highlight=False)
    checkpoints = output / "checkpoints"
    shutil.rmtree(checkpoints, ignore_errors=True)
    output.mkdir(parents=True, exist_ok=True)
    costs, plan, page, trace = (output / name for name in ("costs.json", "plan.json", "timeline.html", "trace.json"))
    processes = ["--processes", str(min(4, available_cores()))]
    text = [] if data is None else ["--data", str(data)]
    _say(console, "Measure the model's layers on this machine, one thread per process:")
    _debubble(console, "profile", *MODEL, *SHAPE, *processes, "-o", str(costs))
    _say(console, "Find the fastest plan for 4 devices under a memory limit that plain 1F1B breaks:")
    _debubble(console, "plan", *MODEL, *SHAPE, *CLUSTER, "--profile", str(costs), "--effort", "4", "-o", str(plan))
    _say(console, "Train it: four processes, real messages, real text:")
    written = ["--checkpoint", str(checkpoints), "--trace", str(trace), "--html", str(page)]
    _debubble(console, "train", str(plan), *text, "--steps", str(steps), *written)
    _say(console, f"Both timelines under each other: open {page}")


def _say(console: Console, text: str) -> None:
    console.print(f"\n[bold]{text}[/bold]")


def _debubble(console: Console, *arguments: str) -> None:
    """Print and run one command; exit with its code if it fails."""
    console.print(f"[green]$ debubble {shlex.join(arguments)}[/green]", soft_wrap=True)
    program = "import sys; from debubble.cli import main; sys.exit(main())"
    finished = subprocess.run([*PYTHON, "-c", program, *arguments], check=False)
    if finished.returncode:
        sys.exit(finished.returncode)


if __name__ == "__main__":
    typer.run(demo)
