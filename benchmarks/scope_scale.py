"""SCOPE's integer program at scale: gap and time on 16,384 devices (16 stages, tensor 8, data 128).

    python benchmarks/scope_scale.py [--only 'MIX,LAYERS,MEMORY,STRATEGIES,CHUNKS;...'] [--seconds 60] [--json FILE]
    python benchmarks/scope_scale.py --docs --json FILE     # the table of docs/notes/scope.md from the file

Layers are those of LLaMA-175B, in three mixes: `one` type; `moe`, a prefix of 3 lighter layers, the main run and a
multi-token-prediction layer; `multimodal`, the same behind a vision tower of a fifth of the layers.  Model states take
40% of the memory; the activations that 1F1B keeps without recomputation take 110% (`loose`), 200% (`medium`) or 400%
(`tight`) of the rest.  64 micro-batches.  `cpu` is the processor time of the process, the `wall` depends on the
neighbours; `--seconds` is the effort.  The gap is that of the program's own objective.  Rows that the JSON file has of
the same commit are kept and not run again, so that a broken run continues where it stopped; those of other commits are
replaced cell by cell.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from marks import write_between
from provenance import commit, provenance

from debubble.costs.units import Partition, Strategy, Unit, Units
from debubble.ir import InfeasibleError, Placement
from debubble.papers.scope.figures.tables import Case, problem_of
from debubble.papers.scope.instance import layer_runs
from debubble.papers.scope.integer_program import solve
from debubble.papers.scope.planner import DUAL, TRI
from debubble.planners import ModelUnits, Problem
from debubble.planners.baselines import megatron_schedule
from debubble.planners.partitioning.balance import even_counts
from debubble.search.effort import Effort
from debubble.simulator import Repricer

MICRO_BATCHES = 64
MIXES = ("one", "moe", "multimodal")
LAYERS = (98, 200, 300, 400)
MEMORY = {"loose": 1.1, "medium": 2.0, "tight": 4.0}
STRATEGIES = {"dual": DUAL, "tri": TRI, "pareto": None}
CHUNKS = (1, 2, 4)
MIXED = {"one": "one type", "moe": "dense prefix, MoE, MTP", "multimodal": "vision tower before that"}
CELL = ("mix", "layers", "memory", "strategies", "chunks")
PAGE = Path(__file__).parents[1] / "docs" / "notes" / "scope.md"
BEGIN, END = "<!-- scale: written by benchmarks/scope_scale.py --docs -->", "<!-- end of scale -->"


def scaled(unit: Unit, *, kind: str = "", time: float = 1.0, static: float = 1.0, kept: float = 1.0) -> Unit:
    def strategy(s: Strategy) -> Strategy:
        after_full = None if s.after_full is None else s.after_full * kept
        return replace(s, activation=s.activation * kept, recompute=s.recompute * time, after_full=after_full)

    after = unit.activation_after_input
    return replace(
        unit,
        type=kind + unit.type,
        layer=None,
        forward=unit.forward * time,
        backward_input=unit.backward_input * time,
        backward_weight=unit.backward_weight * time,
        static=unit.static * static,
        activation_after_input=None if after is None else after * kept,
        strategies={name: strategy(s) for name, s in unit.strategies.items()},
    )


def problem_for(base: Problem, mix: str, layers: int, memory: str) -> Problem:
    base_units = units_of(base)
    embedding, *body, head = base_units.units

    def run(count: int, kind: str, **scale: float) -> list[Unit]:
        return [scaled(unit, kind=kind, **scale) for _ in range(count) for unit in body[:2]]

    tower = layers // 5 if mix == "multimodal" else 0
    beside = 2 if mix == "one" else 6
    dense = run(3, "dense-", time=0.6, static=0.4, kept=0.8) if mix != "one" else []
    prediction = run(1, "mtp-", time=1.1, static=0.9) if mix != "one" else []
    sequence = [
        *run(tower, "vision-", time=0.37, static=0.25, kept=0.55), embedding, *dense,
        *run(layers - tower - beside, ""), *prediction, head,
    ]  # fmt: skip
    limit = base.limits[0]
    states = 0.4 * limit * base.devices / float(sum(unit.static for unit in sequence))
    sequence = [scaled(replace(unit, workspace=0), static=states) for unit in sequence]
    problem = replace(
        base, micro_batches=MICRO_BATCHES, workload=ModelUnits(replace(base_units, units=tuple(sequence)))
    )
    kept = MEMORY[memory] * 0.6 * limit / _kept(problem)
    units = tuple(scaled(unit, kept=kept) for unit in sequence)
    return replace(problem, workload=ModelUnits(replace(base_units, units=units)))


def units_of(problem: Problem) -> Units:
    assert isinstance(problem.workload, ModelUnits)
    return problem.workload.units


def _kept(problem: Problem) -> float:
    """Bytes that an even 1F1B keeps of activations on its fullest device."""
    units = units_of(problem)
    partition = Partition.cut(units, even_counts(units, problem.devices))
    costs = units.stage_costs(partition, Placement.linear(problem.devices))
    peaks = Repricer(megatron_schedule(problem, 1)).peak_memory(costs, fused_recompute=frozenset())
    return max(peak - float(static) for peak, static in zip(peaks, costs.static, strict=True))


def row_of(problem: Problem, strategies: Any, chunks: int, seconds: float) -> dict[str, Any]:
    """What the program's answer to a cell is worth, and what it took."""
    schedule = megatron_schedule(problem, chunks)
    runs = layer_runs(units_of(problem), strategies)
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        answer = solve(runs, schedule, limits=problem.limits, static=0.0, effort=Effort(seconds), seed=0)
    except InfeasibleError as error:
        return {"infeasible": str(error)}
    spent = {"cpu": round(time.process_time() - cpu, 2), "wall": round(time.perf_counter() - wall, 2)}
    return {"formula": answer.formula, "bound": answer.bound, "gap": round(answer.gap, 5), **spent}


