"""Sequences of different lengths: packed micro-batches, a plan per class of steps, and gradients of one process."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import debubble as db
from debubble.ir import InputError
from debubble.plans import ModelOnCluster, Plan
from debubble.runtime import Pipeline
from debubble.training import length_plans as planning
from debubble.training.checks import check
from debubble.training.data.packed import PackedSequences, read_sequences
from debubble.training.length_plans import LengthSteps, classes, length_plans, ranks_of
from debubble.training.options import TrainOptions
from tests.support import gloo_ranks
from tests.support.runtime_cases import LLAMA, assert_gradients, reference_gradients

LONGEST, STEPS = 48, 6


@pytest.fixture(autouse=True, scope="module")
def brief_search() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "EFFORT", 0.1)
        yield


def sequences(count: int = 60, *, replicas: int = 1) -> PackedSequences:
    """Mostly short sequences, as in instruction data."""
    draw = random.Random(0)
    lengths = [min(LONGEST, 4 + int(draw.expovariate(0.08))) for _ in range(count)]
    tokens = [[draw.randrange(LLAMA["vocab_size"]) for _ in range(length)] for length in lengths]
    return PackedSequences(sequences=tokens, micro_batches=4, micro_batch_size=2, replicas=replicas)


def plan_for(cluster: str = "2xCPU", **options: Any) -> Plan:
    return db.plan(
        db.Model.from_hf(LLAMA), db.Cluster.parse(cluster), micro_batches=4, micro_batch_size=2, dtype="fp32",
        sequence_length=LONGEST, planner="dapple", **options,
    )  # fmt: skip


def steps_of(folder: Path) -> LengthSteps:
    data = sequences()
    return LengthSteps(length_plans(plan_for(), data, steps=STEPS, folder=folder), data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


@pytest.fixture(scope="module")
def steps(brief_search: None, folder: Path) -> LengthSteps:
    return steps_of(folder)


def test_micro_batch_is_one_row_of_separate_sequences() -> None:
    data = PackedSequences(sequences=[[5, 6, 7], [8, 9]], micro_batches=1, micro_batch_size=2)
    [row] = data.batch(0, replica=0, ranks=[0])
    assert row["input_ids"].tolist() == [[5, 6, 7, 8, 9]]
    assert row["targets"].tolist() == [[6, 7, -100, 9, -100]]
    assert row["position_ids"].tolist() == [[0, 1, 2, 0, 1]]


def test_an_epoch_has_every_sequence_once() -> None:
    data = sequences(40)
    lengths = [length for step in range(5) for row in data.lengths(step) for length in row]
    assert sorted(lengths) == sorted(map(len, data.sequences))


def test_replicas_have_different_micro_batches_of_a_step() -> None:
    data = sequences(replicas=2)
    tokens = [data.batch(0, replica=replica, ranks=range(4)) for replica in (0, 1)]
    counted = [[int((row["targets"] != -100).sum()) for row in rows] for rows in tokens]
    assert counted == [[sum(row) - 2 for row in data.lengths(0)[replica::2]] for replica in (0, 1)]
    assert [row["input_ids"].shape for row in tokens[0]] == [row["input_ids"].shape for row in tokens[1]]


def test_size_class_fits_all_its_steps() -> None:
    data = sequences()
    size_classes = classes(plan_for(), data, steps=STEPS)
    assert 1 < len(size_classes) <= planning.MAX_CLASSES
    for step in range(STEPS):
        tokens = [sum(row) / (2 * LONGEST) for row in data.lengths(step)]
        assert any(all(t <= size.tokens for t, size in zip(tokens, sizes, strict=True)) for sizes in size_classes)


def test_step_uses_the_fastest_plan_that_fits(steps: LengthSteps) -> None:
    times = [float(plan.simulate().makespan) for plan in steps.plans]
    assert times == sorted(times)
    chosen = {steps.plans.index(steps.plan_of(step * 8)) for step in range(STEPS)}
    assert len(chosen) > 1


def test_longest_micro_batch_is_in_its_planned_position(steps: LengthSteps) -> None:
    for step in range(STEPS):
        plan = steps.plan_of(step * 8)
        rows = steps.sequences.batch(step, replica=0, ranks=ranks_of(plan))
        lengths = [row["input_ids"].shape[1] for row in rows]
        scale = plan.costs.micro_batch_scale
        assert scale is not None
        assert all(length <= round(2 * LONGEST * share) for length, share in zip(lengths, scale, strict=True))
        assert ranks_of(plan)[lengths.index(max(lengths))] == 0


def test_existing_plans_are_reused(steps: LengthSteps, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_planned", None)
    assert [plan.schedule for plan in steps_of(folder).plans] == [plan.schedule for plan in steps.plans]


def test_lengths_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    plan = plan_for()
    tight = plan_for(memory_limit=str(round(float(max(plan.simulate().peak_memory)) * 1.01)))
    full = PackedSequences(sequences=[[1] * LONGEST] * 8, micro_batches=4, micro_batch_size=2)
    assert len(length_plans(tight, full, steps=1, folder=tmp_path)) == 1
    assert tight.model_on_cluster is not None
    model, cluster = tight.model_on_cluster
    static = max(map(float, tight.costs.static))
    smaller = replace(tight, model_on_cluster=ModelOnCluster(model, cluster.with_limit(1.001 * static)))
    with pytest.raises(InputError, match="does not fit the plan's memory limit"):
        length_plans(smaller, full, steps=1, folder=tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text", "is not readable: give JSON lines with `input_ids`"),
        ('{"input_ids": []}', "has no sequence, or an empty one"),
        ('{"input_ids": [1, 2, 3, 4]}', "has a sequence of 4 tokens, but the plan's have at most 3"),
        ('{"input_ids": [7]}', "has tokens that are not in the model's vocabulary of 7"),
    ],
)
def test_file_without_lengths_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "data.jsonl").write_text(content)
    with pytest.raises(InputError, match=message):
        read_sequences(tmp_path / "data.jsonl", longest=3, vocabulary=7)


def gradients_by_step(rank: int, folder: Path, plans: list[Path], data: PackedSequences) -> None:
    """Gradients of every step by the plan of its class, with its peak and planned bytes, saved by rank."""
    steps, answers = LengthSteps([Plan.load(path) for path in plans], data), []
    pipeline = Pipeline(None, steps.plans[0])
    pipeline.measured.every_step = True
    for first in range(0, STEPS * data.per_step, data.per_step):
        plan = steps.plan_of(first)
        if plan is not pipeline.plan:
            pipeline.switch_plan(plan)
        rows = data.per_step // data.replicas
        loss = pipeline.step(steps.batch(first + pipeline.ranks.replica * rows, count=rows))
        gradients = {name: p.grad for name, p in pipeline.named_parameters()}
        device = pipeline.device
        planned = float(plan.simulate().peak_memory[device] - plan.costs.static_of(device))
        answers.append((loss, gradients, pipeline.measured.peak_activation, planned))
        for parameter in pipeline.parameters():
            parameter.grad = None
    torch.save(answers, folder / f"rank{rank}.pt")


def on_two_ranks(folder: Path, *, dtype: str = "fp64", replicas: int = 1) -> list[Any]:
    """Answers of both ranks by step, for a pipeline of two or for two replicas."""
    paths, data = [], sequences(replicas=replicas)
    for number, plan in enumerate(length_plans(plan_for(data=replicas), data, steps=STEPS, folder=folder)):
        paths.append(folder / f"plan{number}.json")
        replace(plan, options=replace(plan.options, dtype=dtype)).save(paths[-1])
    answers = gloo_ranks.spawn(2, gradients_by_step, paths, data)
    return [*zip(*(torch.load(answers / f"rank{rank}.pt") for rank in range(2)), strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_two_ranks_match_gradients_of_one_process(tmp_path: Path, replicas: int) -> None:
    data = sequences(replicas=replicas)
    for step, ranks in enumerate(on_two_ranks(tmp_path, replicas=replicas)):
        rows = [row for replica in range(replicas) for row in data.batch(step, replica=replica, ranks=range(4))]
        alone = [batch for row in rows for batch in unpacked(row) if bool((batch["targets"] != -100).any())]
        expected_loss, expected = reference_gradients(LLAMA, alone, micro_batches=8 * replicas)
        for loss, gradients, _, _ in ranks:
            torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
            assert_gradients(gradients, expected, relative=1e-10)


def unpacked(row: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The sequences of a packed row, one by one; padding has no targets."""
    begins = [*(row["position_ids"][0] == 0).nonzero().flatten().tolist(), row["input_ids"].shape[1]]
    return [
        {name: row[name][:, begin:end].contiguous() for name in ("input_ids", "targets")}
        for begin, end in itertools.pairwise(begins)
    ]


