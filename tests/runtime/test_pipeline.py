"""Training with a Pipeline: optimizer, clipping, precision, dropout, data parallelism, and what it refuses."""

import threading
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import debubble as db
from debubble.ir import InputError, Kind, Op, Placement, RunOptions, Schedule
from debubble.models.config import ModelConfig
from debubble.models.runtime_limits import beyond_runtime
from debubble.runtime import Pipeline
from debubble.runtime.distributed.transport import Threads
from debubble.runtime.steps.batch import read_batch
from tests.support.hf_reference import hf_model
from tests.support.reference_model import ReferenceModel
from tests.support.runtime_cases import (
    GPT2,
    LLAMA,
    LLAMA_TIED,
    assert_gradients,
    gradients_of,
    plan_of,
    reference_gradients,
    run_threads,
    tokens_of,
)
from tests.support.schedule_cases import fused

ADAMW = partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.1)


def schedule_1f1b(devices: int = 2, micro_batches: int = 4) -> Any:
    return db.schedules["1f1b"](devices=devices, micro_batches=micro_batches)


def test_a_step_that_moves_messages_alone_starts_no_thread() -> None:
    threads = threading.active_count() + 2

    def step(pipeline: Pipeline) -> bool:
        pipeline.step(tokens_of(LLAMA, rows=4))
        return threading.active_count() <= threads

    assert run_threads(plan_of(schedule_1f1b(), LLAMA), step) == [True, True]


def losses_of(plan: Any, *, steps: Any, max_norm: Any = None, **arguments: Any) -> Any:
    """Rank 0's losses of some steps on ever new tokens."""

    def train(pipeline: Any) -> Any:
        losses = []
        for step in range(steps):
            losses.append(float(pipeline.step(tokens_of(plan.model, rows=plan.micro_batches, seed=step))))
            pipeline.optimizer_step(max_norm)
        return losses

    return run_threads(plan, train, optimizer=ADAMW, **arguments)[0]


def reference_losses(config: Any, *, micro_batches: Any, steps: Any, max_norm: Any = None) -> Any:
    model = ReferenceModel(config)
    optimizer = ADAMW(model.parameters())
    losses = []
    for step in range(steps):
        batch = read_batch(
            tokens_of(config, rows=micro_batches, seed=step), micro_batches=1, device=torch.device("cpu")
        )
        [x], [micro_batch] = batch.micro_batches(scale=1 / batch.counted, seed=0)
        loss = model(x, micro_batch)
        loss.backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("config", [LLAMA_TIED, GPT2], ids=["llama-tied", "gpt2-tied"])
@pytest.mark.parametrize(("name", "devices"), [("1f1b", 2), ("zb-h1", 4), ("interleaved", 2), ("zb-v", 2)])
def test_adamw_steps_lose_like_those_of_one_process(name: str, devices: int, config: Any) -> None:
    plan = plan_of(db.schedules[name](devices=devices, micro_batches=4), config, dtype="fp32")
    expected = reference_losses(config, micro_batches=4, steps=8, max_norm=1.0)
    assert losses_of(plan, steps=8, max_norm=1.0) == pytest.approx(expected, rel=1e-5)


def test_clipping_uses_the_norm_of_all_ranks_and_counts_a_tied_table_once() -> None:
    plan = plan_of(schedule_1f1b(), LLAMA_TIED)
    tokens = tokens_of(LLAMA_TIED, rows=4)
    _, expected = reference_gradients(LLAMA_TIED, tokens, micro_batches=4)
    del expected["lm_head.weight"]
    norm = torch.stack([g.square().sum() for g in expected.values()]).sum().sqrt()

    def clip(pipeline: Any) -> Any:
        pipeline.step(tokens)
        before = pipeline.clip_grad_norm(0.5)
        return before, {name: p.grad for name, p in pipeline.named_parameters()}

    answers = run_threads(plan, clip)
    for before, gradients in answers:
        torch.testing.assert_close(before, norm, rtol=1e-12, atol=0)
        for name, gradient in gradients.items():
            expected_gradient = expected["model.embed_tokens.weight" if name == "lm_head.weight" else name]
            torch.testing.assert_close(gradient, expected_gradient * 0.5 / (norm + 1e-6), rtol=1e-9, atol=1e-14)


