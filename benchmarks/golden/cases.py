"""The cases of the golden corpus: calls of `debubble`, and published runs.

Calls go through the command line, so that no move inside the package changes them.  Random problems follow from their
number alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NEVER = ("--deadline", "3600")
"""A deadline that no search meets: answers depend on the effort alone."""
EFFORT = 0.5
"""The effort of all cases but the settings and the searches of degrees."""
CALLS = json.loads(Path(__file__).with_name("calls.json").read_text())
TARGETS = ("torch", "torchtitan", "automodel", "megatron", "primus", "deepspeed", "mindformers")


@dataclass(frozen=True)
class PlanCase:
    """A call of `debubble plan`, and what is asked of its plan file."""

    name: str
    words: tuple[str, ...]
    files: dict[str, Any] = field(default_factory=dict)
    """JSON files that the call reads, by name."""
    fits: tuple[str, ...] | None = None
    """The words of `debubble fits` about the same run."""
    is_setting: bool = False
    """Whether its bound may not become wider by more than a point."""

    def write(self, folder: Path) -> tuple[str, ...]:
        """Write the files, and return the call's words with their places."""
        for name, content in self.files.items():
            (folder / name).write_text(json.dumps(content))
        return tuple(str(folder / word) if word in self.files else word for word in self.words)


@dataclass(frozen=True)
class PublishedCase:
    """A published run, whose step is predicted."""

    name: str
    number: int
    """Its place in `cases/published.json`."""


@dataclass(frozen=True)
class PaperCase:
    """A paper's tables and figures, by `debubble reproduce`."""

    name: str
    paper: str


Case = PlanCase | PublishedCase | PaperCase


def cases() -> Iterator[Case]:
    """All cases."""
    yield from _settings()
    yield from (PublishedCase(f"published-{number}", number) for number in range(0, 36, 2))
    yield from (PaperCase(f"paper-{name}", name) for name in ("chronospipe",))
    yield from _models()
    yield from (_random_costs(number) for number in range(20))
    yield from (_random_units(number) for number in range(20))


def _settings() -> Iterator[PlanCase]:
    """The settings of docs/joint.md, with default options."""
    for name, words in CALLS["settings"].items():
        yield PlanCase(name, (*words.split(), *NEVER), is_setting=True)


def _models() -> Iterator[PlanCase]:
    """Ordinary jobs, each with another lever, degree or target."""
    for words in CALLS["models"]:
        model, *rest = words.split()
        name = "-".join((model, *(word.lstrip("-") for word in rest if not word.startswith("--micro"))))
        run = [word for word in rest if word not in ("--planner", "--swap", "--for", "--chunks")]
        search = NEVER if "--global-batch" in rest else ("--effort", str(EFFORT), *NEVER)
        fits = (model, *rest) if len(run) == len(rest) else None
        yield PlanCase(f"model-{name}"[:70], (model, *rest, *search), fits=fits)


def _random_costs(number: int) -> PlanCase:
    """Stages of random costs, two chunks in every other one, under a memory limit that binds in most."""
    random_number = random.Random(number)
    devices, chunks = random_number.choice((2, 3, 4, 6, 8)), 1 + number % 2
    micro_batches = devices * random_number.choice((1, 2, 3))
    stages = devices * chunks

    def each(low: int, high: int) -> list[int]:
        return [random_number.randint(low, high) for _ in range(stages)]

    costs: dict[str, Any] = {
        "stages": stages, "forward": each(8, 14), "backward_input": each(8, 14), "backward_weight": each(6, 12),
        "recompute": each(6, 12), "activation": each(10, 16), "activation_recomputed": 2,
        "communication": random_number.choice((0, 1, 3)),
        "memory_limit": round(16 * stages / devices * devices * random_number.choice((0.4, 0.6, 0.8, 1.2))),
    }  # fmt: skip
    if number % 3 == 0:
        costs |= {"offload": each(10, 30), "reload": each(10, 30)}
    words = (
        "--costs", "costs.json", "--devices", str(devices), "--micro-batches", str(micro_batches), "--chunks",
        str(chunks), "--effort", str(EFFORT), *NEVER,
    )  # fmt: skip
    return PlanCase(f"costs-{number}", words, {"costs.json": costs})


def _random_units(number: int) -> PlanCase:
    """A random model of units, whose partition, recomputation and offload are open."""
    random_number = random.Random(1000 + number)
    devices = random_number.choice((2, 3, 4, 8))
    count, micro_batches = random_number.randint(2, 6) * devices, devices * random_number.choice((1, 2, 3))

    def unit(kind: str, times: int, scale: float) -> dict[str, Any]:
        forward = round(scale * random_number.uniform(8, 12), 2)
        kept = random_number.randint(20, 40)
        return {
            "type": kind, "count": times, "forward": forward, "backward_input": forward,
            "backward_weight": round(0.8 * forward, 2), "static": random_number.randint(20, 60),
            "strategies": {
                "none": {"activation": kept}, "some": {"activation": kept // 2, "recompute": round(forward / 10, 2)},
                "full": {"activation": 4, "recompute": forward},
            },
        }  # fmt: skip

    units = [unit("embedding", 1, 0.2), unit("layer", count, 1.0), unit("head", 1, 2.0)]
    static = sum(each["count"] * each["static"] for each in units) / devices
    kept = sum(each["count"] * each["strategies"]["none"]["activation"] for each in units)
    job: dict[str, Any] = {
        "units": units, "communication": random_number.choice((0, 1)),
        "memory_limit": round(static + kept * random_number.choice((0.35, 0.6, 1.1))),
    }  # fmt: skip
    if number % 2:
        job |= {"offload_bandwidth": random_number.choice((1.0, 3.0)), "host_link": "full-duplex"}
    words = (
        "--units", "units.json", "--devices", str(devices), "--micro-batches", str(micro_batches), "--effort",
        str(EFFORT), *NEVER,
    )  # fmt: skip
    return PlanCase(f"units-{number}", words, {"units.json": job})
