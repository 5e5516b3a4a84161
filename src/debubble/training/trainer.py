"""The training loop of one rank: steps, checkpoints, and at the end the plan against what was measured."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from debubble.costs.flops import Utilization
from debubble.ir import InputError, Plan, Trace
from debubble.runtime import Batch
from debubble.runtime.failures import DeviceMemoryError, RunError, leave
from debubble.runtime.parameters.post_validation import Settled
from debubble.runtime.pipeline import Pipeline
from debubble.training.checkpoint import saver as checkpoint
from debubble.training.checkpoint.folder import Progress
from debubble.training.checkpoint.resume import choose
from debubble.training.checkpoint.saver import Saver, agreed
from debubble.training.checkpoint.state import adamw, set_learning_rate, state_of
from debubble.training.data.datasets import Dataset, Prefetched, Samples, samples_of
from debubble.training.learning_rate import learning_rate
from debubble.training.memory_check import explained
from debubble.training.metrics import NOTHING, Computed, bubble_fraction
from debubble.training.online.controller import Online
from debubble.training.options import TrainOptions, journal_of, plan_of, settled_by, validates_after
from debubble.training.progress import Display, Scalars, StepReport
from debubble.training.report import Outcome, available_cores, compared
from debubble.training.watchdog import SAVING, Watchdog


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a step came to."""

    loss: float
    norm: float
    """Of all gradients, before clipping."""
    rolled_back: int = 0
    """Devices that took their update back."""
    skipped: bool = False
    """Whether a gradient had an inf or NaN, so that nothing was updated."""

    def news(self, step: int) -> tuple[str, ...]:
        """What a user should hear of, in sentences."""
        sentences = []
        if self.rolled_back:
            devices = "1 device" if self.rolled_back == 1 else f"{self.rolled_back} devices"
            reason = "a gradient was inf or NaN" if self.skipped else f"the gradients' norm was {self.norm:.3g}"
            sentences.append(f"{reason}: {devices} took the update back")
        if self.skipped:
            sentences.append("a gradient was inf or NaN: no parameter was updated")
        return tuple(f"step {step}: {sentence}" for sentence in sentences)


class Synchronous:
    """Every step is over on all ranks before the next begins; what hosts step inside it is validated at its end."""

    def __init__(self, pipeline: Pipeline, *, clip: float) -> None:
        self._pipeline, self._clip = pipeline, clip

    def take(self, batch: Batch, observe: Callable[[], None], *, settle: bool) -> Sequence[Result]:
        """Take a step and `observe` it; the results of all steps that are known then, those asked to settle too."""
        loss = float(self._pipeline.step(batch))
        norm = self._pipeline.update(self._clip)
        assert norm is not None
        observe()
        back = self._pipeline.rolled_back
        return [Result(loss=loss, norm=float(norm), rolled_back=back, skipped=not math.isfinite(norm))]


class PostValidated:
    """A step's update is validated during the next one's forwards: its result comes a step late, unless settled."""

    def __init__(self, pipeline: Pipeline, *, clip: float) -> None:
        self._pipeline, self._clip = pipeline, clip

    def take(self, batch: Batch, observe: Callable[[], None], *, settle: bool) -> Sequence[Result]:
        """The same."""
        known = [self._pipeline.advance(batch, max_norm=self._clip)]
        if settle:
            known.append(self._pipeline.settle())
        observe()
        return [_result(settled) for settled in known if settled is not None]


def _result(settled: Settled) -> Result:
    return Result(loss=settled.loss, norm=settled.norm, rolled_back=settled.rolled_back, skipped=settled.skipped)


TOGETHER = 10
"""All ranks are asked for their memory in every so many steps."""

TRACED = 10
"""The last steps are traced; the plan is compared with the typical one of them."""


def train(options: TrainOptions, *, dataset: Dataset | None = None) -> Outcome | None:
    """Train as this rank of the process group, on `dataset` or the data of the options.  Rank 0 has the outcome."""
    leader = dist.get_rank() == 0
    try:
        start = choose(options)
    except InputError as error:
        raise RunError(str(error)) from error
    if start is not None:
        options = replace(settled_by(start.progress, options), seed=start.progress.seed)
        if leader:
            for note in start.notes:
                Console(stderr=True, highlight=False).print(note, soft_wrap=True)
    plan = agreed(lambda: plan_of(options, resuming=start is not None))
    run = Run(options, plan, samples_of(options, plan, dataset))
    if start is not None:
        run.go_on_from(start.checkpoint, start.progress)
    else:
        for folder in options.load:
            run.pipeline.load_pretrained(folder)
    display = Display(steps=options.steps, done=run.done) if leader else None
    scalars = Scalars(options.tensorboard, done=run.done) if leader and options.tensorboard is not None else None
    reports: list[StepReport] = []
    with display or nullcontext(), scalars or nullcontext(), run.online or nullcontext(), run.watchdog():
        for report in run.steps():
            reports.append(report)
            for shown in (display, scalars):
                if shown is not None:
                    shown.show(report)
    if options.save is not None:
        run.pipeline.save_pretrained(options.save)
    cores = available_cores() if run.device.type == "cpu" else None
    steps = tuple(step for part in run.traces for step in part.steps)
    trace = Trace(devices=run.plan.devices, steps=steps, cores=cores)
    if not leader:
        return None
    if options.trace is not None:
        trace.save(options.trace)
    comparison = compared(run.plan, trace, html=options.html)
    return Outcome(
        reports=reports,
        comparison=comparison,
        checkpoint=run.saver.newest if run.saver else None,
        switches=run.online.entries if run.online else (),
    )


