"""The state of a run on one rank, and its steps: data, update, validation, checkpoints, switches of the plan."""

from __future__ import annotations

import math
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist

from debubble.costs.flops import Utilization
from debubble.ir import Trace
from debubble.plans import Plan
from debubble.processes import own_cores
from debubble.runtime import Batch
from debubble.runtime.launch.failures import DeviceMemoryError
from debubble.runtime.pipeline import Pipeline
from debubble.runtime.steps.post_validation import StepResult
from debubble.runtime.topology import default_device
from debubble.training.checkpoint.folder import RunProgress
from debubble.training.checkpoint.saver import Saver
from debubble.training.checkpoint.state import AVERAGE, restore_numbers, state_of
from debubble.training.checks import validates_after
from debubble.training.data.datasets import Prefetcher, SampleSource
from debubble.training.data.text import text_of, tokens_of
from debubble.training.end_request import EndRequest
from debubble.training.length_plans import LengthSteps
from debubble.training.memory_check import explain_shortage
from debubble.training.monitoring.progress import NO_WORK, DeviceWork, StepReport, bubble_fraction
from debubble.training.online.controller import OnlineScheduler
from debubble.training.optimizer import learning_rate, set_learning_rate
from debubble.training.options import TrainOptions, journal_of, maker_of, model_of, tokenizer_of, validation_of
from debubble.training.resume import load, saved_group_numbers
from debubble.training.watchdog import SAVING_PHASE

TEMPERATURE = 0.8
"""Sampling temperature of the continuation of a prompt."""

METRICS_INTERVAL = 10
"""Steps between memory and bubble metrics, which need a collective of all ranks."""

TRACED_STEPS = 10
"""Number of last steps that are traced, and whose typical step is compared with the plan."""


def synchronous_step(
    pipeline: Pipeline, batch: Batch, observe: Callable[[], None], *, clip: float, finish: bool
) -> Sequence[StepResult]:
    """Take a step that ends on all ranks before the next one starts, and return its result.

    CPU optimizer steps inside it are validated at its end.

    Args:
        pipeline: The pipeline.
        batch: As in `Pipeline.step`.
        observe: Called after the step.
        clip: Maximum global norm of the gradients.
        finish: Unused; see `post_validated_step`.
    """
    loss = float(pipeline.step(batch))
    norm = pipeline.optimizer_step(clip)
    observe()
    return [
        StepResult(
            step=pipeline.steps_taken - 1,
            loss=loss,
            norm=float(norm),
            skipped=not math.isfinite(norm),
            rolled_back=pipeline.measured.rolled_back,
        )
    ]


def post_validated_step(
    pipeline: Pipeline, batch: Batch, observe: Callable[[], None], *, clip: float, finish: bool
) -> Sequence[StepResult]:
    """Take a step whose update is validated during the next step's forwards; arguments as in `synchronous_step`.

    Returns the previous step's result, and this one's if `finish` is set.
    """
    results = [pipeline.post_validated_step(batch, max_norm=clip)]
    if finish:
        results.append(pipeline.finish_update())
    observe()
    return [result for result in results if result is not None]


def news_of_update(result: StepResult) -> tuple[str, ...]:
    """Sentences for the user on a step's update."""
    sentences = []
    if result.rolled_back:
        devices = "1 device" if result.rolled_back == 1 else f"{result.rolled_back} devices"
        sentences.append(
            f"a gradient was inf or NaN: {devices} took the update back"
            if result.skipped
            else f"the gradients' norm {result.norm:.3g} is clipped: {devices} took the update back and repeated it"
        )
    if result.skipped:
        sentences.append("a gradient was inf or NaN: no parameter was updated")
    return tuple(f"step {result.step + 1}: {sentence}" for sentence in sentences)


