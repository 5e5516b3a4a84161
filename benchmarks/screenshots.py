"""Makes the pictures of the report in docs/pictures: `python benchmarks/screenshots.py`, with Chromium installed.

Each is a page of `debubble show` as a browser draws it; plans and the measured run are made anew.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

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
    Shot(name="report-phone", arguments=("plain.json",), width=500, height=3300),
    Shot(name="report-wide", arguments=("wide.json",), address="dark", height=2500),
    Shot(name="report-measured", arguments=("abstract.json", "--trace", "trace.json"), height=2050),
    Shot(name="report-two-plans", arguments=("plain.json", "offload.json"), height=3200),
    Shot(name="report-pinned", arguments=("offload.json",), address="2F5", top=1290, height=2320),
)


def main() -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("Install Chromium first: it draws the pages.")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_plans(folder)
        for shot in SHOTS:
            debubble(folder, "show", *shot.arguments, "--html", "page.html")
            take(shot, folder, chromium)
            print(f"{shot.name}.png: {(PICTURES / f'{shot.name}.png').stat().st_size / 1024:.0f} KiB")


def make_plans(folder: Path) -> None:
    for name, call in PLANS.items():
        debubble(folder, "plan", *call.split(), "-o", f"{name}.json")
    (folder / "costs.json").write_text(COSTS)
    call = "plan --costs costs.json --devices 4 --micro-batches 8 --planner portfolio --effort 1 -o abstract.json"
    debubble(folder, *call.split())
    debubble(folder, "rehearse", "abstract.json", "--trace", "trace.json")


def debubble(folder: Path, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "debubble", *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def take(shot: Shot, folder: Path, chromium: str) -> None:
    address = f"file://{folder}/page.html#{shot.address}"
    size = f"--window-size={shot.width},{shot.height}"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}/profile"]
    picture = folder / "picture.png"
    command = [chromium, *options, size, "--virtual-time-budget=2000", f"--screenshot={picture}", address]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    shown = Image.open(picture).convert("RGB").crop((0, shot.top, shot.width, shot.height))
    shown.quantize(COLORS, dither=Image.Dither.NONE).save(PICTURES / f"{shot.name}.png", optimize=True)


if __name__ == "__main__":
    main()
