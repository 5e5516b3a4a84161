"""Runs the commands of README and docs: `make docs-check`, or `python docs/run_commands.py [PAGE ...]`.

The commands of a page run in one folder with nothing but `examples`, in order.  Those that need files of the reader's
own, a GPU or the network are listed and not run; tests/test_documentation.py checks that their arguments parse.
"""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACEHOLDERS = re.compile(r"path/to|my-text|\bconfig\.json|runs/|cuda|torchrun|HOST|MODEL|PLAN|FILE|NAME|\.\.\.")
"""Placeholders for the reader's files and devices."""
UNENDING = ("serve",)
WRITES = ("-o", "--html", "--png", "--svg", "--pdf", "--perfetto", "--trace")
TIMEOUT_SECONDS = 600


def pages() -> list[Path]:
    """All pages, README first."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands(page: Path) -> list[str]:
    """`debubble` calls in a page's code blocks, without comments."""
    lines = "\n".join(code(page.read_text())).replace("\\\n", " ").splitlines()
    calls = [re.sub(r"\s+#.*", "", command).strip() for line in lines for command in line.split("; ")]
    return [" ".join(call.split()) for call in calls if call.startswith("debubble ")]


def code(text: str) -> Iterator[str]:
    """Lines of the code blocks without a language, or for a shell."""
    language = None
    for line in text.splitlines():
        if line.startswith("```"):
            language = line[3:].strip() if language is None else None
        elif language in ("", "bash", "sh"):
            yield line


def runnable(command: str, folder: Path) -> bool:
    """Whether a command needs only files that the page's commands have written."""
    words = shlex.split(command)
    read = [word for before, word in itertools.pairwise(words) if before not in WRITES]
    missing = [word for word in read if word.endswith((".json", ".sh")) and not (folder / word).exists()]
    return not PLACEHOLDERS.search(command) and not missing and words[1] not in UNENDING


def main(names: list[str]) -> int:
    """Run the commands of these pages or of all; returns 1 if one failed."""
    failed = 0
    if unknown := {*names} - {page.name for page in pages()}:
        raise SystemExit(f"There is no page {', '.join(sorted(unknown))}; pages are named like start.md.")
    for page in pages():
        if names and page.name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(ROOT / "examples", Path(folder) / "examples")
            for command in commands(page):
                if not runnable(command, Path(folder)):
                    print(f"{page.name}: not run: {command}", flush=True)
                    continue
                call = [sys.executable, "-m", *shlex.split(command)]
                ended = subprocess.run(call, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
                print(f"{page.name}: {'ran' if ended.returncode == 0 else 'FAILED'}: {command}", flush=True)
                if ended.returncode:
                    failed += 1
                    print(ended.stderr[-2000:], flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
