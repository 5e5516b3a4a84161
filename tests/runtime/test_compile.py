"""Compiled units have the gradients of uncompiled ones, share graphs of identical layers and are counted in memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import debubble as db
from debubble.ir import InputError
from debubble.runtime import Pipeline
from tests.support import gloo_ranks
from tests.support.generic_cases import GENERIC
from tests.support.runtime_cases import (
    assert_gradients,
    gradients_of,
    loss_and_gradients,
    plan_of,
    reference_gradients,
    run_threads,
    tokens_of,
)
from tests.support.tiny_models import FAMILIES, GEMMA2, LLAMA, MIXTRAL, with_layers

pytestmark = pytest.mark.filterwarnings(  # dynamo's own
    "ignore:The .grad attribute", "ignore:.*should not be instantiated:DeprecationWarning"
)

ROWS, LENGTH = 4, 12
SMALL = with_layers(LLAMA, 2)


@pytest.fixture(autouse=True)
def fresh_caches() -> None:
    torch._dynamo.reset()
    counters.clear()


def step_alone(plan: Any, *, compile: Any, tokens: Any) -> Any:
    """Loss, gradients and peak activations of a step on one device."""

    def one(pipeline: Any) -> Any:
        return *loss_and_gradients(pipeline, tokens), pipeline.measured.peak_activation

    return run_threads(plan, one, compile=compile)[0]


def check_processes(tmp_path: Path, plans: Any, config: Any, backend: str, *, tolerance: float = 1e-12) -> None:
    """Compare ranks in processes with compiled units to one process without."""
    tokens = tokens_of(config, rows=ROWS, length=LENGTH)
    paths = [tmp_path / f"{index}.json" for index in range(len(plans))]
    for plan, path in zip(plans, paths, strict=True):
        plan.save(path)
    (ranks,) = {plan.ranks for plan in plans}
    folder = gloo_ranks.spawn(ranks, gloo_ranks.gradients, paths, [tokens] * len(plans), backend)
    for answers in zip(*(torch.load(folder / f"rank{rank}.pt") for rank in range(ranks)), strict=True):
        actual = {name: gradient for _, gradients, _ in answers for name, gradient in gradients.items()}
        check_gradients(answers[0][0], actual, config, tokens, tolerance=tolerance)


def check_threads(plan: Any, config: Any) -> None:
    """Compare ranks on threads with compiled units to one process without."""
    tokens = tokens_of(config, rows=ROWS, length=LENGTH)
    loss, actual = gradients_of(plan, tokens, compile="aot_eager")
    check_gradients(loss, actual, config, tokens)


def check_gradients(loss: Any, actual: Any, config: Any, tokens: Any, *, tolerance: float = 1e-12) -> None:
    """Compare loss and gradients with those of one process."""
    if config["model_type"] in FAMILIES:
        expected_loss, expected = reference_gradients(config, tokens, micro_batches=4)
    else:
        alone = plan_of(db.schedules["gpipe"](devices=1, micro_batches=4), config)
        expected_loss, expected = gradients_of(alone, tokens)
    assert actual.keys() == expected.keys()
    torch.testing.assert_close(loss, expected_loss, rtol=tolerance, atol=0)
    assert_gradients(actual, expected, relative=tolerance)


def schedule(name: str, devices: int) -> Any:
    return db.schedules[name](devices=devices, micro_batches=4)


def test_compiled_units_have_the_same_gradients() -> None:
    check_threads(plan_of(schedule("zb-v", 2), SMALL, strategy="norm+activation+multiply"), SMALL)


@pytest.mark.slow
def test_two_ranks_split_recompute_and_offload_compiled(tmp_path: Path) -> None:
    plans = [
        plan_of(schedule("zb-v", 2), LLAMA),
        plan_of(schedule("1f1b", 2), LLAMA, strategy="norm+activation+multiply"),
        plan_of(schedule("pipeoffload", 2), LLAMA),
    ]
    check_processes(tmp_path, plans, LLAMA, "aot_eager")


@pytest.mark.slow
def test_two_ranks_run_compiled_transformers_layers() -> None:
    check_threads(plan_of(schedule("1f1b", 2), GENERIC["olmo2"], strategy="full"), GENERIC["olmo2"])


@pytest.mark.slow
@pytest.mark.parametrize("family", [LLAMA, MIXTRAL, GEMMA2, GENERIC["olmo2"]], ids=lambda config: config["model_type"])
def test_two_ranks_train_with_compiled_kernels(tmp_path: Path, family: Any) -> None:
    # transformers' norms compute in fp32, whose roundings differ in fused kernels.
    tolerance = 1e-12 if family["model_type"] in FAMILIES else 1e-5
    check_processes(tmp_path, [plan_of(schedule("1f1b", 2), family)], family, "inductor", tolerance=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("config", [LLAMA, GENERIC["olmo2"]], ids=["own units", "transformers"])
def test_identical_layers_share_compiled_graphs(config: Any) -> None:
    graphs = []
    for layers in (1, 2):
        torch._dynamo.reset()
        counters.clear()
        fewer = with_layers(config, layers)
        tokens = tokens_of(config, rows=ROWS, length=LENGTH)
        step_alone(plan_of(schedule("gpipe", 1), fewer), compile="aot_eager", tokens=tokens)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] > 0


@pytest.mark.slow
def test_compiled_units_save_the_same_activations() -> None:
    tokens = tokens_of(SMALL, rows=ROWS, length=LENGTH)
    plan = plan_of(schedule("gpipe", 1), SMALL, strategy="full")
    plain, compiled = (step_alone(plan, compile=c, tokens=tokens)[2] for c in (False, "aot_eager"))
    assert compiled == plain


def test_compiled_modules_refuse_split_backwards() -> None:
    with pytest.raises(InputError, match="no backward is split: plan a schedule of whole backwards"):
        run_threads(plan_of(schedule("zb-h1", 2), GENERIC["olmo2"]), lambda _: None, compile=True)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(InputError, match=r"torch\.compile has no backend 'fast'"):
        Pipeline(None, plan_of(schedule("gpipe", 1), LLAMA), compile="fast")
