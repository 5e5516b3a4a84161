"""Measured costs of user-defined modules: bytes are exact, times are only plausible."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import debubble as db
from debubble.costs import load_units
from debubble.ir import InputError
from debubble.runtime.models.loss import cross_entropy

ROWS, LENGTH, WIDTH = 2, 8, 16
TOKENS = torch.zeros(ROWS, LENGTH + 1, dtype=torch.int64)


class Mlp(nn.Module):
    """Two linear layers with an activation function in between."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(x)))
        return x + y


@pytest.fixture(scope="module")
def model() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(64, WIDTH), Mlp(), Mlp(), nn.Linear(WIDTH, 64))


def test_bytes_of_user_modules_are_exact(model: nn.Sequential) -> None:
    units = db.profile(model, TOKENS, dtype="fp32", repetitions=1).units
    activation = 4 * ROWS * LENGTH * WIDTH

    assert [(unit.type, unit.layer) for unit in units] == [("Embedding", 0), ("Mlp", 0), ("Mlp", 1), ("Linear", 0)]
    assert [unit.static for unit in units] == [
        16 * sum(parameter.numel() for parameter in module.parameters()) for module in model
    ]
    # The input and the output of ReLU, which the second linear layer reads.
    assert [unit.strategies["none"].activation for unit in units[1:3]] == [5 * activation] * 2
    assert [unit.strategies["full"].activation for unit in units[1:3]] == [activation] * 2
    assert all(unit.forward > 0 and unit.backward_input + unit.backward_weight > 0 for unit in units)


def test_measured_modules_are_planned_by_the_command(model: nn.Sequential, tmp_path: Path, json_of: Any) -> None:
    file, rest = tmp_path / "units.json", ("--micro-batches", "4", "--planner", "dapple", "--effort", "0.1")
    units = db.profile(model, TOKENS, repetitions=1, output=file)
    answer = json_of("plan", "--units", str(file), "--devices", "2", *rest)

    assert load_units(file) == units
    assert answer["step_time"] > 0


def test_plans_of_measured_modules_are_in_seconds(model: nn.Sequential, tmp_path: Path, run: Any) -> None:
    units, plan = tmp_path / "units.json", tmp_path / "plan.json"
    db.profile(model, TOKENS, repetitions=1, output=units)
    rest = ("--micro-batches", "4", "--planner", "dapple", "-o", str(plan))
    _, out, _ = run("plan", "--units", str(units), "--devices", "2", *rest)

    assert re.search(r"[\d.]+ (s|ms|µs) per step", out)
    assert db.Plan.load(plan).in_seconds


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_plan_of_measured_modules_runs_in_their_dtype(
    model: nn.Sequential, tmp_path: Path, run: Any, dtype: str
) -> None:
    units, plan = tmp_path / "units.json", tmp_path / "plan.json"
    db.profile(model, TOKENS, dtype=dtype, repetitions=1, output=units)
    run("plan", "--units", str(units), "--devices", "2", "--planner", "dapple", "-o", str(plan))
    assert db.Plan.load(plan).options.dtype == dtype


def test_modules_on_cpus_are_measured_with_one_thread(model: nn.Sequential) -> None:
    before = torch.get_num_threads()
    seen: set[int] = set()

    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.add(torch.get_num_threads())
        return cross_entropy(output, targets)

    torch.set_num_threads(2)
    try:
        db.profile(model, TOKENS, loss=loss, dtype="fp32", repetitions=1)
        assert (seen, torch.get_num_threads()) == ({1}, 2)
    finally:
        torch.set_num_threads(before)


def test_profiling_does_not_change_the_model(model: nn.Sequential) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    db.profile(model, TOKENS, repetitions=1)

    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None and parameter.dtype == torch.float32 for parameter in model.parameters())


def test_modules_with_a_custom_loss_are_measured() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 6 * 6, 10))
    batch = {"inputs": torch.randn(5, 3, 8, 8), "targets": torch.randn(5, 10)}

    def squares(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return ((output - targets) ** 2).sum()

    units = db.profile(model, batch, loss=squares, dtype="fp32", repetitions=1).units

    assert [unit.type for unit in units] == ["Conv2d", "Flatten", "Linear"]
    assert units[0].strategies["full"].activation == 4 * 5 * 3 * 8 * 8


@pytest.mark.parametrize(
    ("model", "arguments", "sentence"),
    [
        (nn.Linear(2, 2), {}, "Only a sequence of modules can be measured"),
        (nn.Sequential(), {}, "The model has no modules to measure."),
        (nn.Sequential(nn.Linear(2, 2)), {"dtype": "int4"}, "The dtype must be one of fp32, bf16, not 'int4'."),
        (nn.Sequential(nn.Linear(2, 2)), {"repetitions": 0}, "Measure with at least 1 repetition, not 0."),
    ],
)
def test_invalid_models_and_arguments_are_refused(model: nn.Module, arguments: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        db.profile(model, TOKENS, **arguments)


def test_a_units_file_in_an_unknown_dtype_is_refused(model: nn.Sequential, tmp_path: Path) -> None:
    file = tmp_path / "units.json"
    db.profile(model, TOKENS, repetitions=1, output=file)
    file.write_text(file.read_text().replace('"bf16"', '"banana"'))
    with pytest.raises(InputError, match="dtype"):
        load_units(file)