def cells() -> Iterator[tuple[str, int, str, str, int]]:
    for mix in MIXES:
        for layers in LAYERS:
            for memory in MEMORY:
                for strategies in STRATEGIES:
                    for chunks in CHUNKS:
                        yield mix, layers, memory, strategies, chunks


def chosen(name: str, only: str) -> bool:
    """Whether every part of one of the patterns is `*` or the cell's."""
    return any(
        all(p in ("*", part) for p, part in zip(pattern.split(","), name.split(","), strict=False))
        for pattern in only.split(";")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", default="")
    parser.add_argument("--docs", action="store_true", help="write the table of docs/notes/scope.md from the file")
    arguments = parser.parse_args()
    if arguments.docs:
        write_between(PAGE, BEGIN, END, page(json.loads(Path(arguments.json).read_text())["rows"]))
        return
    base = problem_of(Case("LLaMA-175B"))
    import ortools.linear_solver.pywraplp
    import ortools.sat.python.cp_model  # noqa: F401  (loading the library is no part of solving)

    place = Path(arguments.json) if arguments.json else None
    rows = json.loads(place.read_text())["rows"] if place and place.exists() else []
    found = {values: [row for row in rows if cell_of(row) == values] for values in cells()}
    for values, before in found.items():
        done = bool(before) and all(row["commit"] == commit() for row in before)
        if done or not chosen(",".join(map(str, values)), arguments.only):
            continue
        mix, layers, memory, strategies, chunks = values
        problem, options = problem_for(base, mix, layers, memory), STRATEGIES[strategies]
        result = row_of(problem, options, chunks, arguments.seconds)
        found[values] = [dict(zip(CELL, values, strict=True)) | result | {"commit": commit()}]
        for row in found[values]:
            print(*row.values(), flush=True)
        if place:
            every = [row for each in found.values() for row in each]
            place.write_text(json.dumps({**provenance(), "rows": every}, indent=1) + "\n")


def cell_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in CELL)


def page(rows: Sequence[dict[str, Any]]) -> str:
    """The table of docs/notes/scope.md, and what it says."""
    lines = [
        "| model | layers | memory | strategies | chunks | gap | CPU seconds |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        mix, *others = cell_of(row)
        cells = (MIXED[mix], *map(str, others), f"{row['gap']:.2%}", f"{row['cpu']:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    gaps = {tower: [r["gap"] for r in rows if (r["mix"] == "multimodal") is tower] for tower in (False, True)}
    said = [
        f"The {len(each)} {'with' if tower else 'without'} a tower are solved to within {max(each):.1%}."
        for tower, each in gaps.items()
    ]
    commits = ", ".join(f"{many} of {name[:7]}" for name, many in Counter(r["commit"] for r in rows).most_common())
    return "\n".join([*lines, "", *said, f"Rows by commit: {commits}."])


if __name__ == "__main__":
    main()
