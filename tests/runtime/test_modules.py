"""Pipelines of custom modules have the loss and gradients of plain autograd in one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import debubble as db
from debubble.ir import InputError, PlannedUnit, RunOptions, StageCosts
from debubble.plans import Plan
from debubble.runtime import Pipeline
from debubble.runtime.memory.activations import Ledger
from debubble.runtime.models.modules import ModuleUnit
from debubble.runtime.models.stage import Stage
from debubble.runtime.models.units import MicroBatch
from tests.support.runtime_cases import (
    assert_gradients,
    gradients_alone,
    gradients_of,
    loss_and_gradients,
    run_threads,
)
from tests.support.schedule_cases import recomputing

VOCABULARY, WIDTH = 19, 8


class Twice(nn.Module):
    """Uses a parameter twice, one never, a frozen one, and one that is computed from another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(3, 3)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Any) -> Any:
        return self.layer(torch.tanh(self.layer(x))) + self.frozen(x) + self.normed(x) * x


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


def sequential(*, dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), Attention(), nn.GELU(), Twice(), nn.Dropout(dropout), Attention(),
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, VOCABULARY),
    ).double()  # fmt: skip


def plan_for(schedule: Any, counts: Any, *, strategy: str = "none", **options: Any) -> Any:
    """A plan of abstract units with these counts per stage; with a strategy they recompute."""
    schedule = schedule if strategy == "none" else recomputing(schedule)
    return Plan(
        planner="test",
        schedule=schedule,
        costs=StageCosts.of(stages=schedule.stages, offload=1),
        lower_bound=0,
        partition=tuple(tuple(PlannedUnit("dense", i, strategy) for i in range(count)) for count in counts),
        options=RunOptions(dtype="fp64", **options),
    )


def tokens() -> Any:
    return torch.randint(0, VOCABULARY, (4, 7), generator=torch.Generator().manual_seed(1))


def step(model: Any, plan: Any, **arguments: Any) -> Any:
    """Loss and gradients of the pipeline."""
    return gradients_of(plan, tokens(), model=model, **arguments)


def check(model: Any, plan: Any) -> None:
    loss, expected = gradients_alone(model, tokens())
    actual_loss, gradients = step(model, plan)
    torch.testing.assert_close(actual_loss, loss, rtol=1e-12, atol=0)
    assert expected.keys() - gradients.keys() <= {"7.weight"}  # of a tied table, the first name
    reached = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    assert gradients.keys() - reached.keys() == {name for name in gradients if expected[name] is None}
    assert_gradients(reached, expected)


@pytest.mark.parametrize(
    ("name", "devices", "counts", "strategy"),
    [("1f1b", 2, [3, 5], "full"), ("zb-h1", 3, [2, 3, 3], "none"), ("pipeoffload", 2, [2, 2, 2, 2], "full")],
)
def test_gradients_are_those_of_plain_autograd(name: str, devices: int, counts: Any, strategy: str) -> None:
    schedule = db.schedules[name](devices=devices, micro_batches=4)
    check(sequential(), plan_for(schedule, counts, strategy=strategy))


def test_split_backward_defers_linear_weight_gradients() -> None:
    module = Attention().double()
    planned, ledger = PlannedUnit("dense", 0), Ledger()
    stage = Stage([ModuleUnit(module, prefix="0.", salt=0)], [planned], ledger)
    x = torch.randn(1, 5, WIDTH, dtype=torch.float64)
    gradient = torch.ones_like(stage.forward(0, x, MicroBatch()))

    stage.backward(0, gradient, split=True)
    assert {n for n, p in module.named_parameters() if p.grad is not None} == {"norm.weight", "norm.bias"}
    stage.backward_weight(0)
    assert all(p.grad is not None for p in module.parameters())


