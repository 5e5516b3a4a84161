"""Switches off mechanisms of planning in turn, and writes what the golden corpus loses without each.

    python -m golden.ablation [MECHANISM ...]        (in benchmarks/)

Calls of `plan` in the corpus, those of the settings with less effort, are made as they are and without each mechanism.
Everything runs in one process; searches are counted in work, so that the same version gives the same answers
everywhere.  A search that draws at random ends elsewhere after any change: what matters is whether steps become longer
more often than shorter, and by how much in the mean.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmark import Benchmark, Row

from golden.cases import PlanCase, cases
from golden.run import called

SETTINGS_EFFORT = "1"
NOTABLE = 0.005
"""Share of a step by which a case counts as changed."""

OF_MODELS = ("A", "E", "model-llama3.2-1b", "model-mistral-7b", "model-llama2-13b-cluster-4x", "units")
CASES = {
    "joint": OF_MODELS, "auto": OF_MODELS, "portfolio": OF_MODELS, "bound": (*OF_MODELS, "costs-1"),
    "order": ("costs-1", "model-llama2-7b"),
    "degrees": ("model-llama3-8b-cluster-8xA100-80GB-global", "model-qwen3", "model-llama3.2-3b"),
}  # fmt: skip
"""Beginnings of the names of the cases that mechanisms of a kind can change."""


def gives(value: Any, *_: Any, **__: Any) -> Any:
    """A value, whatever is asked."""
    return value


def gives_argument(place: int, *arguments: Any, **__: Any) -> Any:
    """One of the arguments."""
    return arguments[place]


def gives_none_of_them(*_: Any, **__: Any) -> list[Any]:
    """An empty list."""
    return []


def least_of(*_: Any, least: float = 0.0, **__: Any) -> float:
    """What was known before."""
    return least


NO, NOTHING, ZERO = (partial(gives, value) for value in (False, None, 0.0))
JOINT, PORTFOLIO, OPTIMIZE = (
    "debubble.planners.joint.search", "debubble.planners.portfolio.planner", "debubble.search.optimize",
)  # fmt: skip
PROVEN, INITIAL = "debubble.planners.bounds.proven", "debubble.search.constructive.initial"
DEGREES, AUTO = "debubble.planners.degrees.search", "debubble.planners.auto"
MECHANISMS: Mapping[str, tuple[str, Any]] = {
    "joint: single units recompute less": (f"{JOINT}:refine", partial(gives_argument, 2)),
    "joint: second level of recomputation": (f"{JOINT}:_with_deeper_level", partial(gives_argument, 1)),
    "joint: every way to cut a tiny model": (f"{JOINT}:_every_way", gives_none_of_them),
    "joint: units assigned freely": ("debubble.planners.joint.planner:_may_deal", NO),
    "joint: brief order searches": (f"{JOINT}:BRIEFLY", 0.0),
    "joint: R apart as a start of the order search": (f"{JOINT}:_recomputing_apart", partial(gives_argument, 0)),
    "joint: one round of annealing": (f"{JOINT}:ROUNDS", ((0.35, 1, 0.005),)),
    "joint: random points": (f"{JOINT}:DRAWING", 0.001),
    "joint: five and six chunks": (f"{JOINT}:CHUNKS", (1, 2, 3, 4)),
    "auto: order search of the fastest answer": (f"{JOINT}:last_search", gives_none_of_them),
    "auto: others with the whole budget": (f"{AUTO}:CLOSE", 0.0),
    "auto: adapipe": (f"{AUTO}:ASKED", ("joint", "portfolio")),
    "auto: portfolio": (f"{AUTO}:ASKED", ("joint", "adapipe")),
    "portfolio: optimizer steps on hosts": (f"{PORTFOLIO}:_Portfolio.on_hosts", gives_none_of_them),
    "portfolio: library as it is in small steps": (f"{PORTFOLIO}:SMALL", 0),
    "portfolio: short step": (f"{PORTFOLIO}:LONG", 10**9),
    "portfolio: likeness": (f"{PORTFOLIO}:likeness", NOTHING),
    "portfolio: moves of units": (f"{PORTFOLIO}:improve", partial(gives_argument, 1)),
    "order: CP-SAT on small problems": (f"{OPTIMIZE}:PROVABLE", 0),
    "order: slow second search": (f"{OPTIMIZE}:_Optimizer.anneal_slowly", gives_none_of_them),
    "order: busiest start": (f"{OPTIMIZE}:_Optimizer.busiest_start", partial(gives_argument, 1)),
    "order: shipped schedules": ("debubble.search.cache:nearest", NOTHING),
    "order: building blocks": (f"{INITIAL}:best_order", NOTHING),
    "order: greedy rules": (f"{INITIAL}:greedy_schedules", gives_none_of_them),
    "order: offloading list schedules": (f"{INITIAL}:offloading_schedules", gives_none_of_them),
    "order: published schedules": ("debubble.planners.initial_schedules:initial", gives_none_of_them),
    "bound: ramps": (f"{PROVEN}:ramps_bound", least_of),
    "bound: units whole": (f"{PROVEN}:granular_bound", ZERO),
    "bound: units in runs": (f"{PROVEN}:contiguous_bound", least_of),
    "degrees: hosts": (f"{DEGREES}:WITH_HOSTS", 0),
    "degrees: uneven stages": (f"{DEGREES}:UNEVEN", 0),
}
"""By name, `module:attribute` or `module:Class.attribute`, and what stands in its place while it is off."""


@contextmanager
def replaced(place: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module or class."""
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner = importlib.import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    is_method, before = bool(owners) and callable(value), getattr(owner, name)
    setattr(owner, name, (lambda *given, **named: value(*given, **named)) if is_method else value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def planned(case: PlanCase) -> tuple[float, float]:
    """Step and bound of a case; infinite and zero if nothing fits."""
    with TemporaryDirectory() as folder, replaced("debubble.planners.process_pool:_is_worth_a_worker", NO):
        effort = ("--effort", SETTINGS_EFFORT) if case.is_setting else ()
        answer = called("plan", *case.write(Path(folder)), *effort, "--json")
    return answer.get("step_time") or math.inf, answer.get("lower_bound", 0.0)


@cache
def as_it_is(name: str) -> tuple[float, float]:
    """Step and bound of a case with all mechanisms."""
    return planned(next(case for case in cases() if isinstance(case, PlanCase) and case.name == name))


def measure(name: str) -> Row:
    """How the cases of a mechanism change without it."""
    chosen = [c for c in cases() if isinstance(c, PlanCase) and c.name.startswith(CASES[name.partition(":")[0]])]
    before = {case.name: as_it_is(case.name) for case in chosen}
    with replaced(*MECHANISMS[name]):
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
