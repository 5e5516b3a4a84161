"""Optimizers of `debubble train` by name or class, and learning rates compared with torch's schedules."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

import debubble as db
from debubble.ir import InputError
from debubble.plans import Plan
from debubble.training.checks import check
from debubble.training.optimizer import check_optimizer, learning_rate, set_learning_rate
from debubble.training.options import TrainOptions, maker_of
from tests.support.runtime_cases import LLAMA, plan_of, run_threads
from tests.support.training_cases import train_alone

PEAK, WARMUP, STEPS = 0.8, 4, 21


def torch_rates(*schedules: tuple[int, Any]) -> list[float]:
    """Rates of torch's schedules in sequence, given as the steps and constructor of each."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=PEAK)
    made: list[LRScheduler] = [make(optimizer) for _, make in schedules]
    ends = [sum(steps for steps, _ in schedules[: i + 1]) for i in range(len(schedules) - 1)]
    schedule, rates = SequentialLR(optimizer, made, milestones=ends), []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def warm_up(optimizer: Any) -> LRScheduler:
    return LinearLR(optimizer, start_factor=1 / WARMUP, total_iters=WARMUP - 1)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("cosine", [(4, warm_up), (17, lambda o: CosineAnnealingLR(o, T_max=16, eta_min=0.1 * PEAK))]),
        ("linear", [(4, warm_up), (17, lambda o: LinearLR(o, 1.0, 0.1, total_iters=16))]),
        ("constant", [(4, warm_up), (17, lambda o: ConstantLR(o, factor=1.0))]),
    ],
)
def test_rates_match_torchs_schedules(name: str, parts: Any) -> None:
    rates = [learning_rate(step, peak=PEAK, warmup=WARMUP, steps=STEPS, schedule=name) for step in range(STEPS)]
    assert rates == pytest.approx(torch_rates(*parts), rel=1e-12)


def test_warm_up_stable_decay_decays_in_the_last_fifth() -> None:
    rates = [learning_rate(step, peak=1.0, warmup=0, steps=11, schedule="wsd") for step in range(11)]
    assert rates == pytest.approx([1.0] * 9 + [0.55, 0.1], rel=1e-12)
    assert learning_rate(99, peak=1.0, warmup=2, steps=10) == pytest.approx(0.1)  # It stays at the minimum rate.


@pytest.fixture
def options(options: TrainOptions) -> TrainOptions:
    return replace(options, steps=3, warmup=1)


def planned_for(optimizer: str, options: TrainOptions) -> TrainOptions:
    """The options with their plan made for another optimizer."""
    plan, path = Plan.load(options.plan), options.plan.with_name(f"{optimizer}.json")
    replace(plan, options=replace(plan.options, optimizer=optimizer)).save(path)
    return replace(options, plan=path)


@pytest.mark.usefixtures("process_group")
def test_an_optimizer_is_named_by_its_class_and_its_arguments(options: TrainOptions) -> None:
    named = replace(options, optimizer="torch.optim:AdamW", optimizer_settings={"betas": [0.9, 0.95], "fused": True})
    usual = train_alone(options)
    assert [r.loss for r in train_alone(named).reports] == [r.loss for r in usual.reports]
    other = train_alone(replace(options, optimizer="torch.optim:Adamax"))
    assert other.reports[-1].loss != usual.reports[-1].loss


@pytest.mark.parametrize("name", ["adam", "momentum", "sgd"])
def test_planned_optimizer_is_used(name: str, options: TrainOptions) -> None:
    options = planned_for(name, options)
    make = maker_of(options, check(options))
    optimizer = make([nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))])
    assert type(optimizer) is {"adam": torch.optim.Adam}.get(name, torch.optim.SGD)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [options.weight_decay, 0.0]
    assert optimizer.param_groups[0].get("momentum", 0) == (0.9 if name == "momentum" else 0)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"lr_schedule": "step"}, "must be one of cosine, linear, constant, wsd, not 'step'"),
        ({"optimizer": "adamwx"}, "There is no optimizer 'adamwx'; did you mean 'adamw'"),
        ({"optimizer": "torch.optim:Nothing"}, "--optimizer torch.optim:Nothing cannot be loaded"),
        ({"optimizer": "torch.nn:Linear"}, "no class of torch's optimizers: give one of adamw, adam"),
        ({"optimizer": "torch.optim:Muon"}, "torch.optim:Muon cannot step a matrix and a vector: Muon only supports"),
        ({"optimizer_settings": {"momentum": 1}}, "cannot step a matrix and a vector: .*'momentum'"),
    ],
)
def test_optimizer_that_cannot_step_is_refused_before_launch(entries: Any, message: str, options: TrainOptions) -> None:
    with pytest.raises(InputError, match=message):
        check(replace(options, **entries))


def test_states_larger_than_planned_are_refused(options: TrainOptions) -> None:
    planned = planned_for("momentum", options)
    with pytest.raises(InputError, match="adamw keeps 8 bytes per parameter, but the plan counts 4 for momentum"):
        check(replace(planned, optimizer="adamw"))


def test_missing_torch_optimizer_is_reported(options: TrainOptions) -> None:
    with pytest.raises(
        InputError, match=r"has no lion, .* --optimizer module:Class, or plan with --optimizer adamw or"
    ):
        check(planned_for("lion", options))


class Codes(torch.Tensor):
    """8-bit numbers that appear as 32-bit ones, as in torchao."""

    codes: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def from_codes(cls, codes: torch.Tensor, scales: torch.Tensor) -> "Codes":
        state = codes.float().as_subclass(cls)
        state.codes, state.scales = codes, scales
        return state

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scales"], []


class InEightBits(torch.optim.Optimizer):
    """Keeps two moments in 8 bits with a scale per 256 numbers; small parameters in 32 bits."""

    wrapped = False

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            codes = torch.zeros_like(parameter, dtype=torch.uint8 if parameter.numel() > 4096 else torch.float32)
            scales = torch.zeros(-(-parameter.numel() // 256))
            state = self.state[parameter]
            for moment in ("first", "second"):
                if self.wrapped:
                    state[moment] = Codes.from_codes(codes, scales)
                else:
                    state[moment], state[f"{moment} scales"] = codes, scales


class Wrapped(InEightBits):
    wrapped = True


@pytest.mark.parametrize("kind", [InEightBits, Wrapped])
def test_states_in_eight_bits_are_counted_as_such(kind: Any) -> None:
    check_optimizer("mine:Eight", kind, planned="adamw-8bit")
    with pytest.raises(InputError, match=r"keeps 2\.03 bytes per parameter, but the plan counts 0 for sgd"):
        check_optimizer("mine:Eight", kind, planned="sgd")


class Remembering(InEightBits):
    """Keeps a value that no checkpoint can hold."""

    def step(self, closure: Any = None) -> Any:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.state[parameter]["history"] = []


def test_states_that_no_checkpoint_holds_are_refused() -> None:
    check_optimizer("mine:Remembering", Remembering, planned="sgd")
    with pytest.raises(InputError, match="keeps history, which is no tensor and no number"):
        check_optimizer("mine:Remembering", Remembering, planned="sgd", saved=True)


def test_tensor_learning_rate_stays_the_same_tensor() -> None:
    """Optimizers with a compiled step read the tensor itself."""
    rate = torch.tensor(0.5)
    plan = plan_of(db.schedules["1f1b"](devices=1, micro_batches=1), LLAMA)
    (pipeline,) = run_threads(plan, lambda p: p, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate))
    set_learning_rate(pipeline, 0.25)
    assert float(rate) == 0.25
    assert pipeline.optimizers[0].param_groups[0]["lr"] is rate
