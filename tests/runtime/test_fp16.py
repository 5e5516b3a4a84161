"""fp16 with a scaled loss has gradients close to fp32 and skips steps that overflow."""

from typing import Any

import pytest
import torch

import debubble as db
from debubble.ir import InputError
from debubble.models.config import ModelConfig
from debubble.models.runtime_limits import beyond_runtime
from debubble.runtime.parameters.optimizers import LossScale
from tests.runtime.test_pipeline import ADAMW, host_stepped
from tests.support.generic_cases import GENERIC
from tests.support.runtime_cases import plan_of, rows_of, run_threads, tokens_of
from tests.support.tiny_models import LLAMA, LLAMA_TIED, MIXTRAL

pytest.importorskip("transformers")  # imported here, as ranks on threads must not be the first to import it


def plan_for(dtype: str, config: Any = LLAMA_TIED, **options: Any) -> Any:
    return plan_of(db.schedules["zb-h1"](devices=2, micro_batches=4), config, dtype=dtype, **options)


def test_the_scale_halves_on_overflow_and_doubles_without() -> None:
    scale, values = LossScale(value=8.0, growth_interval=2), []
    for finite in (True, False, True, True, True, False):
        scale.update(finite=finite)
        values.append(scale.value)
    assert values == [8.0, 4.0, 4.0, 8.0, 8.0, 4.0]


@pytest.mark.parametrize("options", [{"data": 2, "zero": 2}, {"config": MIXTRAL}, {"config": GENERIC["olmo2"]}])
def test_losses_and_first_norm_are_close_to_fp32(options: Any) -> None:
    def train(pipeline: Any) -> Any:
        if pipeline.loss_scale is not None:
            pipeline.loss_scale.value = 2.0**8  # the model's gradients are so large that a larger scale would overflow
        rows = 4 * options.get("data", 1)
        batches = [rows_of(pipeline, tokens_of(LLAMA_TIED, rows=rows, seed=step)) for step in range(2)]
        return [(float(pipeline.step(batch)), float(pipeline.optimizer_step(1.0))) for batch in batches]

    actual, expected = (run_threads(plan_for(d, **options), train, optimizer=ADAMW)[0] for d in ("fp16", "fp32"))
    # fp16 has an 11-bit significand, which can send a token to another expert.
    near = 4e-3 if options.get("config") is MIXTRAL else 2e-3
    assert [loss for loss, _ in actual] == pytest.approx([loss for loss, _ in expected], rel=near)
    # CPUs differ in how they sum fp16 products.
    assert actual[0][1] == pytest.approx(expected[0][1], rel=4e-3)


@pytest.mark.parametrize("steps_on_host", [False, True])
def test_a_step_that_overflows_changes_nothing_but_the_scale(steps_on_host: bool) -> None:
    schedule = db.schedules["1f1b"](devices=2, micro_batches=4)
    plan = plan_of(host_stepped(schedule) if steps_on_host else schedule, LLAMA, dtype="fp16")

    def train(pipeline: Any) -> Any:
        before = {name: value.clone() for name, value in pipeline.state_dict().items()}
        pipeline.loss_scale.value = 2.0**40
        norms = []
        for _ in range(2):
            pipeline.step(tokens_of(LLAMA_TIED, rows=4))
            norms.append(pipeline.optimizer_step(1.0))
            same = all(torch.equal(value, before[name]) for name, value in pipeline.state_dict().items())
            assert same is not bool(torch.isfinite(norms[-1]))
            pipeline.loss_scale.value = min(pipeline.loss_scale.value, 2.0**16 if len(norms) == 1 else 2.0**40)
        return norms, pipeline.loss_scale.value

    for (first, second), value in run_threads(plan, train, optimizer=ADAMW):
        assert not torch.isfinite(first)
        assert torch.isfinite(second)
        assert value == 2.0**16


def test_fp16_needs_an_optimizer_that_can_skip_a_step() -> None:
    with pytest.raises(InputError, match="give Pipeline an `optimizer`, call `optimizer_step`"):
        run_threads(plan_for("fp16"), lambda _: None)
    with pytest.raises(InputError, match="cannot update before the norm is known"):
        run_threads(plan_for("fp16"), lambda p: p.post_validated_step(tokens_of(LLAMA_TIED, rows=4)), optimizer=ADAMW)
    refusal = beyond_runtime(
        db.ir.RunOptions(dtype="fp16"), ModelConfig.from_hf({**MIXTRAL, "output_router_logits": True})
    )
    assert "the routers' auxiliary loss has no scale" in str(refusal)