def test_bf16_trains_fp32_masters() -> None:
    plan = plan_of(schedule_1f1b(), LLAMA, dtype="bf16")

    def train(pipeline: Any) -> Any:
        assert {p.dtype for p in pipeline.parameters()} == {torch.float32}
        assert {p.dtype for s in pipeline.stages.values() for u in s.units for p in u.parameters()} == {torch.bfloat16}
        loss = pipeline.step(tokens_of(LLAMA, rows=4))
        return loss, {name: p.grad for name, p in pipeline.named_parameters()}

    answers = run_threads(plan, train)
    loss, expected = reference_gradients(LLAMA, tokens_of(LLAMA, rows=4), micro_batches=4)
    torch.testing.assert_close(answers[0][0].double(), loss, rtol=2e-2, atol=0)
    for _, gradients in answers:
        for name, gradient in gradients.items():
            assert gradient.dtype is torch.float32
            difference = (gradient - expected[name]).norm() / expected[name].norm()
            assert difference < 0.15, name


def test_dropout_does_not_depend_on_the_schedule_or_on_recomputation() -> None:
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


def test_dropout_differs_from_step_to_step() -> None:
    config = {**GPT2, "resid_pdrop": 0.5}
    tokens = tokens_of(config, rows=4)
    plan = plan_of(schedule_1f1b(devices=1), config)
    [losses] = run_threads(plan, lambda pipeline: [float(pipeline.step(tokens)) for _ in range(2)])
    assert losses[0] != losses[1]


def test_gradients_add_up_over_steps_until_they_are_cleared() -> None:
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
    batches = [{"input_ids": t[:, :-1].clamp(min=0), "targets": t[:, 1:]} for t in tokens.chunk(2)]
    whole = {name: torch.cat([b[name] for b in batches]) for name in batches[0]}

    def one(transport: Any) -> Any:
        pipeline = Pipeline(None, plan, transport=transport)
        loss = pipeline.step(batches[transport.rank // 2])
        return loss, {name: p.grad for name, p in pipeline.named_parameters()}

    expected_loss, expected = reference_gradients(LLAMA_TIED, whole, micro_batches=8)
    for loss, gradients in Threads.run(4, one):
        torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
        assert_gradients(gradients, expected)


def host_stepped(schedule: Any) -> Any:
    """Every stage is stepped on the host: P before its first forward, D and S after its last backward."""
    orders = []
    for stage, order in enumerate(schedule.orders):
        last = schedule.micro_batches - 1
        orders.append((Op(Kind.P, stage, 0), *order, Op(Kind.D, stage, last), Op(Kind.S, stage, last)))
    return replace(schedule, orders=tuple(orders))


def device_stepped(schedule: Any) -> Any:
    last = schedule.micro_batches - 1
    return replace(schedule, orders=tuple((*o, Op(Kind.S, s, last)) for s, o in enumerate(schedule.orders)))


@pytest.mark.parametrize("stepped", [host_stepped, device_stepped])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_steps_inside_the_program_equal_steps_after_it(dtype: str, stepped: Any) -> None:
    after = plan_of(schedule_1f1b(), LLAMA, dtype=dtype)
    inside = plan_of(stepped(schedule_1f1b()), LLAMA, dtype=dtype)
    assert losses_of(inside, steps=5) == losses_of(after, steps=5)


def test_a_plan_that_steps_inside_needs_an_optimizer() -> None:
    with pytest.raises(InputError, match="give Pipeline an `optimizer`"):
        run_threads(plan_of(device_stepped(schedule_1f1b()), LLAMA), lambda _: None)


def test_memory_is_counted_for_new_shapes_and_when_asked() -> None:
    """Plain steps keep no ledger; peaks stay those of the last step that did."""

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
        return [
            bool(pipeline.step(tokens_of(LLAMA, rows=4)).isfinite() and pipeline.measured.trace().steps[0].memory)
            for _ in range(2)
        ]

    plan = plan_of(db.schedules["1f1b"](devices=2, micro_batches=4), LLAMA, strategy="full")
    assert run_threads(plan, work) == [[True, True]] * 2


def test_a_hugging_face_model_trains_in_place() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**LLAMA))
    tokens = tokens_of(LLAMA, rows=4)
    expected = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def train(pipeline: Any) -> Any:
        loss = pipeline.step(tokens)
        pipeline.optimizer_step()
        return loss

    loss = run_threads(plan_of(schedule_1f1b(), LLAMA, dtype="fp32"), train, model=model, optimizer=ADAMW)[0]
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_frozen_parameters_get_no_gradient_and_the_others_the_same(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**LLAMA)).double()
    plan = plan_of(db.schedules[name](devices=2, micro_batches=4), LLAMA)

    def gradients() -> Any:
        def one(pipeline: Any) -> Any:
            pipeline.step(tokens_of(LLAMA, rows=4))
            return {n: p.grad for n, p in pipeline.named_parameters() if p.grad is not None}

        model.zero_grad()
        return {n: g for part in run_threads(plan, one, model=model) for n, g in part.items()}

    expected = gradients()
    trained = {"model.layers.2.self_attn.v_proj.weight", "model.layers.3.input_layernorm.weight"}
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter_name in trained)
    found = gradients()
    assert found.keys() == trained
    assert all(torch.equal(found[n], expected[n]) for n in trained)