class FourBits(nn.Module):
    """A frozen linear layer with two codes per byte and a scale per row, plus a trained adapter."""

    packed: torch.Tensor
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("packed", torch.randint(0, 256, (WIDTH, WIDTH // 2), dtype=torch.uint8))
        self.register_buffer("scale", torch.rand(WIDTH, 1) / 8)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Any) -> Any:
        codes = torch.stack((self.packed >> 4, self.packed & 15), dim=-1).flatten(1)
        frozen = nn.functional.linear(x, (codes.to(x.dtype) - 8) * self.scale)
        return frozen + self.up(self.down(x))


@pytest.mark.parametrize(("name", "devices", "strategy"), [("1f1b", 2, "full"), ("zb-h1", 4, "none")])
def test_adapters_train_alongside_four_bit_buffers(name: str, devices: int, strategy: str) -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (FourBits(), nn.GELU())]
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *layers, nn.Linear(WIDTH, VOCABULARY)).double()
    schedule = db.schedules[name](devices=devices, micro_batches=4)
    check(model, plan_for(schedule, [8 // devices] * devices, strategy=strategy))


def test_a_model_with_a_list_of_units_runs() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = sequential()

        def pipeline_units(self) -> Any:
            return list(self.body)

        def forward(self, x: Any) -> Any:
            return self.body(x)

    plan = plan_for(db.schedules["1f1b"](devices=2, micro_batches=2), [4, 4])
    loss, _ = step(Model(), plan)
    assert loss == step(sequential(), plan)[0]


def test_shared_table_is_one_parameter_per_device() -> None:
    check(shared(), plan_for(db.schedules["zb-v"](devices=2, micro_batches=4), [2, 2, 3, 1]))


def test_dropout_depends_on_neither_order_nor_recomputation() -> None:
    model = sequential(dropout=0.5)
    alone = step(model, plan_for(db.schedules["gpipe"](devices=1, micro_batches=4), [8]))
    for name, counts, strategy in (("zb-h1", [2, 3, 3], "none"), ("1f1b", [1, 5, 2], "full")):
        loss, gradients = step(
            model, plan_for(db.schedules[name](devices=3, micro_batches=4), counts, strategy=strategy)
        )
        assert loss == alone[0]
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(gradient, alone[1][parameter], rtol=1e-12, atol=1e-15)
    assert alone[0] != step(sequential(), plan_for(db.schedules["gpipe"](devices=1, micro_batches=4), [8]))[0]


def shared() -> Any:
    model = sequential()
    model[7].weight = model[0].weight
    return model


def widening() -> Any:
    model = sequential()
    model[2], model[3] = nn.Linear(WIDTH, 2 * WIDTH).double(), nn.Linear(2 * WIDTH, WIDTH).double()
    return model


@pytest.mark.parametrize(
    ("make", "counts", "options", "message"),
    [
        (sequential, [3, 4], {}, "The model has 8 modules, but the plan's stages have 7 units"),
        (nn.Identity, [4, 4], {}, "an nn.Sequential or has `pipeline_units"),
        (shared, [4, 4], {}, "Devices 0, 1 share the parameter '0.weight'"),
        (sequential, [4, 4], {"strategy": "norm"}, "in full or not at all, not 'norm'"),
        (sequential, [4, 4], {"lora": 2}, "neither tensor parallelism nor LoRA"),
    ],
)
def test_modules_that_do_not_fit_the_plan_are_refused(make: Any, counts: Any, options: Any, message: str) -> None:
    plan = plan_for(db.schedules["1f1b"](devices=2, micro_batches=2), counts, **options)
    with pytest.raises(InputError, match=message):
        step(make(), plan)


def test_stage_outputs_of_different_shapes_are_refused() -> None:
    plan = plan_for(db.schedules["1f1b"](devices=3, micro_batches=2), [2, 1, 5])
    with pytest.raises(InputError, match=r"shapes \[2, 6, 8\] and \[2, 6, 16\]"):
        step(widening(), plan)


def test_custom_modules_cannot_be_saved_as_hugging_face(tmp_path: Path) -> None:
    plan = plan_for(db.schedules["gpipe"](devices=1, micro_batches=2), [8])
    with pytest.raises(InputError, match="Modules of your own are no Hugging Face model"):
        Pipeline(sequential(), plan).save_pretrained(tmp_path)


def test_mixed_precision_trains_copies_in_bf16() -> None:
    plan = plan_for(db.schedules["1f1b"](devices=2, micro_batches=2), [4, 4])
    plan = replace(plan, options=replace(plan.options, dtype="bf16"))
    loss, gradients = step(sequential().float(), plan)
    torch.testing.assert_close(loss, step(sequential().float(), replace(plan, options=RunOptions(dtype="fp32")))[0],
                               rtol=2e-2, atol=0)  # fmt: skip
    assert all(g.dtype is torch.float32 for g in gradients.values() if g is not None)


class Scaled(nn.Module):
    """Holds a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(WIDTH, WIDTH), torch.full((WIDTH,), 0.5, dtype=torch.float64)

    def forward(self, x: Any) -> Any:
        return self.layer(x) * self.scale


def test_a_module_may_hold_plain_tensors() -> None:
    check(
        nn.Sequential(*sequential()[:2], Scaled().double(), *sequential()[-2:]),
        plan_for(db.schedules["1f1b"](devices=2, micro_batches=4), [3, 2]),
    )


class Checkpointed(nn.Module):
    def __init__(self, module: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.module, self.reentrant = module, reentrant

    def forward(self, x: Any) -> Any:
        return checkpoint(self.module, x, use_reentrant=self.reentrant)


def checkpointed(*, reentrant: bool) -> Any:
    inner = nn.Sequential(Attention(), nn.Linear(WIDTH, WIDTH)).double()
    outer = sequential()
    return nn.Sequential(outer[0], outer[1], Checkpointed(inner, reentrant=reentrant), *outer[-2:])


@pytest.mark.parametrize(("reentrant", "strategy"), [(False, "full"), (True, "none")])
def test_module_may_checkpoint_a_submodule(reentrant: bool, strategy: str) -> None:
    schedule = db.schedules["zb-h1"](devices=2, micro_batches=4)
    check(checkpointed(reentrant=reentrant), plan_for(schedule, [3, 2], strategy=strategy))


def test_autocast_matches_a_single_process() -> None:
    model = sequential().float()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens()[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens()[:, 1:].flatten())
    loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    plan = plan_for(db.schedules["zb-h1"](devices=2, micro_batches=4), [3, 5], strategy="full")
    plan = replace(plan, options=replace(plan.options, dtype="fp32"))

    def one(pipeline: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            loss = pipeline.step(tokens())
        return loss, {name: p.grad for name, p in pipeline.named_parameters() if p.grad is not None}

    for actual_loss, gradients in run_threads(plan, one, model=model):
        torch.testing.assert_close(actual_loss, loss.detach(), rtol=1e-3, atol=0)
        for name, gradient in gradients.items():
            assert gradient.dtype == torch.float32
            # bf16 has an 8-bit significand, and micro-batches are rounded separately.
            assert (gradient - expected[name]).norm() <= 2e-2 * expected[name].norm(), name


def compiled(*, dropout: float = 0.0) -> tuple[Any, list[Any]]:
    """The model with two compiled modules, one of them in place, and the compiled graphs."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    model = sequential()
    model[5] = torch.compile(nn.Sequential(Attention(), nn.Dropout(dropout)).double(), backend=backend)
    model[1].compile(backend=backend)
    return model, graphs


def step_alone(model: Any, name: str, strategy: str) -> Any:
    """Loss, gradients and peak activations on one device with two stages."""
    plan = plan_for(db.schedules[name](devices=1, micro_batches=2, **CHUNKS.get(name, {})), [5, 3], strategy=strategy)
    pipeline = Pipeline(model, plan)
    return *loss_and_gradients(pipeline, tokens()), pipeline.measured.peak_activation


CHUNKS: dict[str, Any] = {"interleaved": {"chunks": 2}}


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo's own
@pytest.mark.parametrize(
    ("name", "strategy"), [("zb-v", "none"), pytest.param("interleaved", "full", marks=pytest.mark.slow)]
)
def test_compiled_modules_train_as_they_do_uncompiled(name: str, strategy: str) -> None:
    """Compiled backwards compute weight gradients with the input's, so W is empty; saved tensors are counted."""
    model, graphs = compiled()
    with torch.compiler.set_stance("force_eager"):
        loss, gradients = gradients_alone(model, tokens())
    expected = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    actual_loss, actual, peak = step_alone(model, name, strategy)
    assert len(graphs) >= 2
    torch.testing.assert_close(actual_loss, loss, rtol=1e-12, atol=0)
    assert expected.keys() == {name for name, gradient in actual.items() if gradient is not None}
    assert_gradients({name: actual[name] for name in expected}, expected)
    assert peak > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_dropout_of_compiled_modules_is_seeded_by_micro_batch() -> None:
    unrecomputed, (loss, gradients, _) = (
        step_alone(compiled(dropout=0.5)[0], "interleaved", strategy) for strategy in ("none", "full")
    )
    torch.testing.assert_close(loss, unrecomputed[0], rtol=1e-12, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, unrecomputed[1][name], rtol=1e-12, atol=1e-15)
    assert unrecomputed[0] != step_alone(compiled()[0], "interleaved", "none")[0]
