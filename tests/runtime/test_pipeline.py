"""Training with a Pipeline: optimizer, clipping, precision, dropout, data parallelism, and what it refuses."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import debubble as db
from debubble.frameworks.torch.export import read, to_csv
from debubble.ir import InputError, Kind, Op, RunOptions
from debubble.models.config import ModelConfig
from debubble.models.runtime_limits import beyond_runtime
from debubble.runtime import Pipeline
from debubble.runtime.distributed.thread_transport import ThreadTransport
from tests.support.hf_reference import hf_model
from tests.support.reference_model import ReferenceModel
from tests.support.runtime_cases import (
    assert_as_alone,
    assert_same_gradients,
    gradients_alone,
    gradients_of,
    loss_and_gradients,
    losses_alone,
    plan_of,
    reference_gradients,
    run_threads,
    tokens_of,
    train,
)
from tests.support.schedule_cases import fused, schedule_of
from tests.support.tiny_models import GPT2, LLAMA, LLAMA_TIED

ADAMW = partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.1)


def schedule_1f1b(devices: int = 2, micro_batches: int = 4) -> Any:
    return db.schedules["1f1b"](devices=devices, micro_batches=micro_batches)


def losses_of(plan: Any, *, steps: Any, max_norm: Any = None, **arguments: Any) -> Any:
    """Rank 0's losses of some steps, each on new tokens."""
    batches = [tokens_of(plan.model, rows=plan.micro_batches, seed=step) for step in range(steps)]
    return run_threads(
        plan, lambda pipeline: train(pipeline, batches, max_norm=max_norm), optimizer=ADAMW, **arguments
    )[0]


def reference_losses(config: Any, *, micro_batches: Any, steps: Any, max_norm: Any = None, length: int = 12) -> Any:
    model = ReferenceModel(config)
    batches = [tokens_of(config, rows=micro_batches, length=length, seed=step) for step in range(steps)]
    return losses_alone(model, ADAMW(model.parameters()), batches, max_norm=max_norm)


@pytest.mark.parametrize(("name", "config"), [("zb-h1", LLAMA_TIED), ("zb-v", GPT2)], ids=["zb-h1", "zb-v"])
def test_adamw_losses_match_a_single_process(name: str, config: Any) -> None:
    plan = plan_of(db.schedules[name](devices=2, micro_batches=4), config, dtype="fp32")
    expected = reference_losses(config, micro_batches=4, steps=4, max_norm=1.0)
    assert losses_of(plan, steps=4, max_norm=1.0) == pytest.approx(expected, rel=1e-5)


def test_bf16_trains_fp32_masters() -> None:
    plan = plan_of(schedule_1f1b(), LLAMA, dtype="bf16")

    def one(pipeline: Any) -> Any:
        assert {p.dtype for p in pipeline.parameters()} == {torch.float32}
        assert {p.dtype for s in pipeline.stages.values() for u in s.units for p in u.parameters()} == {torch.bfloat16}
        return loss_and_gradients(pipeline, tokens_of(LLAMA, rows=4))

    answers = run_threads(plan, one)
    loss, expected = reference_gradients(LLAMA, tokens_of(LLAMA, rows=4), micro_batches=4)
    torch.testing.assert_close(answers[0][0].double(), loss, rtol=2e-2, atol=0)
    for _, gradients in answers:
        for name, gradient in gradients.items():
            assert gradient.dtype is torch.float32
            difference = (gradient - expected[name]).norm() / expected[name].norm()
            assert difference < 0.15, name


