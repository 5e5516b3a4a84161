"""Makes the pictures of the report and the workbench in docs/pictures: `python benchmarks/screenshots.py [NAME ...]`.

Each is a page as Chromium draws it, which Playwright drives; plans and the measured run are made anew.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from debubble.serve import Workbench

PICTURES = Path(__file__).parents[1] / "docs/pictures"
COLORS = 256
"""Enough for pages of few colours, and a third of the bytes."""


@dataclass(frozen=True, kw_only=True)
class Shot:
    """One picture: the arguments of `show`, the end of the page's address, and the size of the window."""

    name: str
    arguments: tuple[str, ...]
    address: str = "light"
    width: int = 1400
    height: int
    top: int = 0
    """What lies above this line is cut off."""


PLANS = {
    "plain": "llama2-13b --cluster 8xA100-80GB --micro-batches 16 --planner portfolio --effort 2 --why",
    "offload": "llama2-13b --cluster 8xA100-40GB --micro-batches 16 --planner obscura --effort 2",
    "wide": "llama3-70b --cluster 128xH100-80GB --tensor 8 --micro-batches 64 --planner adapipe",
}
COSTS = '{"forward": 0.01, "backward_input": 0.01, "backward_weight": 0.01, "activation": 1e6, "memory_limit": 8e6}'

SHOTS = (
    Shot(name="report", arguments=("plain.json",), height=2250),
    Shot(name="report-dark", arguments=("offload.json",), address="dark", height=2350),
    Shot(name="report-phone", arguments=("plain.json",), width=390, height=3300),
    Shot(name="report-wide", arguments=("wide.json",), address="dark", height=2500),
    Shot(name="report-measured", arguments=("abstract.json", "--trace", "trace.json"), height=2050),
    Shot(name="report-two-plans", arguments=("plain.json", "offload.json"), height=3200),
    Shot(name="report-pinned", arguments=("offload.json",), address="2F5", top=1280, height=2660),
)


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        shots = [shot for shot in SHOTS if not names or shot.name in names]
        make_plans(folder, {argument for shot in shots for argument in shot.arguments})
        for shot in shots:
            debubble(folder, "show", *shot.arguments, "--html", "page.html")
            page = browser.new_page(viewport={"width": shot.width, "height": shot.height})
            page.goto(f"file://{folder}/page.html#{shot.address}")
            take(page, shot.name, top=shot.top)
        if not names or "workbench" in names:
            draw_workbench(browser.new_page(viewport={"width": 1400, "height": 900}))
        browser.close()


def draw_workbench(page: Page) -> None:
    """The workbench with two plans that were found, the report of the second, and figures below the sliders."""
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
    for name, call in PLANS.items():
        if f"{name}.json" in files:
            debubble(folder, "plan", *call.split(), "-o", f"{name}.json")
    if "abstract.json" not in files:
        return
    (folder / "costs.json").write_text(COSTS)
    call = "plan --costs costs.json --devices 4 --micro-batches 8 --planner portfolio --effort 1 -o abstract.json"
    debubble(folder, *call.split())
    debubble(folder, "rehearse", "abstract.json", "--trace", "trace.json")


def debubble(folder: Path, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "debubble", *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def take(page: Page, name: str, *, top: int = 0) -> None:
    """Write what the page shows below a line, in few colours, and close it."""
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
