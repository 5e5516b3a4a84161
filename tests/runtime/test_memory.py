"""Saved activations are counted to the byte, and recomputation and offload free the expected bytes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import debubble as db
from debubble.ir import Placement, PlannedUnit, Schedule, StageCosts
from debubble.models import ModelConfig
from debubble.runtime.memory.activations import Ledger
from debubble.runtime.models.build import build_stage
from debubble.runtime.models.stage import SavePolicy, Stage
from debubble.runtime.models.units import MicroBatch
from tests.support.runtime_cases import peaks_of, plan_of, run_threads, tokens_of
from tests.support.tiny_models import LLAMA

HIDDEN, FFN, ROWS, LENGTH = LLAMA["hidden_size"], LLAMA["intermediate_size"], 2, 16
TOKENS = ROWS * LENGTH
X = 8 * TOKENS * HIDDEN  # bytes of a boundary tensor in fp64
SCALE = 8 * TOKENS  # what a norm saves besides its input


def stage_of(*units: Any, ledger: Any) -> Any:
    built = build_stage(LLAMA, units, dtype=torch.float64)
    ledger.exclude(p for unit in built for p in unit.parameters())
    return Stage(built, units, ledger)


def bytes_saved_by(unit: Any) -> Any:
    ledger = Ledger()
    stage = stage_of(unit, ledger=ledger)
    stage.forward(0, torch.randn(ROWS, LENGTH, HIDDEN, dtype=torch.float64), MicroBatch(), SavePolicy(recomputing=1))
    return ledger.bytes


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("none", 2 * X + SCALE + 3 * 8 * TOKENS * FFN),  # x, norm, gate, up, product
        ("norm", X + 3 * 8 * TOKENS * FFN),
        ("activation", 2 * X + SCALE + 3 * 8 * TOKENS * FFN),
        ("multiply", 2 * X + SCALE + 2 * 8 * TOKENS * FFN),
        ("activation+multiply", 2 * X + SCALE + 2 * 8 * TOKENS * FFN),
        ("mlp", 2 * X + SCALE),
        ("full", X),
    ],
)
def test_mlp_saves_what_its_strategy_specifies(strategy: str, expected: Any) -> None:
    assert bytes_saved_by(PlannedUnit("mlp", 0, strategy)) == expected


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("none", 2 * X + SCALE + X + 2 * X // 2 + X + 8 * TOKENS * 4),  # x, norm, q, k and v of half the heads, core
        ("core", 2 * X + SCALE + X + 2 * X // 2),
        ("full", X),
    ],
)
def test_attention_saves_what_its_strategy_specifies(strategy: str, expected: Any) -> None:
    assert bytes_saved_by(PlannedUnit("attention", 0, strategy)) == expected


def test_fused_recomputation_holds_one_layer_at_a_time() -> None:
    """A layer whose halves both recompute in full keeps one input."""
    ledger = Ledger()
    units = [replace(u, strategy="full") for u in ModelConfig.from_hf(LLAMA).units[1:-1]]
    stage = stage_of(*units, ledger=ledger)
    y = stage.forward(
        0, torch.randn(ROWS, LENGTH, HIDDEN, dtype=torch.float64), MicroBatch(), SavePolicy(recomputing=99)
    )
    assert ledger.bytes == 4 * X
    ledger.start_step()
    stage.backward(0, y, split=False)
    assert ledger.peak == 3 * X + bytes_saved_by(PlannedUnit("attention", 0)) + bytes_saved_by(PlannedUnit("mlp", 0))
    assert ledger.bytes == 0


def test_halves_of_different_layers_keep_an_input_each() -> None:
    ledger = Ledger()
    stage = stage_of(PlannedUnit("mlp", 0, "full"), PlannedUnit("attention", 1, "full"), ledger=ledger)
    stage.forward(0, torch.randn(ROWS, LENGTH, HIDDEN, dtype=torch.float64), MicroBatch(), SavePolicy(recomputing=99))
    assert ledger.bytes == 2 * X


def test_deeper_micro_batch_saves_by_its_strategy() -> None:
    ledger = Ledger()
    stage = stage_of(PlannedUnit("mlp", 0, "norm", "full"), ledger=ledger)
    saved_bytes = []
    for j, deeper in enumerate((False, True)):
        before = ledger.bytes
        x = torch.randn(ROWS, LENGTH, HIDDEN, dtype=torch.float64)
        stage.forward(j, x, MicroBatch(), SavePolicy(recomputing=1, deeper=deeper))
        saved_bytes.append(ledger.bytes - before)
    assert saved_bytes == [bytes_saved_by(PlannedUnit("mlp", 0, name)) for name in ("norm", "full")]


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_offload_frees_its_share_to_the_byte(share: float) -> None:
    ledger = Ledger()
    stage = stage_of(*ModelConfig.from_hf(LLAMA).units[1:-1], ledger=ledger)
    stage.forward(0, torch.randn(ROWS, LENGTH, HIDDEN, dtype=torch.float64), MicroBatch())
    saved_bytes = ledger.bytes
    buffer = stage.offload(0, share, lambda size: torch.empty(size, dtype=torch.uint8))
    stage.release(0)
    assert ledger.offloaded == len(buffer) == round(share * saved_bytes)
    assert ledger.bytes == saved_bytes - len(buffer)
    stage.reload(0, buffer)
    assert (ledger.bytes, ledger.offloaded) == (saved_bytes, 0)


def activation_of(units: Any) -> Any:
    """Bytes that a stage of these units keeps, and that remain between I and W."""
    ledger = Ledger()
    stage = stage_of(*units, ledger=ledger)
    tokens = tokens_of(LLAMA, rows=ROWS, length=LENGTH)
    first = units[0].type == "embedding"
    x = tokens[:, :-1].contiguous() if first else torch.randn(ROWS, LENGTH, HIDDEN, dtype=torch.float64)
    y = stage.forward(0, x, MicroBatch(targets=tokens[:, 1:].contiguous()))
    saved_bytes = ledger.bytes
    stage.backward(0, torch.ones_like(y), split=True)
    return saved_bytes, ledger.bytes


@pytest.mark.parametrize("name", ["zb-h2", "interleaved"])
def test_measured_peaks_match_the_simulation(name: str) -> None:
    """Within one boundary tensor, which a unit's input backward still holds before it frees."""
    chunks = db.schedules[name].default_chunks
    schedule = db.schedules[name](devices=2, micro_batches=6)
    plan = plan_of(schedule, LLAMA)
    profiled = [activation_of(units) for units in plan.partition]
    saved_bytes, bytes_after_input = zip(*profiled, strict=True)
    costs = StageCosts.of(stages=2 * chunks, activation=saved_bytes, activation_after_input=bytes_after_input)

    actual = peaks_of(plan, tokens_of(LLAMA, rows=6 * ROWS, length=LENGTH))
    assert actual == pytest.approx(db.simulate(schedule, costs).peak_memory, abs=X)


