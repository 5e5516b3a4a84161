"""Switches off mechanisms of planning in turn, and writes what the golden corpus loses without each.

    python -m golden.ablation [--only SWITCH ...] [--cases NAME ...]        (in benchmarks/)

All calls of `plan` in the corpus are made, those of the settings with less effort, first as they are and then without
each mechanism.  Everything runs in one process; searches are counted in work, so that the same version gives the same
answers everywhere.  A search that draws at random ends elsewhere after any change: what matters is whether steps become
longer more often than shorter, and by how much in the mean.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmark import provenance

from golden.cases import PlanCase, cases
from golden.run import called

RESULTS = Path(__file__).parents[1] / "results" / "ablation.json"
SETTINGS_EFFORT = "1"
NOTABLE = 0.005
"""Share of a step by which a case counts as changed."""


@dataclass(frozen=True)
class Switch:
    """A mechanism, and what stands in its place while it is off.

    Attributes:
        name: The mechanism.
        off: New values of module attributes, by `module:attribute`.
    """

    name: str
    off: Mapping[str, Any]

    @property
    def cases(self) -> tuple[str, ...]:
        """Beginnings of the names of cases that it can change."""
        return CASES[self.name.partition(":")[0]]


OF_MODELS = ("A", "E", "model-llama3.2-1b", "model-mistral-7b", "model-llama2-13b-cluster-4x", "units")
OF_COSTS = ("costs-1", "model-llama2-7b")
DEGREES = ("model-llama3-8b-cluster-8xA100-80GB-global", "model-qwen3", "model-llama3.2-3b")
CASES = {
    "joint": OF_MODELS, "auto": OF_MODELS, "portfolio": OF_MODELS, "order": OF_COSTS, "bound": (*OF_MODELS, "costs-1"),
    "degrees": DEGREES,
}  # fmt: skip


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _none_of(*_: Any, **__: Any) -> Iterator[Any]:
    return iter(())


def _false(*_: Any, **__: Any) -> bool:
    return False


def _zero(*_: Any, **__: Any) -> float:
    return 0.0


def _no_proof(_: Any, *, least: float = 0.0, **__: Any) -> float:
    return least


JOINT, PORTFOLIO, OPTIMIZE, PROVEN = (
    "debubble.planners.joint.search", "debubble.planners.portfolio.planner", "debubble.search.optimize",
    "debubble.planners.bounds.proven",
)  # fmt: skip
DISPATCH, INITIAL = "debubble.search.constructive.zero_bubble", "debubble.search.constructive.initial"

SWITCHES = (
    Switch("joint: single units recompute less", {f"{JOINT}:refine": lambda _u, _t, solution, _e: solution}),
    Switch("joint: second level of recomputation", {f"{JOINT}:_with_deeper_level": lambda _, solution: solution}),
    Switch("joint: every way to cut a tiny model", {f"{JOINT}:_every_way": lambda *_: []}),
    Switch("joint: units assigned freely", {"debubble.planners.joint.planner:_may_deal": _false}),
    Switch("joint: brief order searches", {f"{JOINT}:BRIEFLY": 0.0}),
    Switch(
        "joint: R apart as a start of the order search", {f"{JOINT}:_recomputing_apart": lambda schedule, _: schedule}
    ),
    Switch("joint: one round of annealing", {f"{JOINT}:ROUNDS": ((0.35, 1, 0.005),)}),
    Switch("joint: one cooling schedule", {f"{JOINT}:BRIEF": None, f"{JOINT}:AT_LENGTH": None}),
    Switch("joint: random points", {f"{JOINT}:DRAWING": 0.001}),
    Switch("joint: five and six chunks", {f"{JOINT}:CHUNKS": (1, 2, 3, 4)}),
    Switch("joint: chunks in V", {f"{JOINT}:_placements": None}),
    Switch("auto: order search of the fastest answer", {"debubble.planners.joint.search:last_search": _none_of}),
    Switch("auto: others with the whole budget", {"debubble.planners.auto:CLOSE": 0.0}),
    Switch("auto: adapipe", {"debubble.planners.auto:ASKED": ("joint", "portfolio")}),
    Switch("auto: portfolio", {"debubble.planners.auto:ASKED": ("joint", "adapipe")}),
    Switch("portfolio: optimizer steps on hosts", {f"{PORTFOLIO}:_Portfolio.on_hosts": lambda *_: []}),
    Switch("portfolio: library as it is in small steps", {f"{PORTFOLIO}:SMALL": 0}),
    Switch("portfolio: short step", {f"{PORTFOLIO}:LONG": 10**9}),
    Switch("portfolio: likeness", {f"{PORTFOLIO}:likeness": _nothing}),
    Switch("portfolio: moves of units", {f"{PORTFOLIO}:improve": lambda _p, priced, **_: priced}),
    Switch("portfolio: split by device", {"debubble.planners.portfolio.trials:balanced_by_device": None}),
    Switch("order: periodic patterns", {f"{OPTIMIZE}:_Optimizer.repeat_pattern": _none_of}),
    Switch("order: time-indexed bound", {"debubble.search.exact.time_indexed_bound:_slot": _nothing}),
    Switch("order: skeleton bound", {f"{OPTIMIZE}:skeleton_bound": lambda *_, bound=0, **__: bound}),
    Switch("order: bound of single devices", {f"{OPTIMIZE}:single_device_bound": _zero}),
    Switch("order: windows of CP-SAT", {f"{OPTIMIZE}:FRUITLESS": 0}),
    Switch("order: CP-SAT on small problems", {f"{OPTIMIZE}:PROVABLE": 0}),
    Switch("order: slow second search", {f"{OPTIMIZE}:_Optimizer.anneal_slowly": _none_of}),
    Switch("order: busiest start", {f"{OPTIMIZE}:_Optimizer.busiest_start": lambda _s, start, _e: start}),
    Switch("order: shipped schedules", {"debubble.search.cache:nearest": _nothing}),
    Switch("order: building blocks", {f"{INITIAL}:best_order": _nothing}),
    Switch("order: greedy rules", {f"{INITIAL}:greedy_schedules": lambda *_, **__: []}),
    Switch("order: offloading list schedules", {f"{INITIAL}:offloading_schedules": _none_of}),
    Switch("order: published schedules", {"debubble.planners.initial_schedules:initial": lambda *_: []}),
    Switch("bound: ramps", {f"{PROVEN}:ramps_bound": _no_proof}),
    Switch("bound: units whole", {f"{PROVEN}:granular_bound": lambda *_, **__: 0.0}),
    Switch("bound: units in runs", {f"{PROVEN}:contiguous_bound": lambda *_, least, **__: least}),
    Switch("degrees: hosts", {"debubble.planners.degrees.search:WITH_HOSTS": 0}),
    Switch("degrees: uneven stages", {"debubble.planners.degrees.search:UNEVEN": 0}),
)


def _completed(switch: Switch) -> Mapping[str, Any]:
    """The new values, those included that are made from the old ones."""
    off = dict(switch.off)
    if f"{JOINT}:BRIEF" in off:
        search = importlib.import_module(JOINT)
        off |= {f"{JOINT}:BRIEF": (search.MILD,), f"{JOINT}:AT_LENGTH": (search.MILD,)}
    if f"{JOINT}:_placements" in off:
        before = importlib.import_module(JOINT)._placements
        off[f"{JOINT}:_placements"] = lambda problem, units: [
            each for each in before(problem, units) if each == type(each).looped(each.devices, each.chunks)
        ]
    by_device = "debubble.planners.portfolio.trials:balanced_by_device"
    if by_device in off:
        balance = importlib.import_module("debubble.planners.partitioning.balance")
        off[by_device] = lambda units, placement: balance.balanced_counts(units, placement.stages)
    return off


@contextmanager
def without(values: Mapping[str, Any]) -> Iterator[None]:
    """Replace attributes of modules or classes, by `module:attribute` or `module:Class.attribute`."""
    before: list[tuple[Any, str, Any]] = []
    for place, value in values.items():
        module, _, path = place.partition(":")
        *owners, name = path.split(".")
        owner = importlib.import_module(module)
        for each in owners:
            owner = getattr(owner, each)
        before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


Row = dict[str, tuple[float, float] | None]
"""Step and bound of each case; None where nothing fits."""


def measure(chosen: Sequence[PlanCase]) -> Row:
    """Plan all cases in this process."""
    row: Row = {}
    for case in chosen:
        with TemporaryDirectory() as folder:
            effort = ("--effort", SETTINGS_EFFORT) if case.is_setting else ()
            answer = called("plan", *case.write(Path(folder)), *effort, "--json")
        step = answer.get("step_time")
        row[case.name] = None if step is None else (step, answer["lower_bound"])
    return row


def compared(before: Row, after: Row) -> dict[str, Any]:
    """How a row differs from that of all mechanisms."""
    ratios: dict[str, float] = {}
    wider: dict[str, float] = {}
    for name, entry in before.items():
        now = after[name]
        if (entry is None) != (now is None):
            ratios[name] = math.inf if now is None else 0.0
        elif entry is not None and now is not None:
            ratios[name] = now[0] / entry[0]
            wider[name] = (entry[1] - now[1]) / entry[0]
    finite = [ratio for ratio in ratios.values() if 0 < ratio < math.inf]
    largest = max(ratios, key=lambda name: ratios[name])
    lowered = max(wider, key=lambda name: wider[name])
    return {
        "geometric_mean": math.exp(sum(map(math.log, finite)) / len(finite)),
        "slower": sorted(name for name, ratio in ratios.items() if ratio > 1 + NOTABLE),
        "faster": sorted(name for name, ratio in ratios.items() if ratio < 1 - NOTABLE),
        "slowest": [largest, ratios[largest]],
        "widest": [lowered, wider[lowered]],
        "wider": sorted(name for name, points in wider.items() if points > NOTABLE),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="beginnings of names of switches")
    parser.add_argument("--cases", nargs="*", help="beginnings of names of cases")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    one_process: dict[str, Callable[..., Any]] = {"debubble.planners.process_pool:_is_worth_a_worker": _false}
    chosen = [
        case for case in cases() if isinstance(case, PlanCase)
        and (given.cases is None or case.name.startswith(tuple(given.cases)))
    ]  # fmt: skip
    switches = [s for s in SWITCHES if given.only is None or s.name.startswith(tuple(given.only))]
    rows: dict[str, Any] = {}
    with without(one_process):
        begin = time.process_time()
        before = measure(
            [case for case in chosen if case.name.startswith(tuple({n for s in switches for n in s.cases}))]
        )
        print(f"{'as it is':50} {time.process_time() - begin:7.0f} s of the processor", flush=True)
        for switch in switches:
            begin = time.process_time()
            with without(_completed(switch)):
                after = measure([case for case in chosen if case.name.startswith(switch.cases)])
            row = compared({name: before[name] for name in after}, after)
            rows[switch.name] = row | {"cases": len(after), "processor": round(time.process_time() - begin)}
            print(
                f"{switch.name:50} {time.process_time() - begin:7.0f} s  mean {row['geometric_mean']:.5f}"
                f"  slower {len(row['slower'])}  faster {len(row['faster'])}  at most {row['slowest'][1]:.4f}"
                f" ({row['slowest'][0]})  bounds {len(row['wider'])}, {row['widest'][1]:.4f} ({row['widest'][0]})",
                flush=True,
            )
            given.output.write_text(json.dumps({**provenance(), "switches": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
