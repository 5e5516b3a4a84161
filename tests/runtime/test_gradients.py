"""A step by any plan gives the gradients of plain autograd in one process."""

from dataclasses import replace

import pytest

import debubble as db
from debubble.exports.torch_csv import read, to_csv
from debubble.ir import Kind, Op
from tests.runtime.runtime_cases import (
    GPT2,
    GPT2_UNTIED,
    LLAMA,
    LLAMA_TIED,
    assert_same_gradients,
    plan_of,
    tokens_of,
)

FAMILIES = {"llama": LLAMA, "llama-tied": LLAMA_TIED, "gpt2": GPT2_UNTIED, "gpt2-tied": GPT2}
STRATEGIES = ["none", "norm+activation+multiply", "core", "mlp", "full"]


def schedule_of(name, *, devices, micro_batches=4):
    entry = db.schedules[name]
    chunks = {"chunks": max(entry.default_chunks, 2)} if "chunks" in entry.options else {}
    costs = db.StageCosts.of(stages=devices * chunks.get("chunks", entry.default_chunks), offload=1)
    return entry(devices=devices, micro_batches=micro_batches, costs=costs, **chunks)


def fused(schedule):
    return replace(schedule, fused_recompute=frozenset(range(schedule.stages)))


def explicit(schedule):
    """R right before every backward."""
    orders = []
    for order in schedule.orders:
        backwards = {op: Op(Kind.R, op.stage, op.micro_batch) for op in order if op.kind in (Kind.B, Kind.I)}
        orders.append([o for op in order for o in ((backwards[op], op) if op in backwards else (op,))])
    return replace(schedule, orders=tuple(map(tuple, orders)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1"])
def test_gradients_equal_one_process(name, family):
    config = FAMILIES[family]
    schedule = schedule_of(name, devices=2)
    assert_same_gradients(plan_of(schedule, config), config, tokens_of(config, rows=8))


@pytest.mark.parametrize("form", [fused, explicit])
@pytest.mark.parametrize("strategy", STRATEGIES[1:])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_recomputation_changes_no_gradient(name, strategy, form):
    for config in (LLAMA, GPT2):
        schedule = form(schedule_of(name, devices=2))
        assert_same_gradients(plan_of(schedule, config, strategy=strategy), config, tokens_of(config, rows=4))


def test_uneven_partitions_over_four_ranks():
    for config in (LLAMA_TIED, GPT2_UNTIED):
        schedule = schedule_of("1f1b", devices=4)
        plan = plan_of(schedule, config, counts=[2, 1, 4, 3])
        assert_same_gradients(plan, config, tokens_of(config, rows=4))


def read_from_csv(schedule, folder):
    path = folder / "schedule.csv"
    path.write_text(to_csv(schedule))
    return read(path)


@pytest.mark.parametrize("name", db.schedules)
def test_every_schedule_of_the_library_equals_one_process(name):
    schedule = schedule_of(name, devices=4, micro_batches=8)
    plan = plan_of(schedule, LLAMA_TIED, strategy="full")
    assert_same_gradients(plan, LLAMA_TIED, tokens_of(LLAMA_TIED, rows=8, length=6))


@pytest.mark.parametrize("name", ["interleaved", "v-half", "dualpipe-v"])
def test_a_schedule_read_from_a_csv_equals_one_process(name, tmp_path):
    schedule = read_from_csv(schedule_of(name, devices=4, micro_batches=8), tmp_path)
    assert_same_gradients(plan_of(schedule, LLAMA_TIED), LLAMA_TIED, tokens_of(LLAMA_TIED, rows=8, length=6))


@pytest.mark.slow
@pytest.mark.parametrize("form", [lambda schedule: schedule, fused, explicit], ids=["kept", "fused", "explicit"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name", db.schedules)
def test_every_schedule_with_every_recomputation_equals_one_process(name, devices, family, form):
    config = FAMILIES[family]
    schedule = schedule_of(name, devices=devices, micro_batches=2 * devices)
    if not (schedule.explicit_recompute or schedule.fused_recompute):
        schedule = form(schedule)
    for strategy in STRATEGIES[1:]:
        plan = plan_of(schedule, config, strategy=strategy)
        assert_same_gradients(plan, config, tokens_of(config, rows=schedule.micro_batches, length=6))