class Run:
    """The state of a run on this rank."""

    def __init__(self, options: TrainOptions, plan: Plan, samples: Samples) -> None:
        self.options, self.plan = options, plan
        self.samples = Prefetched(samples, stride=self.rows * plan.options.data)
        self.device = _device()
        if self.device.type == "cpu":
            torch.set_num_threads(1)
        self.pipeline = Pipeline(
            None, plan, seed=options.seed, optimizer=adamw(weight_decay=options.weight_decay), device=self.device,
            offload_to=options.offload_to,
        )  # fmt: skip
        ahead = validates_after(options.post_validation, plan)
        self.updating = (PostValidated if ahead else Synchronous)(self.pipeline, clip=options.clip)
        self.online = Online.beside(self.pipeline, journal_of(options)) if options.online else None
        self.done = 0
        """Steps."""
        self.seen = 0
        """Samples."""
        self.traces: list[Trace] = []
        self._unknown: deque[StepReport] = deque()
        """Reports of steps whose results are not known yet."""
        self._peaks: tuple[float, ...] = ()
        self._bubble: float | None = None
        self._utilization = Utilization.of(plan)
        self.saver = None if options.checkpoint is None else Saver(options.checkpoint, keep=options.keep)

    @property
    def rows(self) -> int:
        """Sequences per step and replica."""
        return self.plan.micro_batches * self.plan.options.micro_batch_size

    def go_on_from(self, newest: Path, progress: Progress) -> None:
        """Take up a checkpoint's state."""
        checkpoint.load(newest, state_of(self.pipeline))
        self.done = self.pipeline.steps = progress.step
        self.seen = progress.samples

    def steps(self) -> Iterator[StepReport]:
        """Take the steps that remain, saving checkpoints between them."""
        while self.done < self.options.steps:
            yield from self._step()
            if self.saver is not None:
                self.saver.check()
                if self._due():
                    self.pipeline.activity.enter(SAVING, own=True)
                    self.saver.save(state_of(self.pipeline), self._progress())
        if self.saver is not None:
            self.pipeline.activity.enter(SAVING, own=True)
            self.saver.wait()

    def _step(self) -> Iterator[StepReport]:
        """Take a step, and report all that are known now: without post-validation, this one."""
        o, start = self.options, perf_counter()
        rate = learning_rate(self.done, peak=o.peak_rate, warmup=o.warmup, steps=o.steps)
        set_learning_rate(self.pipeline, rate)
        replica = self.pipeline.ranks.replica
        self.pipeline.activity.begin_step()
        with self.pipeline.activity.during("reads data", own=True):
            batch = self.samples.batch(self.seen + replica * self.rows, count=self.rows)
        traced = self.online is not None or self.done >= o.steps - TRACED
        self.done += 1
        self.seen += self.rows * self.plan.options.data
        # Whatever asks all ranks makes them wait for each other: not in every step, if they need not otherwise.
        together = traced or self._due() or self.done % TOGETHER == 1
        try:
            results = self.updating.take(
                batch, partial(self._observe, traced=traced, together=together), settle=together
            )
        except DeviceMemoryError as error:
            raise explained(error, self.plan, held=self.pipeline.held) from error
        seconds = perf_counter() - start
        news = self._reschedule(self.online, seconds) if self.online is not None and self.done < o.steps else ()
        tokens_per_second = self.rows * self.plan.options.data * self.plan.options.sequence_length / seconds
        self._unknown.append(
            StepReport(
                step=self.done,
                loss=math.nan,
                learning_rate=rate,
                seconds=seconds,
                tokens_per_second=tokens_per_second,
                peak_memory=self._peaks,
                mfu=None if self._utilization is None else self._utilization.mfu(tokens_per_second),
                bubble_fraction=self._bubble,
                news=news,
            )
        )
        for result in results:
            report = self._unknown.popleft()
            yield replace(
                report, loss=result.loss, rolled_back=result.rolled_back, news=(*result.news(report.step), *report.news)
            )

    def _observe(self, *, traced: bool, together: bool) -> None:
        """Measure the step that has just been taken."""
        if traced:
            self.traces = [*self.traces[1 - TRACED :], self.pipeline.gather_trace()]
        if together:
            told: list[tuple[float, Computed]] = [(0.0, NOTHING)] * dist.get_world_size()
            dist.all_gather_object(told, (self.pipeline.peak_memory, self._computed()))
            mine = self.pipeline.ranks.of_devices(told)
            self._peaks, self._bubble = tuple(held for held, _ in mine), bubble_fraction([done for _, done in mine])

    def _computed(self) -> Computed:
        (step,) = self.pipeline.trace().steps
        return Computed.of(step.events)

    def _reschedule(self, online: Online, seconds: float) -> tuple[str, ...]:
        """Between two steps: go on with another order, if there is a better one.  Returns what happened."""
        before = len(online.entries)
        plan = online.after_step(self.done, seconds, self.traces[-1].steps[-1])
        if plan is not None:
            # The plan is compared with its own steps alone.
            self.plan, self.traces = plan, []
        return tuple(map(str, online.entries[before:]))

    def watchdog(self) -> Watchdog:
        """Ends this rank if the run hangs."""
        return Watchdog(
            self.pipeline.activity,
            store=PrefixStore("watchdog", _get_default_store()),
            rank=dist.get_rank(),
            ranks=dist.get_world_size(),
            patience=self.options.hang_timeout,
            leave=leave,
        )

    def _due(self) -> bool:
        return self.done % self.options.save_every == 0 or self.done == self.options.steps

    def _progress(self) -> Progress:
        assert self.plan.model is not None
        return Progress(
            step=self.done,
            samples=self.seen,
            seed=self.options.seed,
            model=self.plan.model,
            recipe=self.options.recipe,
        )


def _device() -> torch.device:
    """A GPU of its own where the ranks talk NCCL, else the CPU."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