class TrainingRun:
    """A training run on this rank; the options are the same on all ranks."""

    def __init__(self, options: TrainOptions, plan: Plan, samples: SampleSource | LengthSteps) -> None:
        self.options, self.plan = options, plan
        self._data: Prefetcher | LengthSteps
        if isinstance(samples, LengthSteps):
            self._data = samples
        else:
            self._data = Prefetcher(samples, stride=self.rows * plan.options.data)
        self.device = default_device()
        # With a GPU, the host's cores run CPU optimizer steps.
        torch.set_num_threads(1 if self.device.type == "cpu" else own_cores())
        self.pipeline = Pipeline(
            None, plan, seed=options.seed, optimizer=maker_of(options, plan), device=self.device,
            offload_to=options.offload_to, compile=options.compile, fp8=options.fp8, ema_decay=options.ema_decay,
        )  # fmt: skip
        self._update = post_validated_step if validates_after(options.post_validation, plan) else synchronous_step
        self.online = (
            OnlineScheduler.start(self.pipeline, journal_of(options), steps=options.steps) if options.online else None
        )
        self.step = 0
        """Steps done."""
        self.samples = 0
        """Samples seen."""
        self.traces: list[Trace] = []
        self._validation = validation_of(options, plan)
        self._tokenizer = tokenizer_of(options, plan)
        self._prompt = None if options.prompt is None else tokens_of(options.prompt, self._tokenizer)
        self._pending_reports: deque[StepReport] = deque()
        """Reports of steps whose results are not known yet."""
        self._peaks: tuple[float, ...] = ()
        self._busy: tuple[float, ...] = ()
        self._bubble: float | None = None
        self._measured_step: int | None = None
        run = plan.model_on_cluster
        self._utilization = None if run is None else Utilization.of_run(*run, plan.options, devices=plan.ranks)
        self.saver = None if options.checkpoint is None else Saver(options.checkpoint, keep=options.keep)
        synchronous = self._update is synchronous_step
        self._end_request = None if self.saver is None else EndRequest(wait=synchronous)
        self.ended_by: signal.Signals | None = None
        """The signal that ended the run before its last step, after a checkpoint."""

    @property
    def request_end(self) -> Callable[[signal.Signals], None] | None:
        """Function that requests the run's end after its step; None without checkpoints."""
        return None if self._end_request is None else self._end_request.receive

    @property
    def rows(self) -> int:
        """Sequences per step and replica."""
        return self.plan.micro_batches * self.plan.options.micro_batch_size

    def close(self) -> None:
        """End this rank's data and search processes."""
        if isinstance(self._data, Prefetcher):
            self._data.close()
        if self.online is not None:
            self.online.close()

    def save_weights(self, folder: Path) -> None:
        """Write a Hugging Face checkpoint, of the moving averages if the run has them."""
        with self.averaged():
            self.pipeline.save_pretrained(folder)

    def resume(self, newest: Path, progress: RunProgress) -> None:
        """Continue from a checkpoint."""
        state = state_of(self.pipeline)
        if self.pipeline.averages is not None and progress.recipe.ema_decay is None:
            self.pipeline.averages.restart()
            state = {name: shard for name, shard in state.items() if not name.startswith(AVERAGE)}
        state |= saved_group_numbers(newest)
        load(newest, state)
        restore_numbers(self.pipeline, state)
        self.step = self.pipeline.steps_taken = progress.step
        self.samples = progress.samples
        if progress.loss_scale is not None and self.pipeline.loss_scale is not None:
            self.pipeline.loss_scale.value, self.pipeline.loss_scale.steps_since = progress.loss_scale

    def steps(self) -> Iterator[StepReport]:
        """Take the remaining steps, or those until a signal ends the run, and save checkpoints between them."""
        while self.step < self.options.steps and self.ended_by is None:
            yield from self._take_step()
            if self.saver is not None:
                self.saver.check()
                if self._every(self.options.save_every) or self.ended_by is not None:
                    self.pipeline.status.enter(SAVING_PHASE, local=True)
                    self.saver.save(state_of(self.pipeline), self._progress())
        if self.saver is not None:
            self.pipeline.status.enter(SAVING_PHASE, local=True)
            self.saver.wait()

    def _take_step(self) -> Iterator[StepReport]:
        """Take a step, and yield the reports that are complete: without post-validation, this step's."""
        o, start = self.options, perf_counter()
        rate = learning_rate(self.step, peak=o.peak_rate, warmup=o.warmup, steps=o.steps, schedule=o.lr_schedule)
        set_learning_rate(self.pipeline, rate)
        replica = self.pipeline.ranks.replica
        tokens = self.rows * self.plan.options.data * self.plan.options.sequence_length
        if isinstance(self._data, LengthSteps):
            tokens = self._data.tokens(self.samples)
            self._use_plan(self._data.plan_of(self.samples))
        self.pipeline.status.begin_step()
        with self.pipeline.status.phase(self._data.phase, local=True):
            batch = self._data.batch(self.samples + replica * self.rows, count=self.rows)
        traced = self.online is not None or self.step >= o.steps - TRACED_STEPS
        self.step += 1
        self.samples += self.rows * self.plan.options.data
        # Collectives synchronize the ranks, so they are limited to some steps.
        validates = self._every(o.validate_every)
        validation, prompt = (self._validation, self._prompt) if validates else (None, None)
        collective = (
            traced
            or validation is not None
            or prompt is not None
            or self._every(o.save_every)
            or self.step % METRICS_INTERVAL == 1
            or not self._peaks  # the first step of a resumed run
        )
        self.pipeline.measured.every_step = collective
        try:
            observe = partial(self._observe, traced=traced, collective=collective)
            results = self._update(self.pipeline, batch, observe, clip=o.clip, finish=collective)
            if self._end_request is not None and self.step < o.steps:
                self.ended_by = self._end_request.agreed()
            if self.ended_by is not None and (pending := self.pipeline.finish_update()) is not None:
                results = [*results, pending]
        except DeviceMemoryError as error:
            raise explain_shortage(error, self.plan, memory=self.pipeline.measured.current_memory) from error
        seconds = perf_counter() - start
        news = self._switch_order(self.online, seconds) if self.online is not None and self.step < o.steps else ()
        with self.averaged() if validates else nullcontext():
            validation_loss = None if validation is None else float(self.pipeline.evaluate(validation.batches(replica)))
            sample = None if prompt is None else self._continue_prompt(prompt)
        tokens_per_second = tokens / seconds
        self._pending_reports.append(
            StepReport(
                step=self.step,
                loss=math.nan,
                gradient_norm=math.nan,
                learning_rate=rate,
                seconds=seconds,
                tokens_per_second=tokens_per_second,
                peak_memory=self._peaks,
                busy=self._busy,
                loss_scale=None if self.pipeline.loss_scale is None else self.pipeline.loss_scale.value,
                mfu=None if self._utilization is None else self._utilization.mfu(tokens_per_second),
                bubble_fraction=self._bubble,
                measured_step=self._measured_step,
                validation_loss=validation_loss,
                sample=sample,
                news=news,
            )
        )
        for result in results:
            report = self._pending_reports.popleft()
            news = (*news_of_update(result), *report.news)
            yield replace(
                report, loss=result.loss, gradient_norm=result.norm, rolled_back=result.rolled_back, news=news
            )

    def averaged(self) -> AbstractContextManager[None]:
        """A context in which parameters are replaced by their moving averages, if the run has them."""
        return nullcontext() if self.pipeline.averages is None else self.pipeline.averaged()

    def _continue_prompt(self, prompt: Sequence[int]) -> str:
        """The prompt and a sampled continuation."""
        tokens = self.pipeline.generate(
            torch.tensor([prompt]), new_tokens=self.options.sample_tokens, temperature=TEMPERATURE, seed=self.step
        )
        return text_of(tokens[0].tolist(), self._tokenizer)

    def _observe(self, *, traced: bool, collective: bool) -> None:
        """Collect the trace and metrics of the last step."""
        if traced:
            self.traces = [*self.traces[1 - TRACED_STEPS :], self.pipeline.measured.gather_trace()]
        if collective:
            (step,) = self.pipeline.measured.trace().steps
            metrics: list[tuple[float, DeviceWork]] = [(0.0, NO_WORK)] * dist.get_world_size()
            dist.all_gather_object(metrics, (self.pipeline.measured.peak_memory, DeviceWork.from_events(step.events)))
            peaks, work = zip(*self.pipeline.ranks.first_per_device(metrics), strict=True)
            self._peaks, self._busy, self._bubble = peaks, tuple(d.busy for d in work), bubble_fraction(work)
            self._measured_step = self.step

    def _switch_order(self, online: OnlineScheduler, seconds: float) -> tuple[str, ...]:
        """Switch to a better plan of the online search, if any; returns sentences on what happened."""
        before = len(online.entries)
        plan = online.after_step(self.step, seconds, self.traces[-1].steps[-1])
        if plan is not None:
            self._set_plan(plan)
        return tuple(map(str, online.entries[before:]))

    def _use_plan(self, plan: Plan) -> None:
        """Switch to the plan of a step's class, if that is not the running plan."""
        if plan is not self.plan:
            self.pipeline.switch_plan(plan)
            self._set_plan(plan)

    def _set_plan(self, plan: Plan) -> None:
        """Set the running plan, and drop the traces of steps of the previous one."""
        self.plan, self.traces = plan, []

    def _every(self, interval: int) -> bool:
        """Tell whether this step is a multiple of the interval, or the last."""
        return self.step % interval == 0 or self.step == self.options.steps

    def _progress(self) -> RunProgress:
        scale = self.pipeline.loss_scale
        return RunProgress(
            step=self.step,
            samples=self.samples,
            seed=self.options.seed,
            model=model_of(self.plan).config,
            recipe=self.options.recipe,
            data=self.options.source,
            global_batch=self.plan.degrees.global_batch,
            sequence_length=self.plan.options.sequence_length,
            loss_scale=None if scale is None else (scale.value, scale.steps_since),
        )