def test_the_trace_has_every_instruction_of_the_program() -> None:
    plan = plan_of(schedule_1f1b(), LLAMA)

    def one(pipeline: Any) -> Any:
        pipeline.step(tokens_of(LLAMA, rows=4))
        return pipeline.measured.gather_trace()

    trace = run_threads(plan, one)[1]
    program = db.lower(plan.schedule, plan.costs)
    [step] = trace.steps
    assert sorted(e.name for e in step.events) == sorted(i.op.name for i in program.instructions)
    at = {e.name: e for e in step.events}
    for instruction in program.instructions:
        for wait in instruction.waits:
            awaited = program.instructions[wait.instruction]
            if awaited.device == instruction.device:
                assert at[awaited.op.name].end <= at[instruction.op.name].start
    assert {sample.device for sample in step.memory} == {0, 1}


def test_the_trace_says_what_every_device_did_before_and_after_its_program() -> None:
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


def test_an_error_in_one_rank_ends_all() -> None:
    plan = plan_of(schedule_1f1b(), LLAMA)

    def one(pipeline: Any) -> None:
        if pipeline.device == 1:
            pipeline.stages[1].units[0] = torch.nn.Module()
        pipeline.step(tokens_of(LLAMA, rows=4))

    with pytest.raises(NotImplementedError):  # a Module without a forward
        run_threads(plan, one)


def test_batches_that_do_not_fit_are_refused() -> None:
    plan = plan_of(schedule_1f1b(devices=1), LLAMA)
    for batch, message in [
        (torch.zeros(3, 5, dtype=torch.long), "3 rows cannot be cut into 4 equal micro-batches"),
        (torch.zeros(4, dtype=torch.long), r"shape \[rows, length \+ 1\], not \[4\]"),
        ({"labels": torch.zeros(4, 5)}, "no entry 'input_ids'"),
        ({"input_ids": torch.zeros(4, 5)}, "must have either 'labels' .* or 'targets'"),
        ({name: torch.zeros(4, 5) for name in ("input_ids", "labels", "targets")}, "must have either 'labels'"),
        ({"input_ids": torch.zeros(4, 5), "labels": torch.zeros(4, 6)}, r"not \[4, 5\] and \[4, 6\]"),
        (
            {"input_ids": torch.zeros(4, 5), "loss_mask": torch.zeros(4, 5)},
            "an entry 'loss_mask', which the runtime does",
        ),
        ({"input_ids": torch.zeros(4, 5), "labels": torch.full((4, 5), -100)}, "no target to learn from"),
    ]:
        with pytest.raises(InputError, match=message):
            run_threads(plan, lambda pipeline, batch=batch: pipeline.step(batch))


def test_ranks_with_different_batches_are_told_which() -> None:
    plan = plan_of(schedule_1f1b(), LLAMA)
    with pytest.raises(InputError, match=r"Rank 1 has micro-batches of 1 x 13 with .*, but rank 0 of 1 x 12"):
        run_threads(plan, lambda pipeline: pipeline.step(tokens_of(LLAMA, rows=4, length=12 + pipeline.device)))


@pytest.mark.parametrize("name", ["tokens", "targets"])
def test_ranks_with_other_numbers_in_their_batch_are_told_which(name: str) -> None:
    plan = plan_of(schedule_1f1b(devices=3), LLAMA)

    def one(pipeline: Any) -> None:
        batch = {"input_ids": tokens_of(LLAMA, rows=4)[:, 1:], "targets": tokens_of(LLAMA, rows=4)[:, 1:]}
        changed = batch["input_ids" if name == "tokens" else "targets"]
        changed[0, 0] = pipeline.device + 1
        pipeline.step(batch)

    with pytest.raises(InputError, match="Ranks 1, 2 have other tokens or targets than rank 0 of the same replica"):
        run_threads(plan, one)


def test_replicas_have_batches_of_their_own_and_their_ranks_the_same() -> None:
    plan = plan_of(schedule_1f1b(), LLAMA, data=2)

    def one(transport: Any) -> None:
        pipeline = Pipeline(None, plan, transport=transport)
        pipeline.step(tokens_of(LLAMA, rows=4, seed=pipeline.ranks.replica))
        pipeline.step(tokens_of(LLAMA, rows=4, seed=max(transport.rank, 1)))

    with pytest.raises(InputError, match="Rank 3 has other tokens or targets than rank 2"):
        Threads.run(4, one)