def test_dropout_depends_on_the_step_and_not_on_how_it_runs() -> None:
    config = {**GPT2, "resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.3}
    tokens = tokens_of(config, rows=4)
    loss, gradients = gradients_of(plan_of(schedule_1f1b(devices=1), config), tokens)
    for other in (
        plan_of(schedule_1f1b(devices=4), config),
        plan_of(fused(db.schedules["zb-h1"](devices=2, micro_batches=4)), config, strategy="full"),
        plan_of(fused(schedule_1f1b()), config, strategy="core"),
    ):
        other_loss, other_gradients = gradients_of(other, tokens)
        torch.testing.assert_close(other_loss, loss, rtol=1e-12, atol=0)
        for name, gradient in gradients.items():
            torch.testing.assert_close(other_gradients[name], gradient, rtol=1e-11, atol=1e-13)
    undropped, _ = gradients_of(plan_of(schedule_1f1b(devices=1), GPT2), tokens)
    assert abs(undropped - loss) > 1e-3
    [losses] = run_threads(plan_of(schedule_1f1b(devices=1), config), lambda p: [p.step(tokens) for _ in range(2)])
    assert losses[0] == loss != losses[1]


def test_gradients_accumulate_over_steps_until_cleared() -> None:
    plan = plan_of(schedule_1f1b(), LLAMA_TIED)
    _, once = gradients_of(plan, tokens_of(LLAMA_TIED, rows=4))

    def twice(pipeline: Any) -> Any:
        for _ in range(2):
            pipeline.step(tokens_of(LLAMA_TIED, rows=4))
        return {name: p.grad for name, p in pipeline.named_parameters()}

    for gradients in run_threads(plan, twice):
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, 2 * once[name], rtol=1e-12, atol=0)


@pytest.mark.parametrize("schedule", ["1f1b", "chronos-zero2"])
def test_data_parallel_replicas_share_the_gradient_of_all_tokens(schedule: str) -> None:
    made = db.schedules[schedule](devices=2, micro_batches=4)
    plan = plan_of(made, LLAMA_TIED, data=2)
    tokens = tokens_of(LLAMA_TIED, rows=8)
    tokens[5, 3:] = -100  # replicas may have different numbers of targets
    batch = {"input_ids": tokens[:, :-1].clamp(min=0), "targets": tokens[:, 1:]}
    assert_as_alone(plan, LLAMA_TIED, batch)


def host_stepped(schedule: Any) -> Any:
    """A schedule with all stages stepped on the host: P before the first forward, D and S after the last backward."""
    orders = []
    for stage, order in enumerate(schedule.orders):
        last = schedule.micro_batches - 1
        orders.append((Op(Kind.P, stage, 0), *order, Op(Kind.D, stage, last), Op(Kind.S, stage, last)))
    return replace(schedule, orders=tuple(orders))


def device_stepped(schedule: Any) -> Any:
    last = schedule.micro_batches - 1
    return replace(schedule, orders=tuple((*o, Op(Kind.S, s, last)) for s, o in enumerate(schedule.orders)))


@pytest.mark.parametrize(("stepped", "dtype"), [(host_stepped, "bf16"), (device_stepped, "fp32")])
def test_steps_inside_the_program_equal_steps_after_it(dtype: str, stepped: Any) -> None:
    after = plan_of(schedule_1f1b(), LLAMA, dtype=dtype)
    inside = plan_of(stepped(schedule_1f1b()), LLAMA, dtype=dtype)
    assert losses_of(inside, steps=3) == losses_of(after, steps=3)


def test_a_plan_that_steps_inside_needs_an_optimizer() -> None:
    with pytest.raises(InputError, match="give Pipeline an `optimizer`"):
        run_threads(plan_of(device_stepped(schedule_1f1b()), LLAMA), lambda _: None)


def test_memory_is_counted_for_new_shapes_and_when_asked() -> None:
    """Plain steps keep no ledger; reported peaks are those of the last step that did."""

    def work(pipeline: Any) -> Any:
        counted, peaks = [], []
        for rows, measured in ((4, False), (4, False), (4, True), (4, False), (8, False)):
            pipeline.measured.every_step = measured
            pipeline.step(tokens_of(LLAMA, rows=rows))
            counted.append(bool(pipeline.measured.trace().steps[0].memory))
            peaks.append(pipeline.measured.peak_activation)
        return counted, peaks

    for counted, peaks in run_threads(plan_of(schedule_1f1b(), LLAMA), work):
        assert counted == [True, False, True, False, True]
        assert peaks[:4] == [peaks[0]] * 4
        assert peaks[4] > peaks[0]


def test_a_device_that_recomputes_counts_memory_in_every_step() -> None:
    def work(pipeline: Any) -> Any:
        for _ in range(2):
            pipeline.step(tokens_of(LLAMA, rows=4))
        return len(pipeline.measured.trace().steps[0].memory) > 0

    assert run_threads(plan_of(schedule_1f1b(), LLAMA, strategy="full"), work) == [True, True]


