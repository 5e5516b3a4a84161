"""ChronosPipe ALL runs: two chunks, recomputation, activations and optimizer states on the host, under a limit."""

from dataclasses import replace

import pytest
import torch

import debubble as db
from debubble.ir import Kind, Lane, Placement, Plan
from debubble.planners.problem import cut
from debubble.runtime import Pipeline
from debubble.runtime.batch import read_batch
from debubble.runtime.models.building import Model
from tests.runs.run_cases import (
    LLAMA8,
    batch_for,
    kinds_of,
    on_lanes,
    overlapping,
    peak_of,
    plan_for,
    units_of,
)
from tests.runtime import gloo_ranks
from tests.runtime.runtime_cases import run_threads
from tests.runtime.test_pipeline import ADAMW

STATES, ON_DEVICE = 16, 8
"""Bytes per fp32 parameter: parameter, gradient and two moments; the first two."""

STEPS = 8


@pytest.fixture(scope="module")
def units():
    return units_of(LLAMA8, dtype=torch.float32, states=STATES, hosted=ON_DEVICE)


@pytest.fixture(scope="module")
def limit(units):
    return peak_of(plan_for("dapple", LLAMA8, units=units, dtype="fp32")) * 7 // 10


@pytest.fixture(scope="module")
def plan(units, limit):
    return plan_for("chronos", LLAMA8, units=units, limit=limit, chunks=2, dtype="fp32")


def train(plan):
    """Per rank, what `one` gives."""
    return run_threads(plan, one, optimizer=ADAMW)


def one(pipeline):
    """Losses, counted peak of the last step, parameters, and the trace of the last step."""
    losses = []
    for step in range(STEPS):
        losses.append(float(pipeline.step(batch_for(pipeline.plan, seed=step))))
        peak = pipeline.static_bytes + gradients_of_hosted(pipeline) + pipeline.peak_activation
        pipeline.update()
    return losses, peak, pipeline.state_dict(), pipeline.gather_trace()


def gradients_of_hosted(pipeline):
    """They are on the device until D has brought them down: after the step nothing is left to count."""
    hosted = {op.stage for op in pipeline.plan.schedule.operations if op.kind is Kind.D}
    stages = [stage for s, stage in pipeline._part.stages.items() if s in hosted]
    return sum(p.nbytes for stage in stages for unit in stage.units for p in unit.parameters())


@pytest.fixture(scope="module")
def trained(plan):
    return train(plan)


def test_1f1b_and_interleaved_break_the_limit(units, limit):
    with pytest.raises(db.InfeasibleError):
        plan_for("dapple", LLAMA8, units=units, limit=limit, dtype="fp32")
    schedule = db.schedules["interleaved"](devices=4, micro_batches=8, chunks=2)
    costs = replace(units, memory_limit=(limit,)).stage_costs(
        cut(units, [3, 2, 2, 2, 2, 2, 2, 3]), Placement.looped(4, 2)
    )
    with pytest.raises(db.OutOfMemoryError):
        db.simulate(schedule, costs)


def test_the_plan_combines_all_means(plan):
    assert plan.schedule.placement.chunks == 2
    assert {Kind.R, Kind.O, Kind.L, Kind.P, Kind.D, Kind.S} <= kinds_of(plan)


def test_it_trains_with_the_losses_of_one_process(plan, trained):
    model = Model(LLAMA8)
    optimizer = ADAMW(model.parameters())
    expected = []
    for step in range(STEPS):
        rows = read_batch(batch_for(plan, seed=step), micro_batches=1, device=torch.device("cpu"))
        [x], [micro_batch] = rows.split(1, scale=1 / rows.counted, seed=0)
        loss = model(x, micro_batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))
    for losses, *_ in trained:
        assert losses == pytest.approx(expected, rel=1e-5)


def test_its_counted_peaks_are_within_the_limit(plan, trained, limit):
    # How much of the room under the limit is taken depends on when transfers end.
    for (_, peak, _, _), static in zip(trained, plan.costs.static, strict=True):
        assert static < peak <= limit


def test_the_host_steps_deep_chunks_beside_compute(plan, trained):
    assert on_lanes(trained[0][3], (Lane.HOST,)) == {f"{stage}S7" for stage in range(4, 8)}
    assert overlapping(plan, lanes=(Lane.HOST,))


def test_the_host_steps_bit_for_bit_as_the_device_does(plan, trained):
    orders = tuple(tuple(op for op in order if op.kind not in (Kind.P, Kind.D)) for order in plan.schedule.orders)
    on_device = replace(
        plan, schedule=replace(plan.schedule, orders=orders), costs=plan.costs.replace(memory_limit=None)
    )
    for (losses, _, parameters, _), (expected, _, on_host, _) in zip(train(on_device), trained, strict=True):
        assert losses == expected
        assert all(torch.equal(parameters[name], on_host[name]) for name in parameters)


def test_host_steps_are_clipped_as_the_synchronous_optimizer_clips(plan):
    """The host steps deep chunks while other gradients are still to come, and takes that back where it was wrong."""
    kept = tuple(tuple(op for op in order if op.kind not in (Kind.P, Kind.D, Kind.S)) for order in plan.schedule.orders)
    afterwards = replace(
        plan, schedule=replace(plan.schedule, orders=kept), costs=plan.costs.replace(memory_limit=None)
    )

    def synchronous(pipeline):
        norms = []
        for step in range(STEPS):
            pipeline.step(batch_for(plan, seed=step))
            norms.append(float(pipeline.update(max_norm)))
        return norms, pipeline.state_dict()

    def ahead(pipeline):
        settled = [pipeline.advance(batch_for(plan, seed=step), max_norm=max_norm) for step in range(STEPS)]
        settled = [*settled[1:], pipeline.settle()]
        assert any(s.rolled_back for s in settled)
        return [s.norm for s in settled], pipeline.state_dict()

    max_norm = 1e9
    norms = sorted(run_threads(afterwards, synchronous, optimizer=ADAMW)[0][0])
    max_norm = (norms[STEPS // 2 - 1] + norms[STEPS // 2]) / 2
    for (found, state), (expected, parameters) in zip(
        run_threads(plan, ahead, optimizer=ADAMW), run_threads(afterwards, synchronous, optimizer=ADAMW), strict=True
    ):
        assert found == expected
        assert min(expected) < max_norm < max(expected)
        assert all(torch.equal(state[name], parameters[name]) for name in state)


def over_gloo(rank, folder, path):
    torch.save(one(Pipeline(None, Plan.load(path), optimizer=ADAMW))[:3], folder / f"rank{rank}.pt")


@pytest.mark.slow
def test_it_runs_over_gloo(plan, trained, limit, tmp_path):
    plan.save(tmp_path / "plan.json")
    answers = gloo_ranks.spawn(4, over_gloo, tmp_path / "plan.json")
    for rank, (expected, _, on_threads, _) in enumerate(trained):
        losses, peak, parameters = torch.load(answers / f"rank{rank}.pt")
        assert losses == expected
        assert peak <= limit
        assert all(torch.equal(parameters[name], on_threads[name]) for name in parameters)