def test_offload_lowers_the_peak_as_simulated() -> None:
    order = "0F0 0O0 0F1 0O1 0F2 0L1 0B2 0L0 0B1 0B0"
    schedule = Schedule.of("offload", Placement.linear(1), 3, [order.split()])
    plan = plan_of(schedule, LLAMA)
    saved_bytes, _ = activation_of(plan.partition[0])
    # Under this limit lowering inserts waits for offloads where memory needs them.
    costs = StageCosts.of(stages=1, activation=saved_bytes, offload=1, memory_limit=2 * saved_bytes)
    assert db.simulate(schedule, costs).peak_memory == (2 * saved_bytes,)

    def peak(pipeline: Any) -> Any:
        pipeline.step(tokens_of(LLAMA, rows=3 * ROWS, length=LENGTH))
        return pipeline.measured.peak_activation, pipeline.measured.peak_offloaded

    [(device, elsewhere)] = run_threads(replace(plan, costs=costs), peak)
    # An offload may end during the next forward, so the two never coexist in full.
    assert saved_bytes < device <= 2 * saved_bytes
    assert elsewhere == 2 * saved_bytes


def test_peak_of_a_step_includes_cleared_gradients() -> None:
    plan = plan_of(db.schedules["1f1b"](devices=2, micro_batches=4), LLAMA)

    def one(pipeline: Any) -> tuple[int, int, int]:
        pipeline.step(tokens_of(LLAMA, rows=4))
        with_gradients = pipeline.measured.peak_memory
        assert with_gradients == pipeline.measured.static_bytes + pipeline.measured.peak_activation
        for parameter in pipeline.parameters():
            parameter.grad = None
        parameters = sum(parameter.nbytes for parameter in pipeline.parameters())
        return with_gradients, pipeline.measured.peak_memory, pipeline.measured.static_bytes - parameters

    for with_gradients, cleared, rest in run_threads(plan, one):
        assert with_gradients == cleared
        assert rest == 0


def times_of_units(strategy: str) -> dict[tuple[str, int, int], int]:
    """Number of units that are timed together in a step of two stages, by kind, stage and first unit."""
    plan = plan_of(db.schedules["1f1b"](devices=2, micro_batches=2), LLAMA, strategy=strategy, counts=[3, 7])

    def one(pipeline: Any) -> Any:
        pipeline.measured.unit_times.enabled = True
        pipeline.step(tokens_of(LLAMA, rows=2))
        return pipeline.measured.gather_trace().steps[0].units

    return {time[:3]: time.length for time in run_threads(plan, one)[0]}


@pytest.mark.parametrize(
    ("strategy", "backwards"),
    [
        ("none", {("B", 0, 0): 3, ("B", 1, 0): 7}),
        ("full", {("B", 0, 0): 1, ("B", 0, 1): 2, ("B", 1, 0): 2, ("B", 1, 2): 2, ("B", 1, 4): 2, ("B", 1, 6): 1}),
    ],
)
def test_times_are_per_forward_unit_and_recompute_span(strategy: str, backwards: Any) -> None:
    forwards = {("F", 0, i): 1 for i in range(3)} | {("F", 1, i): 1 for i in range(7)}
    assert times_of_units(strategy) == forwards | backwards
