"""Steps taken before the norm is known match the synchronous optimizer bitwise."""

import itertools
import math
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

import debubble as db
from debubble.ir import InputError, Kind
from debubble.runtime.distributed.gradient_norm import CHUNK_SIZE, NormRelay, PartialSums, finish_order, sum_of_squares
from debubble.runtime.execution.speculation import speculative_instructions
from tests.runtime.test_pipeline import ADAMW, device_stepped, host_stepped, schedule_1f1b
from tests.support import tiny_models
from tests.support.runtime_cases import loss_alone, plan_of, rows_of, run_threads, tokens_of
from tests.support.tiny_models import with_layers

LLAMA, LLAMA_TIED, GPT2 = (with_layers(tiny_models.FAMILIES[family], 2) for family in ("llama", "llama-tied", "gpt2"))
STEPS = 4


def test_sum_of_squares_counts_every_number_once() -> None:
    gradients = [torch.full((3, CHUNK_SIZE - 1), 0.5), torch.full((7,), 2.0, dtype=torch.bfloat16), torch.empty(0)]
    assert sum_of_squares(gradients) == 3 * (CHUNK_SIZE - 1) / 4 + 7 * 4
    for bad in (math.inf, math.nan):
        assert not PartialSums(sum_of_squares([torch.ones(CHUNK_SIZE + 1), torch.tensor([1.0, bad])])).finite


class HeldBack:
    """Rank 1 of two, whose messages are delayed until released."""

    rank, size = 1, 2

    def __init__(self) -> None:
        self.sending, self.may_go = threading.Event(), threading.Event()

    def receive(self, buffer: Any, peer: Any, channel: Any) -> Any:
        return PartialSums(1.0).to_tensor()

    def send(self, tensor: Any, peer: Any, channel: Any) -> None:
        self.sending.set()
        self.may_go.wait()


def test_rank_passes_the_total_on_before_using_it() -> None:
    transport: Any = HeldBack()
    _, total = NormRelay(transport, [0, 1]).take_turn(PartialSums(2.0), steps_ahead=lambda _: False)
    transport.sending.wait()
    assert not total.done()
    transport.may_go.set()
    assert total.result() == PartialSums(3.0)


def batch_of(pipeline: Any, step: Any) -> Any:
    plan = pipeline.plan
    return rows_of(pipeline, tokens_of(plan.model, rows=plan.micro_batches * plan.options.data, seed=step))


def overflow(pipeline: Any, steps: Any) -> None:
    """In these steps the gradient of device 0's first norm has an inf or NaN; no other device's has."""
    if steps and 0 in pipeline.stages:
        norm = next(p for unit in pipeline.stages[0].units for p in unit.parameters() if p.dim() == 1)
        wrong = dict(zip(steps, itertools.cycle([math.inf, math.nan])))
        norm.register_hook(lambda gradient: gradient + wrong.get(pipeline.steps_taken, 0))


def synchronous(pipeline: Any, *, max_norm: Any, overflows: Any = ()) -> Any:
    """Losses and norms of some steps, and the parameters at their end."""
    overflow(pipeline, overflows)
    losses, norms = [], []
    for step in range(STEPS):
        losses.append(float(pipeline.step(batch_of(pipeline, step))))
        norms.append(float(pipeline.optimizer_step(max_norm)))
    return losses, norms, pipeline.state_dict()


def ahead(pipeline: Any, *, max_norm: Any, overflows: Any = ()) -> Any:
    """Losses, norms, parameters and step results with `post_validated_step`."""
    overflow(pipeline, overflows)
    settled = [pipeline.post_validated_step(batch_of(pipeline, step), max_norm=max_norm) for step in range(STEPS)]
    assert settled.pop(0) is None
    settled.append(pipeline.finish_update())
    assert [s.step for s in settled] == list(range(STEPS))
    return [s.loss for s in settled], [s.norm for s in settled], pipeline.state_dict(), settled


def run(plan: Any, work: Any, **arguments: Any) -> Any:
    return run_threads(plan, partial(work, **arguments), optimizer=ADAMW)


