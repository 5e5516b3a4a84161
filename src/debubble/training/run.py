"""One rank's training run: steps, checkpoints, and at the end the plan against what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist

from debubble.ir import Trace
from debubble.runtime.pipeline import Pipeline
from debubble.training import checkpoint
from debubble.training.checkpoint import Saver
from debubble.training.checkpoint_folder import Progress, progress_of
from debubble.training.learning_rate import learning_rate
from debubble.training.options import RECIPE, TrainOptions, runnable, sequences_of, start_of
from debubble.training.progress import Display, StepReport
from debubble.training.report import Outcome, available_cores, compared
from debubble.training.state import adamw, set_learning_rate, state_of

TRACED = 10
"""The last steps are traced; the plan is compared with the typical one of them."""


def train(options: TrainOptions) -> Outcome | None:
    """Train as this rank of the process group.  Rank 0 has the outcome."""
    newest = _agreed(start_of(options))
    run = Run(options) if newest is None else Run.resumed(options, newest)
    leader = dist.get_rank() == 0
    display = Display(steps=options.steps, done=run.done) if leader else None
    reports: list[StepReport] = []
    with display or nullcontext():
        for report in run.steps():
            reports.append(report)
            if display is not None:
                display.show(report)
    trace = Trace(devices=run.plan.devices, steps=tuple(step for part in run.traces for step in part.steps))
    if not leader:
        return None
    if options.trace is not None:
        trace.save(options.trace)
    cores = available_cores() if run.device.type == "cpu" else None
    comparison = compared(run.plan, trace, cores=cores, html=options.html)
    return Outcome(reports=reports, comparison=comparison, checkpoint=run.saver.newest if run.saver else None)


class Run:
    """The state of a run on this rank."""

    def __init__(self, options: TrainOptions) -> None:
        self.options, self.plan = options, runnable(options.plan)
        self.device = _device()
        if self.device.type == "cpu":
            torch.set_num_threads(1)
        self.pipeline = Pipeline(
            None, self.plan, seed=options.seed, optimizer=adamw(weight_decay=options.weight_decay), device=self.device
        )
        self.sequences = sequences_of(options, self.plan)
        self.done = 0
        """Steps."""
        self.samples = 0
        self.traces: list[Trace] = []
        self.saver = None if options.checkpoint is None else Saver(options.checkpoint, keep=options.keep)

    @property
    def rows(self) -> int:
        """Sequences per step and replica."""
        return self.plan.micro_batches * self.plan.options.micro_batch_size

    @staticmethod
    def resumed(options: TrainOptions, newest: Path) -> Run:
        """Go on where a checkpoint stands."""
        progress = progress_of(newest)
        run = Run(replace(options, seed=progress.seed))
        checkpoint.load(newest, state_of(run.pipeline))
        run.done = run.pipeline.steps = progress.step
        run.samples = progress.samples
        return run

    def steps(self) -> Iterator[StepReport]:
        """Take the steps that remain, saving checkpoints between them."""
        while self.done < self.options.steps:
            yield self._step()
            if self.saver is not None:
                self.saver.check()
                if self._due():
                    self.saver.save(state_of(self.pipeline), self._progress())
        if self.saver is not None:
            self.saver.wait()

    def _step(self) -> StepReport:
        o, start = self.options, perf_counter()
        rate = learning_rate(self.done, peak=o.learning_rate, warmup=o.warmup, steps=o.steps)
        set_learning_rate(self.pipeline, rate)
        replica = dist.get_rank() // self.plan.devices
        tokens = self.sequences.batch(self.samples + replica * self.rows, count=self.rows)
        loss = float(self.pipeline.step(torch.from_numpy(tokens)))
        held = self.pipeline.static_bytes + self.pipeline.peak_activation
        if self.done >= o.steps - TRACED:
            self.traces.append(self.pipeline.gather_trace())
        self.pipeline.update(o.clip)
        self.done += 1
        self.samples += self.rows * self.plan.options.data
        peaks: list[float] = [0.0] * dist.get_world_size()
        dist.all_gather_object(peaks, held)
        seconds = perf_counter() - start
        return StepReport(
            step=self.done,
            loss=loss,
            learning_rate=rate,
            seconds=seconds,
            tokens_per_second=self.rows * self.plan.options.data * self.plan.options.sequence_length / seconds,
            peak_memory=tuple(peaks[: self.plan.devices]),
        )

    def _due(self) -> bool:
        return self.done % self.options.save_every == 0 or self.done == self.options.steps

    def _progress(self) -> Progress:
        assert self.plan.model is not None
        return Progress(
            step=self.done,
            samples=self.samples,
            seed=self.options.seed,
            model=self.plan.model,
            recipe={name: getattr(self.options, name) for name in RECIPE},
        )


def _agreed(newest: Path | None) -> Path | None:
    """What rank 0 has found: hosts may see a shared folder change at different times."""
    told = [newest]
    dist.broadcast_object_list(told)
    return told[0]


def _device() -> torch.device:
    """A GPU of its own where the ranks talk NCCL, else the CPU."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