def test_ranks_with_different_plans_are_told_which() -> None:
    def one(transport: Any) -> None:
        Pipeline(None, plan_of(schedule_1f1b(micro_batches=4 + transport.rank), LLAMA), transport=transport)

    with pytest.raises(InputError, match="Rank 1 has another plan, seed or model than rank 0"):
        Threads.run(2, one)


def test_ranks_may_know_their_model_by_name_or_by_its_config_alone() -> None:
    named = db.plan(db.models["llama-tiny"], db.Cluster.parse("2xCPU"), planner="dapple", micro_batches=2)
    assert named.model_on_cluster is not None
    unnamed = replace(
        named,
        model_on_cluster=named.model_on_cluster._replace(
            model=db.Model.from_hf(dict(named.model_on_cluster.model.config))
        ),
    )

    def one(transport: Any) -> Any:
        return Pipeline(None, (named, unnamed)[transport.rank], transport=transport).device

    assert sorted(Threads.run(2, one)) == [0, 1]


def test_ranks_may_have_planned_by_themselves() -> None:
    def one(transport: Any) -> Any:
        plan = replace(plan_of(schedule_1f1b(), LLAMA), solve_seconds=float(transport.rank))
        return Pipeline(None, plan, transport=transport).device

    assert Threads.run(2, one) == [0, 1]


def test_plans_that_cannot_run_are_refused() -> None:
    plan = plan_of(schedule_1f1b(), LLAMA)
    with pytest.raises(InputError, match=r"needs 2 ranks .* but 3 were started"):
        run_threads(plan, lambda _: None, ranks=3)
    with pytest.raises(InputError, match="or make the plan for a model"):
        run_threads(replace(plan, model_on_cluster=None), lambda _: None)
    with pytest.raises(InputError, match="computes in fp32, bf16, fp16, fp64, not in 'fp8'"):
        run_threads(plan_of(schedule_1f1b(), LLAMA, dtype="fp8"), lambda _: None)
    with pytest.raises(InputError, match="make the plan with expert 1"):
        run_threads(plan_of(schedule_1f1b(), LLAMA, data=2, expert=2), lambda _: None)
    with pytest.raises(InputError, match="does not list the units of its model in order"):
        run_threads(replace(plan, partition=plan.partition[::-1]), lambda _: None)
    with pytest.raises(InputError, match="one of them is empty"):
        run_threads(plan_of(schedule_1f1b(), LLAMA, counts=[0, 10]), lambda _: None)
    with pytest.raises(InputError, match="does not know the recomputation strategy 'nrom'"):
        run_threads(plan_of(schedule_1f1b(), LLAMA, strategy="nrom"), lambda _: None)


def test_one_device_needs_no_process_group() -> None:
    schedule = Schedule.of("one", Placement.linear(1), 1, [["0F0", "0B0"]])
    pipeline = Pipeline(None, plan_of(schedule, LLAMA))
    expected, _ = reference_gradients(LLAMA, tokens_of(LLAMA, rows=1), micro_batches=1)
    torch.testing.assert_close(pipeline.step(tokens_of(LLAMA, rows=1)), expected, rtol=1e-12, atol=0)


def test_parameters_can_be_given_to_an_optimizer_of_ones_own() -> None:
    plan = plan_of(schedule_1f1b(), LLAMA, dtype="fp32")

    def train(pipeline: Any) -> Any:
        optimizer = ADAMW(pipeline.parameters())
        losses = []
        for step in range(3):
            losses.append(float(pipeline.step(tokens_of(LLAMA, rows=4, seed=step))))
            optimizer.step()
            optimizer.zero_grad()
        return losses

    assert run_threads(plan, train)[0] == losses_of(plan, steps=3)


def test_a_state_goes_from_one_partition_to_another() -> None:
    def state(plan: Any) -> Any:
        return {n: t for part in run_threads(plan, lambda p: p.state_dict()) for n, t in part.items()}

    two = plan_of(schedule_1f1b(), LLAMA)
    four = plan_of(schedule_1f1b(devices=4), LLAMA, counts=[1, 4, 2, 3])
    other = {n: t + 1 for n, t in state(two).items()}

    def load(pipeline: Any) -> Any:
        pipeline.load_state_dict(other)
        return pipeline.state_dict()

    loaded = {n: t for part in run_threads(four, load) for n, t in part.items()}
    assert loaded.keys() == other.keys()
    assert all(torch.equal(loaded[n], other[n]) for n in other)


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
