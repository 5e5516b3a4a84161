"""Checkpoints hold all optimizer states: a resumed run is bitwise identical."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import debubble as db
from debubble.ir import InputError
from debubble.runtime import Pipeline
from debubble.training.checkpoint import folder as checkpoint_folder
from debubble.training.checkpoint.saver import Saver
from debubble.training.checkpoint.state import GROUP_MARK, initialize_states, state_of
from debubble.training.options import TrainOptions
from debubble.training.resume import load
from tests.support.runtime_cases import LLAMA, plan_of, run_threads
from tests.support.training_cases import train_alone


class EightBits(Optimizer):
    """Momentum as codes with a scale per row, and a step count that is a Python number."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                rows = parameter.grad.reshape(len(parameter), -1)
                if not state:
                    state["step"], state["codes"] = 0, torch.zeros(rows.numel(), dtype=torch.int8)
                    state["scales"] = torch.zeros(len(rows))
                state["step"] += 1
                momentum = state["codes"].view_as(rows) * state["scales"][:, None]
                momentum = momentum.lerp(rows, 0.1 + 0.9 / state["step"])
                state["scales"].copy_(momentum.abs().amax(1) / 127)
                state["codes"].copy_((momentum / state["scales"].clamp(min=1e-30)[:, None]).round().flatten())
                parameter -= group["lr"] * momentum.view_as(parameter)


class CountingGroups(Optimizer):
    """Adam that keeps its step count and a sum of learning rates in its groups, as schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "k": 0, "sum": 0, "begun": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"], group["sum"], group["begun"] = group["k"] + 1, group["sum"] + group["lr"], True
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                state["mean"].lerp_(parameter.grad, 0.1)
                state["square"].lerp_(parameter.grad**2, 0.01)
                size = (state["square"] / (1 - 0.99 ** group["k"])).sqrt() + 1e-8
                parameter -= group["sum"] / group["k"] * state["mean"] / (1 - 0.9 ** group["k"]) / size


@pytest.fixture
def options(options: TrainOptions) -> TrainOptions:
    return replace(options, steps=4, warmup=1)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param("momentum", marks=pytest.mark.slow),
        pytest.param("torch.optim:Adafactor", marks=pytest.mark.slow),
        f"{__name__}:EightBits",
        f"{__name__}:CountingGroups",
    ],
    ids=["momentum", "adafactor", "8 bits", "counting groups"],
)
def test_resumed_run_is_bitwise_identical(optimizer: str, options: TrainOptions, tmp_path: Path) -> None:
    options = replace(options, optimizer=optimizer)
    uninterrupted = train_alone(options)
    checkpoints = tmp_path / "checkpoints"
    train_alone(replace(options, checkpoint=checkpoints, save_every=2, keep=9))
    checkpoint_folder.latest(checkpoints).rename(tmp_path / "later")
    resumed = train_alone(replace(options, checkpoint=checkpoints, resume=True))
    assert [r.loss for r in resumed.reports] == [r.loss for r in uninterrupted.reports][2:]


def states(plan: db.Plan) -> list[dict[str, Any]]:
    """Tensors that each rank saves, by name."""

    def state_dict(pipeline: Pipeline) -> dict[str, Any]:
        return dict(state_of(pipeline))

    answers: list[dict[str, Any]] = run_threads(plan, state_dict, ranks=plan.ranks, optimizer=EightBits)
    return answers


@pytest.mark.usefixtures("process_group")
def test_8_bit_states_resume_only_with_the_same_sharding(tmp_path: Path) -> None:
    schedule = db.schedules["1f1b"](devices=1, micro_batches=2)
    (state,) = states(plan_of(schedule, LLAMA, dtype="fp32"))
    first, last = states(plan_of(db.schedules["1f1b"](devices=2, micro_batches=2), LLAMA, dtype="fp32"))
    assert {**first, **last}.keys() == state.keys()
    saver = Saver(tmp_path, keep=1)
    saver.save(state, checkpoint_folder.RunProgress(step=1, samples=0, seed=0, model=LLAMA))
    saver.wait()
    checkpoint = checkpoint_folder.latest(tmp_path)
    load(checkpoint, first)
    (divided, _) = states(plan_of(schedule, LLAMA, tensor=2, dtype="fp32"))
    with pytest.raises(InputError, match=r"have a form of their own \(8 bits\), which is not divided anew: resume"):
        load(checkpoint, divided)


def test_states_are_created_without_changing_parameters() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.5)
    initialize_states(optimizer)
    made: dict[str, Tensor] = optimizer.state[parameter]
    assert {name: tensor.shape for name, tensor in made.items() if tensor.dim()} == {
        "exp_avg": (3, 2), "exp_avg_sq": (3, 2)
    }  # fmt: skip
    assert torch.equal(parameter, torch.ones(3, 2))
    assert parameter.grad is None


def test_creating_states_does_not_change_group_counters() -> None:
    optimizer = CountingGroups([torch.nn.Parameter(torch.ones(2)) for _ in range(3)])
    initialize_states(optimizer)
    (group,) = optimizer.param_groups
    assert (group["k"], group["sum"], group["begun"]) == (0, 0, False)


def test_group_counters_resume_on_another_pipeline() -> None:
    schedule = db.schedules["1f1b"](devices=2, micro_batches=2)

    def stepped(pipeline: Pipeline) -> dict[str, float]:
        for optimizer in pipeline.optimizers:
            optimizer.step()
        return {name: float(piece.tensor) for name, piece in state_of(pipeline).items() if GROUP_MARK in name}

    answers = run_threads(plan_of(schedule, LLAMA, dtype="fp32"), stepped, ranks=2, optimizer=CountingGroups)
    actual = {name: value for answer in answers for name, value in answer.items()}
    (alone,) = run_threads(
        plan_of(db.schedules["1f1b"](devices=1, micro_batches=2), LLAMA, dtype="fp32"), stepped, ranks=1,
        optimizer=CountingGroups,
    )  # fmt: skip
    assert actual == alone
    assert {value for name, value in actual.items() if name.endswith(".group.k")} == {1.0}
