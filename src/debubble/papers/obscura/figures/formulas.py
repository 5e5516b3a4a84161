"""Obscura, sections 5 to 8: equations, Algorithm 1 and CMB-Identifying, checked against simulated pipelines."""

from __future__ import annotations

from collections.abc import Iterator

from debubble.ir import StageCosts
from debubble.papers.obscura.figures.fit import DEVICES, LAYERS, LLAMA, problem, units
from debubble.papers.obscura.figures.runs import on_demand
from debubble.papers.obscura.planner import Counts, adjustments
from debubble.papers.obscura.schedule import max_migrated
from debubble.papers.obscura.step_model import identify, step_time, warm_ups
from debubble.papers.printed import PrintedPaper
from debubble.papers.registry import Exhibit
from debubble.planners.partitioning.balance import even_counts
from debubble.planners.partitioning.fixed_partition import Stages
from debubble.simulator import simulate

PAPER = PrintedPaper.load("obscura")


def closed_forms() -> Iterator[Exhibit]:
    """Equations (2) to (6), checked by simulation over many p, m, k and r."""
    cases = [(p, m, k, r) for p in (2, 4, 6, 8) for m in (1, 7, 16, 33) for k in range(p) for r in (0, 0.25, 0.5, 1)]
    met = sum(abs(_simulated(p, m, k, r) - _equation_3(p, m, k, r)) < 1e-9 for p, m, k, r in cases)
    estimated = sum(abs(_step_model(p, m, k, r) - _equation_3(p, m, k, r)) < 1e-9 for p, m, k, r in cases)
    hidden = [
        _hidden(p, m, k) == min(m - 1, 3 * (p - k - 1)) for p in (2, 4, 6, 8) for m in (7, 16, 33) for k in range(p)
    ]
    yield PAPER.claim("closed-forms.equation-3", [met], printed=(str(len(cases)),), cases=len(cases))
    yield PAPER.claim("closed-forms.same-planner", [estimated], printed=(str(len(cases)),))
    yield PAPER.claim("closed-forms.equation-5", [sum(hidden)], printed=(str(len(hidden)),), hidden=len(hidden))
    uneven = [(p, m, k) for p in (2, 4, 6, 8) for m in (7, 33) for k in range(p)]
    yield PAPER.claim(
        "closed-forms.equation-6",
        [sum(_memory(p, m, k) for p, m, k in uneven)],
        printed=(str(len(uneven)),),
        uneven=len(uneven),
    )
    yield PAPER.claim("closed-forms.equation-2", "max(lambda (a' beta / B - 2f - r), 0)")
    yield PAPER.claim("closed-forms.equation-4", "every number that the warm-up holds")
    yield PAPER.claim("closed-forms.warm-up", "one forward more per earlier stage")


def _simulated(p: int, m: int, k: int, r: float) -> float:
    schedule = on_demand("obscura", devices=p, micro_batches=m, stages=k + 1)
    return float(simulate(schedule, StageCosts.of(stages=p, recompute=r)).makespan)


def _equation_3(p: int, m: int, k: int, r: float) -> float:
    """T_0, with f = 1 and without swapping."""
    pace = 3 + r
    time = 3 * m + 3 * (p - k - 2) if k < p - 1 else 0.0
    for s in range(k, -1, -1):
        time = max(time + pace, pace * m + (k - s) * pace)
    return float(time)


def _step_model(p: int, m: int, k: int, r: float) -> float:
    times = [r if s <= k else 0.0 for s in range(p)]
    mu = warm_ups(p, m, adjusted=k + 1, migrated=max_migrated(p, k + 1))
    return step_time(StageCosts.of(stages=p), times, micro_batches=m, warm_ups=mu)


def _memory(p: int, m: int, k: int) -> bool:
    """Tell whether the simulated peak of every stage is W_s + mu_s a_s, with a_s^adj on adjusted stages."""
    costs = StageCosts.of(
        stages=p, activation=[10 + 2 * s for s in range(p)], activation_recomputed=[5 + s for s in range(p)],
        recompute_workspace=0, static=[100 - s for s in range(p)],
    )  # fmt: skip
    run = simulate(on_demand("obscura", devices=p, micro_batches=m, stages=k + 1), costs)
    mu = warm_ups(p, m, adjusted=k + 1, migrated=max_migrated(p, k + 1))
    stored = [costs.activation_recomputed[s] if s <= k else costs.activation[s] for s in range(p)]
    return list(run.peak_memory) == [costs.static[s] + mu[s] * stored[s] for s in range(p)]


def _hidden(p: int, m: int, k: int) -> int:
    """Number of stage k's recomputations (r = f) that do not lengthen the step; the last one of a stage always does."""
    return int(m - (_simulated(p, m, k, 1) - 3 * (m + p - 1) - k))


def algorithm_1() -> Iterator[Exhibit]:
    """Partition adjustment on 144 equal units."""

    def speed_up(counts: Counts) -> float:
        work = [count / 18 for count in counts]
        recompute = [0.39 * work[s] if s < 3 else 0.0 for s in range(8)]
        costs = StageCosts.of(stages=8, forward=work, backward_input=work, backward_weight=work, recompute=recompute)
        run = simulate(on_demand("obscura", devices=8, micro_batches=128, stages=3), costs)
        return float(4 * 135 / run.makespan)

    def times(counts: Counts) -> list[float]:
        return [count / 18 * (3.39 if s < 3 else 3) for s, count in enumerate(counts)]

    trace = [(18,) * 8, *adjustments((18,) * 8, adjusted=3, micro_batches=128, times=times)]
    best, printed = max(map(speed_up, trace)), speed_up(trace[-2])
    model = units("Llama-2", "23B")
    first, second, *_, last = even_counts(model, DEVICES)
    yield PAPER.claim("algorithm-1.half-layers", [len(model.units), first, second, last])
    yield PAPER.claim("algorithm-1.speed-up", [best], last=printed)


def section_8() -> Iterator[Exhibit]:
    """CMB-Identifying."""
    over = {}
    for size in LAYERS:
        stages = Stages.even(problem("Llama-2", size, 32))
        over[size] = identify(stages, stages.named("none")), identify(stages, stages.named("cmb"))
    yield PAPER.claim("section-8.stages-over", [*over["23B"], *over["28B"]])
    yield PAPER.claim("section-8.saved", [100 * (1 - LLAMA.cheap_kept)])
    yield PAPER.claim("section-8.time", [100 * LLAMA.cheap_time / 3])
