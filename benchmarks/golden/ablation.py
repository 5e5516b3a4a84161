"""Switches off mechanisms of planning one by one, and writes what the golden corpus loses without each.

    python -m golden.ablation [MECHANISM ...]        (in benchmarks/)

Calls of `plan` in the corpus, those of the settings with less effort, are made as they are and without each mechanism.
Everything runs in one process; searches are counted in work, so that the same version gives the same answers
everywhere.  A search that draws at random ends elsewhere after any change: what matters is whether steps become longer
more often than shorter, and by how much in the mean.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmark import Benchmark, Row

from golden.cases import PlanCase, cases
from golden.run import called

SETTINGS_EFFORT = "1"
NOTABLE = 0.005
"""Relative change of a step from which a case counts as changed."""

OF_MODELS = ("A", "E", "model-llama3.2-1b", "model-mistral-7b", "model-llama2-13b-cluster-4x", "units")
CASES = {
    "joint": OF_MODELS, "auto": OF_MODELS, "portfolio": OF_MODELS, "bound": (*OF_MODELS, "costs-1"),
    "order": ("costs-1", "model-llama2-7b"),
    "degrees": ("model-llama3-8b-cluster-8xA100-80GB-global", "model-qwen3", "model-llama3.2-3b"),
}  # fmt: skip
"""Prefixes of the names of cases that mechanisms of a kind can change."""


MECHANISMS: Mapping[str, Mapping[str, Any]] = json.loads(Path(__file__).with_name("mechanisms.json").read_text())
"""By name: `module:attribute` or `module:Class.attribute`, and what that is while it is off, or what it gives."""


def off(mechanism: Mapping[str, Any]) -> Any:
    """Replacement of a mechanism: a value, or a function that returns one, an argument, or `known_bound`."""
    if "is" in mechanism:
        return mechanism["is"]

    def gives(*arguments: Any, known_bound: Any = 0.0, **_: Any) -> Any:
        value = mechanism["gives"]
        if value == "known_bound":
            return known_bound
        if str(value).startswith("argument "):
            return arguments[int(value.split()[1])]
        return list(value) if isinstance(value, list) else value

    return gives


@contextmanager
def replaced(place: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module or class."""
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner = importlib.import_module(module)
    for attribute in owners:
        owner = getattr(owner, attribute)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def planned(case: PlanCase) -> tuple[float, float]:
    """Step and bound of a case; infinity and zero if nothing fits."""
    with (
        TemporaryDirectory() as folder,
        replaced("debubble.planners.process_pool:_is_worth_a_worker", off({"gives": False})),
    ):
        effort = ("--effort", SETTINGS_EFFORT) if case.is_setting else ()
        answer = called("plan", *case.write(Path(folder)), *effort, "--json")
    return answer.get("step_time") or math.inf, answer.get("lower_bound", 0.0)


@cache
def as_it_is(name: str) -> tuple[float, float]:
    """Step and bound of a case with all mechanisms."""
    return planned(next(case for case in cases() if isinstance(case, PlanCase) and case.name == name))


def measure(name: str) -> Row:
    """Measure how the cases of a mechanism change without it."""
    chosen = [c for c in cases() if isinstance(c, PlanCase) and c.name.startswith(CASES[name.partition(":")[0]])]
    before = {case.name: as_it_is(case.name) for case in chosen}
    with replaced(MECHANISMS[name]["place"], off(MECHANISMS[name])):
        after = {case.name: planned(case) for case in chosen}
    fits = [case for case, (step, _) in before.items() if math.isfinite(step)]
    ratios = {case: after[case][0] / before[case][0] for case in fits}
    wider = {case: (before[case][1] - after[case][1]) / before[case][0] for case in fits}
    finite = [ratio for ratio in ratios.values() if math.isfinite(ratio)]
    slowest, widest = max(ratios, key=lambda case: ratios[case]), max(wider, key=lambda case: wider[case])
    return {
        "cases": len(chosen), "geometric_mean": math.exp(sum(map(math.log, finite)) / len(finite)),
        "slower": [case for case, ratio in ratios.items() if ratio > 1 + NOTABLE],
        "faster": [case for case, ratio in ratios.items() if ratio < 1 - NOTABLE],
        "slowest": [slowest, ratios[slowest]], "widest": [widest, wider[widest]],
        "wider": [case for case, points in wider.items() if points > NOTABLE],
        "fits without it": [case for case in after if case not in fits and math.isfinite(after[case][0])],
    }  # fmt: skip


BENCHMARK = Benchmark(
    name="ablation", about=__doc__, cases={name: name for name in MECHANISMS}, measure=measure
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
