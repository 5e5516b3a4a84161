"""How long the report's timeline takes to draw: `python benchmarks/page_speed.py`, with Chromium and Playwright.

It draws 1F1B on 16 devices while zooming in and out, and prints the processor time per frame of the browser's
renderers, which other work on the machine hardly changes, beside the time on the clock.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

import debubble as db
from debubble.views import Scene, views

DEVICES, FRAMES = 16, 200
ZOOM = """frames => new Promise(done => {
  const canvas = document.querySelector("canvas[data-scene]"), start = performance.now();
  let drawn = 0;
  function frame() {
    canvas.dispatchEvent(new KeyboardEvent("keydown", { key: drawn % 2 ? "+" : "-", bubbles: true }));
    if (++drawn < frames) requestAnimationFrame(frame); else done(performance.now() - start);
  }
  requestAnimationFrame(frame);
})"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        for micro_batches in (1024, 2048):
            file = Path(folder) / "page.html"
            operations = write(file, micro_batches)
            page.goto(f"file://{file}")
            page.evaluate("document.querySelector('canvas[data-scene]').scrollIntoView()")
            for lanes in ("folded", "every lane and memory"):
                cpu, clock = per_frame(page)
                print(f"{operations} operations, {lanes}: {cpu:.1f} ms of processor, {clock:.1f} ms on the clock")
                page.click("#fold")
        browser.close()


def write(file: Path, micro_batches: int) -> int:
    """Write the page; returns its number of operations."""
    costs = db.StageCosts.of(
        stages=DEVICES, forward=0.01, backward_input=0.01, backward_weight=0.01, activation=1e6, communication=0.001
    )
    schedule = db.schedules["1f1b"](devices=DEVICES, micro_batches=micro_batches, costs=costs)
    timeline = db.simulate(schedule, costs)
    file.write_bytes(views["html"]([Scene(timeline, title="1f1b", seconds=True)]))
    return len(timeline.operations)


def per_frame(page: Page) -> tuple[float, float]:
    """Milliseconds of a frame: of the renderers' processor time, and on the clock."""
    page.evaluate(ZOOM, 20)
    before = renderer_seconds()
    clock = page.evaluate(ZOOM, FRAMES)
    return 1000 * (renderer_seconds() - before) / FRAMES, clock / FRAMES


def renderer_seconds() -> float:
    """Processor time of this script's renderers so far."""
    processes = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in processes.splitlines()[1:]]
    family = {os.getpid()}
    while grown := {int(pid) for pid, parent, *_ in rows if int(parent) in family} - family:
        family |= grown
    renderers = [int(pid) for pid, _, *args in rows if int(pid) in family and "--type=renderer" in args[0]]
    return sum(map(processor_seconds, renderers))


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