def middle_norm(plan: Any) -> Any:
    """A limit that clips some steps of a run."""
    norms = sorted(run(plan, synchronous, max_norm=1e9)[0][1])
    return norms[len(norms) // 2] * 1.0001


def assert_same(actual: Any, expected: Any) -> None:
    for (losses, norms, state, _), (losses_then, norms_then, state_then) in zip(actual, expected, strict=True):
        assert losses == losses_then
        assert norms == pytest.approx(norms_then, rel=0, abs=0, nan_ok=True)
        assert state.keys() == state_then.keys()
        for name, parameter in state.items():
            torch.testing.assert_close(parameter, state_then[name], rtol=0, atol=0, equal_nan=True)


def plans() -> Iterator[Any]:
    def made(name: str, config: Any = LLAMA, *, dtype: str = "fp32", devices: int = 2, **options: Any) -> Any:
        return plan_of(db.schedules[name](devices=devices, micro_batches=2 * devices), config, dtype=dtype, **options)

    slow = pytest.mark.slow
    yield pytest.param(made("zb-h2", devices=4), id="zb-h2 on 4")
    yield pytest.param(made("1f1b", LLAMA_TIED), id="tied over devices")
    yield pytest.param(made("interleaved", dtype="bf16"), id="interleaved, bf16", marks=slow)
    yield pytest.param(made("zb-v", GPT2), id="zb-v, tied on a device", marks=slow)
    yield pytest.param(made("1f1b", dtype="bf16", data=2, zero=1), id="ZeRO-1", marks=slow)
    yield pytest.param(made("chronos-zero2", LLAMA_TIED, data=2, zero=2), id="ZeRO-2 in groups", marks=slow)
    yield pytest.param(made("bpipe", devices=4), id="offload to peers", marks=slow)


@pytest.mark.parametrize("plan", [*plans()])
def test_post_validated_steps_match_synchronous_ones(plan: Any) -> None:
    max_norm = middle_norm(plan)
    actual, expected = (run(plan, work, max_norm=max_norm) for work in (ahead, synchronous))
    norms = expected[0][1]
    assert min(norms) < max_norm < max(norms)
    assert_same(actual, expected)


@pytest.mark.parametrize(
    ("stepped", "dtype", "options"),
    [
        (host_stepped, "bf16", {"data": 2, "zero": 2}),
        (device_stepped, "fp32", {}),
        pytest.param(device_stepped, "bf16", {"data": 2, "zero": 2}, marks=pytest.mark.slow),
    ],
    ids=["host, ZeRO-2", "device", "device, ZeRO-2"],
)
def test_inner_steps_are_clipped_like_steps_at_the_end(stepped: Any, options: Any, dtype: Any) -> None:
    inside, after = (plan_of(s, LLAMA, dtype=dtype, **options) for s in (stepped(schedule_1f1b()), schedule_1f1b()))
    max_norm = middle_norm(after)
    actual = run(inside, ahead, max_norm=max_norm)
    assert_same(actual, run(after, synchronous, max_norm=max_norm))
    assert any(s.rolled_back for s in actual[0][3])


@pytest.mark.parametrize("stepped", [host_stepped, lambda schedule: schedule])
def test_a_step_with_an_inf_or_nan_gradient_changes_nothing(stepped: Any) -> None:
    inside, after = (plan_of(s, LLAMA, dtype="fp32") for s in (stepped(schedule_1f1b()), schedule_1f1b()))
    arguments = {"max_norm": 1e9, "overflows": (1, 3)}
    actual = run(inside, ahead, **arguments)
    assert_same(actual, run(after, synchronous, **arguments))
    for *_, settled in actual:
        assert [s.step for s in settled if s.skipped] == [1, 3]
        assert [s.step for s in settled if s.rolled_back] == [1, 3]


def test_devices_roll_back_steps_taken_before_the_norm() -> None:
    """1F1B's last device finishes first, so it steps before it learns from the first that the norm is too large."""
    plan = plan_of(schedule_1f1b(), LLAMA, dtype="fp32")

    def one_step(pipeline: Any, max_norm: Any = math.inf) -> Any:
        pipeline.post_validated_step(batch_of(pipeline, 0), max_norm=max_norm)
        alone = math.sqrt(
            sum(float(p.grad.double().square().sum()) for p in pipeline.parameters() if p.grad is not None)
        )
        return pipeline.finish_update(), alone

    (step, _), (_, of_last) = run(plan, one_step)
    assert of_last < step.norm
    for settled, _ in run(plan, one_step, max_norm=(of_last + step.norm) / 2):
        assert (settled.norm, settled.rolled_back) == (step.norm, 1)
    for settled, _ in run(plan, one_step, max_norm=of_last / 2):
        assert (settled.norm, settled.rolled_back) == (step.norm, 0)


def test_repeated_step_uses_its_learning_rate() -> None:
    plan = plan_of(schedule_1f1b(), LLAMA, dtype="fp32")

    def with_rates(step_of: Any) -> Any:
        def work(pipeline: Any) -> Any:
            for step in range(4):
                for group in (g for o in pipeline.optimizers for g in o.param_groups):
                    group["lr"] = 10.0 ** -(step + 2)
                step_of(pipeline, batch_of(pipeline, step))
            return pipeline.state_dict()

        return run(plan, work)

    def both(pipeline: Any, batch: Any) -> None:
        pipeline.step(batch)
        pipeline.optimizer_step(0.5)

    expected = with_rates(both)
    for state, parameters in zip(
        with_rates(lambda p, batch: p.post_validated_step(batch, max_norm=0.5)), expected, strict=True
    ):
        assert all(torch.equal(state[name], parameters[name]) for name in state)


class Counting(torch.optim.SGD):
    """Counts its steps in its parameter groups, as schedule-free optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            group["k"] = 0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] += 1
        return super().step(closure)


def test_rolled_back_step_is_not_counted_in_groups() -> None:
    plan = plan_of(schedule_1f1b(), LLAMA, dtype="fp32")

    def work(pipeline: Any) -> Any:
        overflow(pipeline, [1])
        for step in range(3):
            pipeline.post_validated_step(batch_of(pipeline, step))
        pipeline.finish_update()
        return [group["k"] for optimizer in pipeline.optimizers for group in optimizer.param_groups]

    assert run_threads(plan, work, optimizer=Counting) == [[2], [2]]


def test_rollback_copies_are_counted_on_their_device() -> None:
    """AdamW's parameter, two moments and step count; copies of stages on the host are on the host."""
    on_device, on_host = (
        plan_of(stepped(schedule_1f1b()), LLAMA, dtype="fp32") for stepped in (device_stepped, host_stepped)
    )

    def more(pipeline: Any) -> Any:
        pipeline.post_validated_step(batch_of(pipeline, 0))
        pipeline.finish_update()
        before = pipeline.measured.static_bytes
        pipeline.post_validated_step(batch_of(pipeline, 1))
        pipeline.finish_update()
        parameters = pipeline.parameters()
        return pipeline.measured.static_bytes - before, sum(2 * p.nbytes + 4 for p in parameters)

    for copied, states in run(on_device, more):
        assert copied == states  # there are no states to copy in the first step
    assert [copied for copied, _ in run(on_host, more)] == [0, 0]


def test_early_operations_are_those_before_any_backward() -> None:
    schedule = host_stepped(schedule_1f1b(devices=2, micro_batches=3))
    program = db.lower(schedule, plan_of(schedule, LLAMA).costs)
    names = {program.instructions[i].op.name for i in speculative_instructions(program)}
    assert names == {"0P0", "1P0", "0F0", "0F1", "0SEND_F0", "0SEND_F1", "1RECV_F0", "1RECV_F1", "1F0"}


@pytest.mark.parametrize(("name", "order"), [("1f1b", (3, 2, 1, 0)), ("zb-h2", (0, 1, 2, 3))])
def test_norm_is_passed_on_in_finish_order(name: str, order: Any) -> None:
    schedule = db.schedules[name](devices=4, micro_batches=8)
    assert finish_order(db.lower(schedule, db.StageCosts.of(stages=4))) == order


def test_offloads_to_a_peer_do_not_run_ahead() -> None:
    schedule = db.schedules["bpipe"](devices=4, micro_batches=8)
    program = db.lower(schedule, db.StageCosts.of(stages=4, offload=1, memory_limit=4))
    assert schedule.peers
    assert not {Kind.O, Kind.L} & {program.instructions[i].op.kind for i in speculative_instructions(program)}


def test_batches_of_a_new_shape_need_a_finished_update() -> None:
    plan = plan_of(schedule_1f1b(), LLAMA)

    def work(pipeline: Any) -> Any:
        pipeline.post_validated_step(tokens_of(LLAMA, rows=4, length=12))
        with pytest.raises(InputError, match="call `finish_update` between batches of different shapes"):
            pipeline.post_validated_step(tokens_of(LLAMA, rows=4, length=8))
        pipeline.finish_update()
        pipeline.post_validated_step(tokens_of(LLAMA, rows=4, length=8))
        return pipeline.finish_update().step

    assert run(plan, work) == [1, 1]


@pytest.mark.parametrize(
    ("stepped", "then", "message"),
    [
        (device_stepped, lambda p: p.optimizer_step(1.0), "clip them with `post_validated_step`"),
        (host_stepped, lambda p: p.clip_grad_norm(1.0), r"clip with `optimizer_step\(max_norm\)`"),
        (host_stepped, lambda p: p.step(tokens_of(LLAMA, rows=4)), "call `optimizer_step` after each `step`"),
    ],
    ids=["clipping", "the norm", "a second step"],
)
def test_late_requests_after_inner_steps_are_refused(stepped: Any, then: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(plan_of(stepped(schedule_1f1b()), LLAMA), lambda p: (p.step(tokens_of(LLAMA, rows=4)), then(p)))


@pytest.mark.parametrize(
    ("stepped", "max_norm"), [(None, 1.0), (None, None), (device_stepped, None)], ids=["clipped", "not", "inside"]
)
def test_a_synchronous_update_with_an_inf_gradient_is_skipped(stepped: Any, max_norm: Any) -> None:
    schedule = schedule_1f1b() if stepped is None else stepped(schedule_1f1b())

    def work(pipeline: Any) -> Any:
        overflow(pipeline, [0])
        before = {name: p.clone() for name, p in pipeline.state_dict().items()}
        pipeline.step(batch_of(pipeline, 0))
        return pipeline.optimizer_step(max_norm), before, pipeline.state_dict()

    # A stage that is stepped on its device knows only its own gradients.
    for norm, before, after in run(plan_of(schedule, LLAMA, dtype="fp32"), work)[: 2 if stepped is None else 1]:
        assert stepped is not None or norm.isinf()
        assert all(torch.equal(after[name], before[name]) for name in after)


def test_device_starts_next_step_before_others_finish() -> None:
    """ZB-H2's first device finishes long before its last, whose last W here waits for the first's next forward."""
    plan = plan_of(db.schedules["zb-h2"](devices=4, micro_batches=8), LLAMA, dtype="fp32")
    begun = threading.Event()

    def work(pipeline: Any) -> Any:
        [stage] = pipeline.stages.values()
        forward, weights = stage.forward, stage.backward_weight

        def first_forward(*arguments: Any, **options: Any) -> Any:
            if pipeline.steps_taken == 1:
                begun.set()
            return forward(*arguments, **options)

        def last_weights(j: Any) -> None:
            if pipeline.steps_taken == 0 and j == 7:
                assert begun.wait(60)
            weights(j)

        if pipeline.device == 0:
            stage.forward = first_forward
        if pipeline.device == 3:
            stage.backward_weight = last_weights
        pipeline.post_validated_step(batch_of(pipeline, 0))
        return pipeline.post_validated_step(batch_of(pipeline, 1)).rolled_back

    assert run(plan, work) == [0] * 4


def test_trace_of_overlapping_steps_uses_one_clock() -> None:
    plan = plan_of(db.schedules["zb-h2"](devices=4, micro_batches=8), LLAMA, dtype="fp32")

    def work(pipeline: Any) -> Any:
        for step in range(2):
            pipeline.post_validated_step(batch_of(pipeline, step))
        trace = pipeline.measured.gather_trace()
        pipeline.finish_update()
        return trace

    [step] = run(plan, work)[0].steps
    event_of = {event.name: event for event in step.events}
    for stage in range(3):
        assert event_of[f"{stage}F0"].end <= event_of[f"{stage + 1}F0"].start
        assert event_of[f"{stage + 1}I0"].end <= event_of[f"{stage}I0"].start


def test_frozen_parameters_do_not_affect_the_norm() -> None:
    transformers = pytest.importorskip("transformers")
    schedule = db.schedules["zb-h1"](devices=2, micro_batches=4)
    trained = {"model.layers.2.self_attn.v_proj.weight", "model.layers.0.input_layernorm.weight"}

    def work(model: Any, step: Any) -> Any:
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter_name in trained)
        return run_threads(plan_of(schedule, LLAMA, dtype="fp32"), step, model=model, optimizer=ADAMW)

    def models() -> Any:
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**LLAMA))

    actual, expected = work(models(), partial(ahead, max_norm=0.5)), work(models(), partial(synchronous, max_norm=0.5))
    assert_same(actual, expected)
    assert expected[0][1][0] == pytest.approx(torchs_norm(models(), trained), rel=1e-5)


def torchs_norm(model: Any, trained: Any) -> Any:
    """The norm of the same batch's gradients, by torch alone."""
    loss_alone(model, tokens_of(LLAMA, rows=4, seed=0))
    return math.hypot(*(float(p.grad.norm()) for name, p in model.named_parameters() if name in trained))


def test_different_batches_are_detected_in_overlapping_steps() -> None:
    def work(pipeline: Any) -> None:
        pipeline.post_validated_step(tokens_of(LLAMA, rows=4))
        pipeline.post_validated_step(tokens_of(LLAMA, rows=4, seed=pipeline.device))
        pipeline.finish_update()

    with pytest.raises(InputError, match="Rank 1 has other tokens or targets than rank 0"):
        run(plan_of(schedule_1f1b(), LLAMA), work)
