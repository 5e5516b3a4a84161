"""Random numbers and state of custom modules: a recomputation gives what the forward gave."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from torch import nn

import debubble as db
from debubble.ir import InputError
from debubble.runtime import Pipeline
from debubble.runtime.distributed.transport import SingleProcessTransport
from tests.runtime.test_modules import Checkpointed, plan_for
from tests.support.runtime_cases import gradients_alone

WIDTH = 8


class Residual(nn.Module):
    """A linear layer, and a function of its output that is added to it."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layer, self.body = nn.Linear(WIDTH, WIDTH), make()

    def forward(self, x: Any) -> Any:
        x = self.layer(x)
        y = self.body(x)
        return x + (y[0] if isinstance(y, tuple) else y)


class Calls(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.attention(x, x, x, need_weights=False)


class Transposed(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Any) -> Any:
        return self.module(x.transpose(1, 2)).transpose(1, 2)


class Counts(nn.Module):
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return x * self.calls.clone()


def function(body: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    return lambda: Calls(body)


RANDOM: dict[str, Callable[[], nn.Module]] = {
    "MultiheadAttention": Attends,
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.5, batch_first=True),
    "LSTM": lambda: nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.5, batch_first=True),
    "Dropout1d": lambda: nn.Dropout1d(0.5),
    "AlphaDropout": lambda: nn.AlphaDropout(0.5),
    "RReLU": lambda: nn.RReLU(0.1, 0.9),
    "gumbel_softmax": function(lambda x: x * functional.gumbel_softmax(x)),
    "torch.dropout": function(lambda x: torch.dropout(x, 0.5, True)),
    "attention": function(lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)),
    "randperm": function(lambda x: x[:, torch.randperm(x.shape[1])]),
    "normal": function(lambda x: x * torch.normal(0.0, 1.0, x.shape)),
    "random_": function(lambda x: x * torch.empty_like(x).random_(0, 2)),
    "python": function(lambda x: x * random.random()),
    "numpy": function(lambda x: x * float(np.random.rand())),
}
STATEFUL: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm": lambda: Transposed(nn.BatchNorm1d(WIDTH)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "counter": Counts,
}


def sequence(make: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(19, WIDTH), Residual(make), Residual(make), nn.Linear(WIDTH, 19)).double()


def tokens() -> Any:
    return torch.randint(0, 19, (4, 6), generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, *, strategy: str = "none") -> tuple[float, dict[str, Any]]:
    """Loss, gradients and buffers after a step of two micro-batches."""
    plan = plan_for(db.schedules["gpipe"](devices=1, micro_batches=2), [len(list(model))], strategy=strategy)  # type: ignore[call-overload]
    random.seed(1)
    np.random.seed(1)
    pipeline = Pipeline(model, plan, transport=SingleProcessTransport())
    loss = pipeline.step(tokens())
    gradients = {name: p.grad.clone() for name, p in pipeline.named_parameters() if p.grad is not None}
    return float(loss), gradients | dict(model.named_buffers())


@pytest.mark.parametrize("name", RANDOM)
def test_random_module_recomputes_the_same_numbers(name: str) -> None:
    model = sequence(RANDOM[name])
    loss, gradients = step(copy.deepcopy(model))
    recomputed_loss, recomputed = step(copy.deepcopy(model), strategy="full")
    assert recomputed_loss == loss
    for key, gradient in gradients.items():
        torch.testing.assert_close(recomputed[key], gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("strategy", ["none", "full"])
@pytest.mark.parametrize("name", STATEFUL)
def test_buffers_and_gradients_are_those_of_plain_torch(name: str, strategy: str) -> None:
    model = sequence(STATEFUL[name])
    reference = copy.deepcopy(model)
    for micro_batch in tokens().chunk(2):
        logits = reference(micro_batch[:, :-1]).flatten(0, 1)
        (functional.cross_entropy(logits, micro_batch[:, 1:].flatten(), reduction="sum") / 20).backward()
    _, actual = step(model, strategy=strategy)
    expected = {key: p.grad for key, p in reference.named_parameters()} | dict(reference.named_buffers())
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value, rtol=1e-12, atol=1e-14)


def test_step_does_not_change_random_generators() -> None:
    before = torch.get_rng_state(), random.getstate()
    model = sequence(RANDOM["AlphaDropout"])
    torch.set_rng_state(before[0])
    pipeline = Pipeline(
        model,
        plan_for(db.schedules["gpipe"](devices=1, micro_batches=2), [4], strategy="full"),
        transport=SingleProcessTransport(),
    )
    pipeline.step(tokens())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


class Forgets(nn.Module):
    """Its state is a Python number, which cannot be restored."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return torch.tanh(x * self.calls)


def test_non_buffer_state_is_refused_with_recomputation() -> None:
    step(sequence(Forgets))
    with pytest.raises(InputError, match="Residual computes something else when it is called again"):
        step(sequence(Forgets), strategy="full")


class CountsLate(Counts):
    def forward(self, x: Any) -> Any:
        if float(x.detach().abs().sum()) >= 0 and self.late:
            return super().forward(x)
        self.late = True
        return x

    late = False


def test_a_buffer_that_changes_late_is_refused() -> None:
    with pytest.raises(InputError, match=r"changes its buffer 'body.calls' in some forwards alone"):
        step(sequence(CountsLate), strategy="full")


@pytest.mark.parametrize("strategy", ["none", "full"])
def test_a_module_may_occur_twice_in_a_sequence(strategy: str) -> None:
    torch.manual_seed(0)
    shared = nn.Tanh()
    layers = [nn.Linear(WIDTH, WIDTH), shared, nn.Linear(WIDTH, WIDTH), shared]
    model = nn.Sequential(nn.Embedding(19, WIDTH), *layers, nn.Linear(WIDTH, 19)).double()
    expected, _ = gradients_alone(model, tokens())
    loss, _ = step(model, strategy=strategy)
    assert loss == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("strategy", ["none", "full"])
def test_a_module_may_change_its_input_in_place(strategy: str) -> None:
    model = sequence(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)))
    model.insert(1, nn.ReLU(inplace=True))
    _, expected = gradients_alone(model, tokens())
    _, actual = step(model, strategy=strategy)
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-12, atol=1e-14)


def test_a_saved_tensor_that_changes_in_place_is_refused() -> None:
    model = sequence(function(lambda x: torch.tanh(x).add_(1.0)))
    with pytest.raises(InputError, match="changed in place after an operator had saved it"):
        step(model)


@pytest.mark.parametrize(("reentrant", "strategy"), [(False, "none"), (True, "full")])
def test_checkpointed_submodule_may_have_dropout(reentrant: bool, strategy: str) -> None:
    def inner() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))

    plain, wrapped = sequence(inner), sequence(inner)
    for residual in (wrapped[1], wrapped[2]):
        assert isinstance(residual, Residual)
        residual.body = Checkpointed(residual.body, reentrant=reentrant)
    loss, expected = step(plain)
    actual_loss, actual = step(wrapped, strategy=strategy)
    assert actual_loss == loss
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name.replace("body", "body.module")], gradient, rtol=1e-12, atol=1e-14)
