"""Makes the pictures of the report and the workbench in docs/pictures: `python tools/screenshots.py [NAME ...]`.

Each is a page as Chromium draws it, which Playwright drives; plans and the measured run are made anew.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from debubble.serve import Workbench

PICTURES = Path(__file__).parents[1] / "docs/pictures"
COLORS = 256
"""Number of colors, which suffices for these pages and takes a third of the bytes."""


CASES = json.loads(Path(__file__).with_suffix(".json").read_text())
"""Plans, by the name of their file; and of each picture the arguments of `show`, the end of the page's address, the
window's size, and above which line (`top`) it is cut off."""
COSTS = '{"forward": 0.01, "backward_input": 0.01, "backward_weight": 0.01, "activation": 1e6, "memory_limit": 8e6}'


def main(names: list[str]) -> None:
    """Draw the pictures with these names, or all."""
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        shots = [shot for shot in CASES["shots"] if not names or shot["name"] in names]
        make_plans(folder, {argument for shot in shots for argument in shot["arguments"]})
        for shot in shots:
            debubble(folder, "show", *shot["arguments"], "--html", "page.html")
            page = browser.new_page(viewport={"width": shot.get("width", 1400), "height": shot["height"]})
            page.goto(f"file://{folder}/page.html#{shot.get('address', 'light')}")
            take(page, shot["name"], top=shot.get("top", 0))
        if not names or "workbench" in names:
            draw_workbench(browser.new_page(viewport={"width": 1400, "height": 900}))
        browser.close()


def draw_workbench(page: Page) -> None:
    """Draw the workbench with two finished plans, the report of the second, and figures below the sliders."""
    with Workbench() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page.goto(server.address)
        page.click("summary")
        for number, planner in enumerate(("dapple", "adapipe")):
            page.locator("#search [name=planner]").select_option(planner)
            page.click("#search > button")
            page.locator("#searches li").nth(number).wait_for()
            page.locator("#searches li").first.locator("[data-do=report]").wait_for(state="visible", timeout=120_000)
        page.click("summary")
        page.frame_locator("#page").locator("h1").wait_for()
        take(page, "workbench")
        server.shutdown()


def make_plans(folder: Path, files: set[str]) -> None:
    """Write the plans and the trace of the pictures."""
    for name, call in CASES["plans"].items():
        if f"{name}.json" in files:
            debubble(folder, "plan", *call.split(), "-o", f"{name}.json")
    if "abstract.json" not in files:
        return
    (folder / "costs.json").write_text(COSTS)
    call = "plan --costs costs.json --devices 4 --micro-batches 8 --planner portfolio --effort 1 -o abstract.json"
    debubble(folder, *call.split())
    debubble(folder, "rehearse", "abstract.json", "--trace", "trace.json")


def debubble(folder: Path, *arguments: str) -> None:
    """Run the command in a folder."""
    subprocess.run([sys.executable, "-m", "debubble", *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def take(page: Page, name: str, *, top: int = 0) -> None:
    """Save the part of the page below a line, in few colors, and close it."""
    file = PICTURES / f"{name}.png"
    page.wait_for_timeout(500)
    page.screenshot(path=file)
    page.close()
    shown = Image.open(file).convert("RGB")
    shown = shown.crop((0, top, shown.width, shown.height))
    shown.quantize(COLORS, dither=Image.Dither.NONE).save(file, optimize=True)
    print(f"{name}.png: {file.stat().st_size / 1024:.0f} KiB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