@pytest.mark.slow
def test_no_device_holds_more_than_the_plan_of_its_step(tmp_path: Path) -> None:
    peaks = [(peak, planned) for ranks in on_two_ranks(tmp_path, dtype="fp32") for _, _, peak, planned in ranks]
    # Also with equal lengths a token takes 24 bytes more than planned: 1% of this small model's activations.
    assert all(peak <= 1.02 * planned for peak, planned in peaks), peaks


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": Path("text.txt")}, "--lengths does not go with --data"),
        ({"online": True}, "--lengths does not go with --online"),
        ({"post_validation": True}, "does not go with a plan for --post-validation|need .* more than the plan has"),
        ({"lengths": None}, "give the sequences with --lengths, or plan without"),
    ],
)
def test_options_that_conflict_with_lengths_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    plan_for(lengths={LONGEST: 1, 8: 9}).save(tmp_path / "plan.json")
    (tmp_path / "data.jsonl").write_text('{"input_ids": [1, 2, 3]}')
    options = {"plan": tmp_path / "plan.json", "lengths": tmp_path / "data.jsonl", **changes}
    with pytest.raises(InputError, match=message):
        check(TrainOptions(**options))


@pytest.mark.slow
def test_train_accepts_sequences_of_different_lengths(run: Any, forked_processes: None, tmp_path: Path) -> None:
    # One device has a single order, so there is no search.
    plan_for("1xCPU").save(tmp_path / "plan.json")
    lines = [json.dumps({"input_ids": tokens}) for tokens in sequences().sequences]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    code, out, err = run(
        "train", str(tmp_path / "plan.json"), "--lengths", str(tmp_path / "data.jsonl"), "--steps", "2", "--json",
        "--checkpoint", str(tmp_path / "run"),
    )  # fmt: skip
    assert code == 0, err
    assert len(json.loads(out)["losses"]) == 2
