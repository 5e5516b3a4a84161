"""Traces and logs of other frameworks, and the measured units that result."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from debubble.costs import Cluster
from debubble.imports.measurements import fit_units, read_measurements
from debubble.ir import InputError, Kind
from debubble.planners.model_problem import problem_of
from debubble.planners.problem import ModelUnits
from debubble.plans import Plan
from tests.exports.hand_plans import full, priced


def trace(plan: Plan, folder: Path, factor: Callable[[Kind, int], float]) -> list[Path]:
    """One trace per rank with a step of two seconds, whose operations take `factor` times their planned time."""
    timeline, paths = plan.simulate(), []
    for rank, lane in enumerate(timeline.compute):
        events = [
            {"ph": "X", "cat": "user_annotation", "name": f"PP:{o.op.name}", "ts": 0,
             "dur": 1e6 * float(o.duration) * factor(o.op.kind, o.op.stage)}
            for o in lane
        ]  # fmt: skip
        events.append({"ph": "X", "name": "ProfilerStep#3", "ts": 0, "dur": 2e6})
        paths.append(folder / f"rank{rank}.json")
        paths[-1].write_text(json.dumps({"traceEvents": events}))
    return paths


def test_a_trace_scales_the_units_of_every_stage(tmp_path: Path) -> None:
    plan = priced(full(0, 2))
    slower = {(Kind.F, 0): 2.0, (Kind.B, 0): 3.0, (Kind.F, 1): 1.0, (Kind.B, 1): 1.5}

    fit = fit_units(plan, read_measurements(trace(plan, tmp_path, lambda kind, stage: slower[kind, stage])))

    assert [pytest.approx(pair, rel=1e-6) for pair in ((2.0, 3.0), (1.0, 1.5))] == list(fit.factors)
    computed = units_of(plan)
    first, last = fit.units.units[1], fit.units.units[-1]
    assert first.forward == pytest.approx(2 * computed[1].forward)
    assert first.strategies["full"].recompute == pytest.approx(3 * computed[1].strategies["full"].recompute)
    assert last.backward_input == pytest.approx(1.5 * computed[-1].backward_input)
    assert first.activation == computed[1].activation
    assert fit.measured == 2.0
    assert fit.error == pytest.approx(fit.predicted / 2 - 1)


LOG = """ [2026-01-01] iteration 10/ 100 | elapsed time per iteration (ms): 900.0 | learning rate: 1e-4 |
(min, max) time across ranks (ms):
    forward-backward ...............................: (800.00, 810.00)
    forward-compute ................................: (100.00, {forward:.6f})
    backward-compute ...............................: (200.00, {backward:.6f})
"""


def test_megatron_timers_scale_all_stages_equally(tmp_path: Path) -> None:
    plan = priced()
    busiest = [
        1e3 * plan.micro_batches * max(map(float, times))
        for times in (
            plan.costs.forward,
            [i + w for i, w in zip(plan.costs.backward_input, plan.costs.backward_weight, strict=True)],
        )
    ]
    (tmp_path / "log.txt").write_text(LOG.format(forward=2 * busiest[0], backward=4 * busiest[1]))

    fit = fit_units(plan, read_measurements([tmp_path / "log.txt"]))

    assert list(fit.factors) == [pytest.approx((2.0, 4.0), rel=1e-4)] * 2
    assert fit.measured == 0.9


@pytest.mark.parametrize(
    "timers",
    [
        "time (ms) | forward-compute: 10.5 | backward-compute: 20.25 | optimizer: 5.00",
        "max time across ranks (ms):\n    forward-compute ......: 10.5\n    backward-compute .....: 20.25",
        "times across ranks (ms):\n  forward-compute:\n     rank  0: 9.00\n     rank  1: 10.50\n  backward-compute:\n"
        "     rank  0: 20.25\n     rank  1: 3.00\n",
        "[default7]: (min, max) time across ranks (ms):\n[default7]:    forward-compute ....: (1.0, 10.5)\n"
        "[default7]:    backward-compute ....: (1.0, 20.25)",
    ],
    ids=["one value", "max", "all", "a prefix"],
)
def test_timers_are_read_in_every_form_that_megatron_logs(timers: str, tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(timers)

    assert read_measurements([tmp_path / "log.txt"]).totals == {Kind.F: 0.0105, Kind.B: 0.02025}


def test_a_trace_of_an_older_torch_is_refused_for_its_names(tmp_path: Path) -> None:
    events = [{"ph": "X", "name": f"{kind} {place}", "dur": 5} for kind in ("Forward", "Backward") for place in (0, 1)]
    (tmp_path / "rank0.json").write_text(json.dumps({"traceEvents": events}))

    with pytest.raises(InputError, match="as older versions of torch do"):
        read_measurements([tmp_path / "rank0.json"])


def test_trace_without_operations_names_what_is_expected(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text('{"traceEvents": []}')

    with pytest.raises(InputError, match=r"neither operations of torch's pipelining .* nor Megatron-LM's timers"):
        read_measurements([tmp_path / "trace.json"])


def test_a_rank_that_is_missing_is_named_by_its_stage(tmp_path: Path) -> None:
    plan = priced()
    paths = trace(plan, tmp_path, lambda kind, stage: 1.0)

    with pytest.raises(InputError, match="no forward and backward of stage 1: give those of all ranks"):
        fit_units(plan, read_measurements(paths[:1]))


def test_the_command_writes_a_profile_that_plan_takes(tmp_path: Path, run: Any, json_of: Any) -> None:
    plan = priced()
    plan.save(tmp_path / "plan.json")
    assert plan.model is not None
    (tmp_path / "config.json").write_text(json.dumps(dict(plan.model.config)))
    paths = trace(plan, tmp_path, lambda kind, stage: 2.0)
    traces = [word for path in paths for word in ("--from-trace", str(path))]
    profile = str(tmp_path / "costs.json")

    code, out, _ = run("profile", str(tmp_path / "plan.json"), *traces, "-o", profile)
    model = ("plan", str(tmp_path / "config.json"), "--cluster", "2xA100-80GB")
    options = (*model, "--micro-batches", "8", "--planner", "dapple")
    computed, measured = (json_of(*options, *more) for more in ((), ("--profile", profile)))

    assert code == 0
    assert "Stage 0: forward 2.000, backward 2.000 times as long as computed." in out
    assert "it took 2 s" in out
    assert measured["makespan"] == pytest.approx(2 * computed["makespan"], rel=0.05)


def units_of(plan: Plan) -> Any:
    assert plan.model is not None
    cluster = Cluster.parse("2xA100-80GB")
    problem = problem_of(plan.model, cluster, plan.options, micro_batches=8, pipeline=2)
    assert isinstance(problem.workload, ModelUnits)
    return problem.workload.units.units