def test_a_hugging_face_model_trains_in_place() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**LLAMA))
    tokens = tokens_of(LLAMA, rows=4)
    expected, _ = gradients_alone(model, tokens)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    plan = plan_of(schedule_1f1b(), LLAMA, dtype="fp32")
    [loss], _ = run_threads(plan, lambda p: train(p, [tokens]), model=model, in_place=True, optimizer=ADAMW)
    assert loss == pytest.approx(float(expected), rel=1e-5)
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_frozen_parameters_have_no_gradient() -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**LLAMA)).double()
    plan = plan_of(db.schedules["zb-h1"](devices=2, micro_batches=4), LLAMA)

    tokens = tokens_of(LLAMA, rows=4)
    _, expected = gradients_of(plan, tokens, model=model)
    trained = {"model.layers.2.self_attn.v_proj.weight", "model.layers.3.input_layernorm.weight"}
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter_name in trained)
    _, actual = gradients_of(plan, tokens, model=model)
    assert {name for name, gradient in actual.items() if gradient is not None} == trained
    assert all(torch.equal(actual[name], expected[name]) for name in trained)


def test_the_trace_has_every_instruction_of_the_program() -> None:
    plan = plan_of(schedule_1f1b(), LLAMA)

    def one(pipeline: Any) -> Any:
        pipeline.step(tokens_of(LLAMA, rows=4))
        return pipeline.measured.gather_trace()

    trace = run_threads(plan, one)[1]
    program = db.lower(plan.schedule, plan.costs)
    [step] = trace.steps
    assert sorted(e.name for e in step.events) == sorted(i.op.name for i in program.instructions)
    event_of = {e.name: e for e in step.events}
    for instruction in program.instructions:
        for wait in instruction.waits:
            awaited = program.instructions[wait.instruction]
            if awaited.device == instruction.device:
                assert event_of[awaited.op.name].end <= event_of[instruction.op.name].start
    assert {sample.device for sample in step.memory} == {0, 1}


def test_trace_shows_phases_around_the_programs() -> None:
    plan = plan_of(schedule_1f1b(), LLAMA)

    def one(pipeline: Any) -> Any:
        for _ in range(2):
            pipeline.step(tokens_of(LLAMA, rows=4))
            pipeline.optimizer_step(1.0)
        return pipeline.measured.gather_trace()

    [step] = run_threads(plan, one)[1].steps
    for device in range(2):
        events = [event for event in step.events if event.device == device]
        start, end = min(e.start for e in events), max(e.end for e in events)
        phases = [phase for phase in step.phases if phase.device == device]
        assert [p.what for p in phases if p.end <= start] == ["meets the other ranks", "readies parameters"]
        assert [p.what for p in phases if p.start >= end] == [
            "sums gradients", "sums the loss", "sums the norm", "updates parameters",
        ]  # fmt: skip


def test_batches_that_do_not_fit_are_refused() -> None:
    plan = plan_of(schedule_1f1b(devices=1), LLAMA)
    for batch, message in [
        (torch.zeros(3, 5, dtype=torch.long), "3 rows cannot be cut into 4 equal micro-batches"),
        (torch.zeros(4, dtype=torch.long), r"shape \[rows, length \+ 1\], not \[4\]"),
        ({"labels": torch.zeros(4, 5)}, "no entry 'input_ids'"),
        ({"input_ids": torch.zeros(4, 5)}, "must have either 'labels' .* or 'targets'"),
        ({name: torch.zeros(4, 5) for name in ("input_ids", "labels", "targets")}, "must have either 'labels'"),
        ({"input_ids": torch.zeros(4, 5), "labels": torch.zeros(4, 6)}, r"not \[4, 5\] and \[4, 6\]"),
        ({"input_ids": torch.zeros(4, 5), "loss_mask": torch.zeros(4, 5)}, "'loss_mask', which the runtime does"),
        ({"input_ids": torch.zeros(4, 5), "labels": torch.full((4, 5), -100)}, "no target to learn from"),
    ]:
        with pytest.raises(InputError, match=message):
            run_threads(plan, lambda pipeline, batch=batch: pipeline.step(batch))


