"""All GPU measurements of this project in one command.

    python benchmarks/gpu.py --output FOLDER                  # on a machine with a CUDA device: under ten minutes
    python benchmarks/gpu.py --dry-run --output FOLDER        # the same code with tiny sizes on a CPU
    python benchmarks/gpu.py --take FILE --sections NAMES     # into benchmarks/results/gpu.json, and the page from it
    python benchmarks/gpu.py --report                         # docs/gpu.md and docs/notes/gpu.md from the results

Every section is a process of its own with a budget of seconds: one that hangs or loses the device ends alone.
`FOLDER/gpu.json` has the figures and is written after each section; sections that are not run keep what was there, so
that several calls can share the work (`--sections`).  `FOLDER/gpu.log` has what they said.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmark import DOCS, ROOT, commit
from benchmark import RESULTS as FOLDER
from on_gpu import report
from on_gpu.figures import Figures
from on_gpu.settings import settings

RESULTS = FOLDER / "gpu.json"
SECTIONS = {
    "tests": 70, "machine": 30, "profile": 130, "plans": 170, "rivals": 120, "large": 100, "slices": 40, "torch": 90,
}  # fmt: skip
"""Sections in order, with the seconds that each may take; `plans` needs the figures of `profile`."""
MODULES = {"tests": "cuda_tests", "profile": "profiles", "torch": "beside_torch"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS.parent, help="folder for gpu.json, gpu.log and pictures")
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"some of {','.join(SECTIONS)}")
    parser.add_argument("--seconds", type=float, default=570, help="for all sections together")
    parser.add_argument("--commit", help="of this tree, where there is no git")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU")
    parser.add_argument("--take", type=Path, metavar="FILE", help="a gpu.json that a machine with a GPU has made")
    parser.add_argument("--note", help="what a reader has to know of the sections that are taken")
    parser.add_argument("--report", action="store_true", help="write docs/gpu.md and docs/notes/gpu.md")
    parser.add_argument("--section", help=argparse.SUPPRESS)  # one section, in this process
    args = parser.parse_args()
    if args.take:
        names = chosen_sections(args, parser)
        save(RESULTS, with_sections(report.read(RESULTS), report.read(args.take), names, note=args.note))
    if args.take or args.report:
        (DOCS / "gpu.md").write_text(report.page(report.read(RESULTS)))
        (DOCS / "notes" / "gpu.md").write_text(report.note(report.read(RESULTS)))
    elif args.section:
        here(args)
    else:
        everything(args, parser)


def everything(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Run the sections in order, and save after each."""
    names = chosen_sections(args, parser)
    args.output.mkdir(parents=True, exist_ok=True)
    path, end = args.output / "gpu.json", time.monotonic() + args.seconds
    before = path if path.exists() else RESULTS
    result = {"sections": {}} if args.dry_run and before == RESULTS else report.read(before)
    result |= {"dry_run": args.dry_run, "commit": args.commit or commit(), "command": " ".join(sys.argv)}
    result["at"] = datetime.now(UTC).isoformat(timespec="seconds")
    for name in names:
        save(path, result)  # a section reads the figures of earlier ones
        remaining = min(SECTIONS[name], end - time.monotonic())
        result["sections"][name] = {"commit": result["commit"], "at": result["at"], **run(name, remaining, args)}
        save(path, result)
        print(f"{name}: {result['sections'][name]['status']}", flush=True)
    print(f"Wrote {path}.")


def chosen_sections(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """Sections that `--sections` names; unknown names are refused."""
    names = [name for name in args.sections.split(",") if name]
    known = report.read(args.take)["sections"] if args.take else SECTIONS
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"There is no section {unknown[0]}: there are {', '.join(known)}.")
    return names


def with_sections(
    result: dict[str, Any], taken: dict[str, Any], names: Sequence[str], *, note: str | None = None
) -> dict[str, Any]:
    """The result with sections of another machine's; each keeps its time and commit."""
    more = {} if note is None else {"note": note}
    sections = result["sections"] | {name: taken["sections"][name] | more for name in names}
    ordered = {name: sections[name] for name in SECTIONS if name in sections}
    return {**result, "dry_run": taken["dry_run"], "sections": ordered}


def run(name: str, seconds: float, args: argparse.Namespace) -> dict[str, Any]:
    """Run a section in a separate process, which is ended when its time is over; its figures so far are kept."""
    if seconds < 10:
        return {"status": "left out", "why": "no time was left"}
    path = args.output / f"{name}.json"
    command = [sys.executable, str(Path(__file__)), "--section", name, "--output", str(args.output)]
    command += ["--seconds", str(seconds), *(["--dry-run"] if args.dry_run else [])]
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    # Plans come near the memory limit, so fragments of free memory must be usable.
    environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    start = time.monotonic()
    with (args.output / "gpu.log").open("a") as log:
        log.write(f"\n===== {name}\n")
        log.flush()
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            code = process.wait(seconds + 5)
            status = "ran" if code == 0 else "failed"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code, status = None, "out of time"
    contents = json.loads(path.read_text()) if path.exists() else {}
    path.unlink(missing_ok=True)
    return {"status": status, "exit_code": code, "seconds": round(time.monotonic() - start, 1), **contents}


def here(args: argparse.Namespace) -> None:
    """Run one section in this process."""
    name = args.section
    figures = Figures(args.output / f"{name}.json", until=time.monotonic() + args.seconds)
    chosen = settings(dry=args.dry_run)
    known = {n: s.get("figures", {}) for n, s in report.read(args.output / "gpu.json")["sections"].items()}
    try:
        if name != "tests":
            import torch

            torch.set_num_threads(1 if chosen.dry else os.cpu_count() or 1)
        import_module(f"on_gpu.{MODULES.get(name, name)}").run(chosen, figures, known)
    except Exception:
        figures.fail(traceback.format_exc())
        raise


def save(path: Path, result: dict[str, Any]) -> None:
    partial_file = path.with_suffix(".part")
    partial_file.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(partial_file, path)


if __name__ == "__main__":
    main()
