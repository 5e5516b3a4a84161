"""Packs the tensors of the golden corpus's plans into one arena per device, and writes the gaps to their peaks.

    python -m golden.addresses [CASE ...] [--again]     # plans and packs; all cases, or those of these beginnings
    python -m golden.addresses --docs                   # the table of docs/notes/addresses.md     (in benchmarks/)

Settings and searches of degrees are planned with an effort of 1.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmark import Benchmark, Row, table

from debubble import Plan
from debubble.formatting import size_words
from debubble.simulator import AddressPlan, plan_addresses
from golden.cases import PlanCase, cases
from golden.run import called

EFFORT = ("--effort", "1")


def planned(case: PlanCase) -> Plan | None:
    """The plan of a case; None if nothing fits."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        long = case.is_setting or "--global-batch" in case.words
        called("plan", *case.write(Path(folder)), *(EFFORT if long else ()), "--json", "-o", str(file))
        return Plan.load(file) if file.exists() else None


def measure(case: PlanCase) -> Row:
    """The address plan with the largest gap among the devices of a case."""
    plan = planned(case)
    if plan is None:
        return {"devices": 0}
    timeline = plan.simulate()
    plans: list[AddressPlan] = []
    seconds = []
    for device in range(plan.devices):
        start = time.perf_counter()
        plans += plan_addresses(timeline, devices=[device])
        seconds.append(time.perf_counter() - start)
    widest = max(plans, key=lambda plan: plan.gap)
    return {
        "devices": plan.devices, "tensors": max(len(plan.tensors) for plan in plans), "seconds": max(seconds),
        "device": widest.device, "of_a_model": plan.model is not None,
        "static": float(widest.static), "peak": float(widest.peak), "arena": float(widest.arena), "gap": widest.gap,
    }  # fmt: skip


def written(rows: Sequence[Row]) -> str:
    """The table of the note."""
    head = ("case", "devices", "tensors", "static", "peak of tensors", "arena", "gap", "of tensors", "seconds")
    lines = [
        (
            row["case"], str(row["devices"]), str(row["tensors"]),
            *(size_words(row[key]) if row["of_a_model"] else f"{row[key]:.6g}" for key in ("static", "peak", "arena")),
            f"{100 * row['gap']:.2f}%", f"{100 * (row['arena'] / row['peak'] - 1):.2f}%", f"{row['seconds']:.2f}",
        )
        for row in sorted(rows, key=lambda row: -row.get("gap", 0.0))
        if row["devices"]
    ]  # fmt: skip
    return table(head, lines)


BENCHMARK = Benchmark(
    name="addresses", about=__doc__, cases={case.name: case for case in cases() if isinstance(case, PlanCase)},
    measure=measure, pages={"notes/addresses.md#addresses": written},
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