def test_rank_with_a_different_batch_is_named() -> None:
    plan = plan_of(schedule_1f1b(devices=3), LLAMA)
    with pytest.raises(InputError, match="Ranks 1, 2 have other tokens or targets than rank 0 of the same replica"):
        run_threads(plan, lambda pipeline: pipeline.step(tokens_of(LLAMA, rows=4, seed=pipeline.device)))
    with pytest.raises(InputError, match=r"Rank 1 has micro-batches of 1 x 13 with .*, but rank 0 of 1 x 12"):
        run_threads(plan, lambda pipeline: pipeline.step(tokens_of(LLAMA, rows=4, length=12 + pipeline.device % 2)))


def test_replicas_may_differ_in_batches_but_not_their_ranks() -> None:
    plan = plan_of(schedule_1f1b(), LLAMA, data=2)

    def one(pipeline: Any) -> None:
        pipeline.step(tokens_of(LLAMA, rows=4, seed=pipeline.ranks.replica))
        pipeline.step(tokens_of(LLAMA, rows=4, seed=max(pipeline.ranks.transport.rank, 1)))

    with pytest.raises(InputError, match="Rank 3 has other tokens or targets than rank 2"):
        run_threads(plan, one)


def test_rank_with_a_different_plan_is_named() -> None:
    def one(transport: Any) -> None:
        Pipeline(None, plan_of(schedule_1f1b(micro_batches=4 + transport.rank), LLAMA), transport=transport)

    with pytest.raises(InputError, match="Rank 1 has another plan, seed or model than rank 0"):
        ThreadTransport.run(2, one)


def test_model_by_name_or_by_config_makes_the_same_plan() -> None:
    named = db.plan(db.models["llama-tiny"], db.Cluster.parse("2xCPU"), planner="dapple", micro_batches=2)
    assert named.model_on_cluster is not None
    model = db.Model.from_hf(dict(named.model_on_cluster.model.config))
    unnamed = replace(named, model_on_cluster=named.model_on_cluster._replace(model=model), solve_seconds=99.0)
    plans = named, unnamed
    assert sorted(ThreadTransport.run(2, lambda t: Pipeline(None, plans[t.rank], transport=t).device)) == [0, 1]


def test_plans_that_cannot_run_are_refused() -> None:
    plan = plan_of(schedule_1f1b(), LLAMA)
    with pytest.raises(InputError, match=r"needs 2 ranks .* but 3 were started"):
        run_threads(plan, lambda _: None, ranks=3)
    for other, message in [
        (replace(plan, model_on_cluster=None), "or make the plan for a model"),
        (plan_of(schedule_1f1b(), LLAMA, dtype="fp8"), "computes in fp32, bf16, fp16, fp64, not in 'fp8'"),
        (plan_of(schedule_1f1b(), LLAMA, data=2, expert=2), "make the plan with expert 1"),
        (replace(plan, partition=plan.partition[::-1]), "does not list the units of its model in order"),
        (plan_of(schedule_1f1b(), LLAMA, counts=[0, 10]), "one of them is empty"),
        (plan_of(schedule_1f1b(), LLAMA, strategy="nrom"), "does not know the recomputation strategy 'nrom'"),
    ]:
        with pytest.raises(InputError, match=message):
            run_threads(other, lambda _: None)


@pytest.mark.parametrize("name", ["interleaved", "dualpipe-v"])
def test_schedule_from_a_csv_matches_one_process(name: str, tmp_path: Path) -> None:
    (tmp_path / "schedule.csv").write_text(to_csv(schedule_of(name, devices=4, micro_batches=8)))
    plan = plan_of(read(tmp_path / "schedule.csv"), LLAMA_TIED)
    assert_same_gradients(plan, LLAMA_TIED, tokens_of(LLAMA_TIED, rows=8, length=6))


def test_quantised_weights_are_refused() -> None:
    refusal = beyond_runtime(
        RunOptions(lora=4), ModelConfig.from_hf({**LLAMA, "quantization_config": {"load_in_4bit": True}})
    )
    assert "it reads no quantised weights: make the plan from the unquantised model" in str(refusal)
    model = hf_model(LLAMA)
    layer = model.model.layers[0].mlp.down_proj
    layer.weight = torch.nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    plan = plan_of(db.schedules["1f1b"](devices=1, micro_batches=1), LLAMA)
    with pytest.raises(InputError, match=r"The model's 'model.layers.0.mlp.down_proj.weight' is quantised"):
        run_threads(plan, lambda _: None, model=model)
