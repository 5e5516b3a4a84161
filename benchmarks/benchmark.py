"""Common code of the benchmarks: measures cases, keeps their rows in a result file, and writes docs pages.

    python benchmarks/NAME.py [CASE ...] [--again]     # all cases, or those of these names or beginnings
    python benchmarks/NAME.py --docs                   # the pages and pictures, from the results

`benchmarks/results/NAME.json` has `{commit, versions, machine, command, rows}`: the first four are those of the last
run, and each row names its case and its commit.  A row of this commit is not measured again without `--again`, unless
the sources were changed since.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
PACKAGES = ("numpy", "ortools", "numba", "torch", "transformers")

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Cases, how they are measured, and the pages that show the rows.

    Attributes:
        name: Of the script and of its result file.
        about: The script's docstring.
        cases: What each case is, by name; rows stand in this order.
        measure: Maps a case to its row.
        pages: Of each file below docs/, what it has of all rows: text, or the bytes of a picture.  `PAGE#TABLE` is a
            table of a page, between two comments.
        prepare: Called once before the cases, for what is no part of them.
    """

    name: str
    about: str | None
    cases: Mapping[str, Any]
    measure: Callable[[Any], Row]
    pages: Mapping[str, Callable[[list[Row]], str | bytes]] = field(default_factory=dict)
    prepare: Callable[[], object] = lambda: None

    @property
    def results(self) -> Path:
        """The result file."""
        return RESULTS / f"{self.name}.json"

    def rows(self) -> list[Row]:
        """The rows of the result file; none if there is no file."""
        rows: list[Row] = json.loads(self.results.read_text())["rows"] if self.results.exists() else []
        return rows

    def main(self) -> None:
        """Run the command."""
        raw = argparse.RawDescriptionHelpFormatter
        parser = argparse.ArgumentParser(description=self.about, formatter_class=raw)
        parser.add_argument("case", nargs="*", help="names, or beginnings of names; the default is all")
        parser.add_argument("--again", action="store_true", help="measure again what is of this commit")
        parser.add_argument("--docs", action="store_true", help="write the pages from the results")
        args = parser.parse_args()
        if args.docs:
            self.write_pages()
        else:
            beginnings = tuple(prefix for prefix in args.case if prefix not in self.cases)
            named = [name for name in self.cases if name in args.case or name.startswith(beginnings)]
            chosen = named if args.case else [*self.cases]
            if not chosen:
                parser.error(f"There is no case {' '.join(args.case)}: there are {', '.join(self.cases)}.")
            self.run(chosen, remeasure=args.again)

    def run(self, chosen: Iterable[str], *, remeasure: bool) -> None:
        """Measure cases; the file is written after each."""
        rows = {row["case"]: row for row in self.rows()}
        now = commit()
        self.prepare()
        for name in chosen:
            if not remeasure and name in rows and rows[name]["commit"] == now and not now.endswith("+"):
                continue
            rows[name] = {"case": name, **self.measure(self.cases[name]), "commit": now}
            print(*(f"{key}={value}" for key, value in rows[name].items()), flush=True)
            write_results(self.results, [rows[case] for case in self.cases if case in rows])

    def write_pages(self) -> None:
        """Write all pages from the result file."""
        rows = self.rows()
        for place, made in self.pages.items():
            name, _, mark = place.partition("#")
            page, content = DOCS / name, made(rows)
            if isinstance(content, bytes):
                page.write_bytes(content)
            elif mark:
                before, _, after = between(page, mark)
                page.write_text(f"{before}\n{content}\n{after}")
            else:
                page.write_text(content)


def between(page: Path, mark: str) -> tuple[str, str, str]:
    """Split a page into the text before a table, the table, and the text after it; the comments stay outside."""
    text = page.read_text()
    begin = text.index("-->", text.index(f"<!-- {mark}: written by")) + len("-->")
    end = text.index(f"<!-- end of {mark} -->")
    return text[:begin], text[begin:end].strip(), text[end:]


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def write_results(path: Path, rows: Sequence[Row]) -> None:
    """Write a result file: commit, versions, machine and command of this run, and the rows."""
    path.write_text(json.dumps({**provenance(), "rows": rows}, indent=1) + "\n")


def provenance() -> dict[str, Any]:
    """The commit, the versions, the machine and the command of this run."""
    return {
        "commit": commit(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "machine": {"cpu": _cpu(), "cores": os.cpu_count()},
        # with `python -m` this is the script's full path
        "command": " ".join(["python", os.path.relpath(sys.argv[0], Path(__file__).parents[1]), *sys.argv[1:]]),
    }


def commit() -> str:
    """Short name of the checked-out commit, with a `+` if the sources differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True).stdout.strip()

    changed = "+" if git("status", "--porcelain", "--", "src") else ""
    return (git("rev-parse", "--short=10", "HEAD") or "unknown") + changed


def _version(package: str) -> str | None:
    """Version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
