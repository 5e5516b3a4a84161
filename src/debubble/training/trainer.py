"""The training loop of one rank: steps, checkpoints, and the final comparison of plan and measurement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial

import torch.distributed as dist
from rich.console import Console

from debubble.formatting import time_words
from debubble.ir import InputError, Trace
from debubble.processes import available_cores
from debubble.runtime.launch.failures import RunError, StoppedRunError
from debubble.training.length_plans import LengthSteps, length_plans
from debubble.training.monitoring.progress import Show, StepReport, display, tensorboard, weights_and_biases
from debubble.training.monitoring.report import TrainingSummary, compare_timelines
from debubble.training.monitoring.run_record import RECORD, record
from debubble.training.options import (
    TrainOptions,
    packed_of,
    plan_of,
    samples_of,
    with_checkpoint_settings,
)
from debubble.training.resume import Start, ask_rank_0, checkpoint_to_resume, precision_note
from debubble.training.run_lock import locked
from debubble.training.training_run import TrainingRun
from debubble.training.user_code import Dataset
from debubble.training.watchdog import watch


def train(options: TrainOptions, *, dataset: Dataset | None = None) -> TrainingSummary | None:
    """Train as this rank of the process group.

    Args:
        options: The options of the run; the same on all ranks.
        dataset: A dataset that replaces the data of the options.

    Returns:
        The summary of the run on rank 0; None on other ranks, and if only the weights of a finished run were saved.

    Raises:
        RunError: If there is no checkpoint to resume, it is damaged, or another run writes to its folder; if a signal
            ended the run; and the errors of steps and checkpoints.
    """
    with ExitStack() as locks:
        try:
            ask_rank_0(partial(_lock, options, locks))
            start = checkpoint_to_resume(options)
        except InputError as error:
            raise RunError(str(error)) from error
        return _train_from(start, options, dataset)


def _lock(options: TrainOptions, locks: ExitStack) -> None:
    """Lock the folders that the run writes.  Raises InputError if another run has locked one of them."""
    for folder in {options.checkpoint, options.save}:
        if folder is not None:
            locks.enter_context(locked(folder))


def _train_from(start: Start | None, options: TrainOptions, dataset: Dataset | None) -> TrainingSummary | None:
    """Train from a checkpoint, or from the start."""
    leader = dist.get_rank() == 0
    if start is not None:
        options = replace(with_checkpoint_settings(start.progress, options), seed=start.progress.seed)
        if leader:
            resumed = f"It continues from {start.checkpoint}, after step {start.progress.step} of {options.steps}."
            for note in (*start.notes, resumed):
                Console(stderr=True, highlight=False).print(note, soft_wrap=True)
    plan = ask_rank_0(lambda: plan_of(options, resuming=start is not None))
    if start is not None and leader and (rounded := precision_note(start.checkpoint, plan.options.master_dtype)):
        Console(stderr=True, highlight=False).print(rounded, soft_wrap=True)
    sequences = packed_of(options, plan)
    if sequences is None:
        run = TrainingRun(options, plan, samples_of(options, plan, dataset))
    else:
        make_plans = partial(length_plans, plan, sequences, steps=options.steps, folder=options.checkpoint)
        plans = ask_rank_0(make_plans)
        if leader:
            times = ", ".join(time_words(class_plan.simulate().makespan, seconds=True) for class_plan in plans)
            Console(stderr=True, highlight=False).print(f"Predicted for a step, by its lengths: {times}.")
        run = TrainingRun(options, plans[0], LengthSteps(plans, sequences))
    if start is not None:
        run.resume(start.checkpoint, start.progress)
    else:
        for folder in options.load:
            run.pipeline.load_pretrained(folder)
    if run.step == options.steps:
        _save_weights(run, leader=leader)
        return None
    reports: list[StepReport] = []
    with ExitStack() as stack:
        displays = _displays(options, done=run.step, cores=_shared_cores(run)) if leader else ()
        shows = [stack.enter_context(display) for display in displays]
        stack.callback(run.close)
        stack.enter_context(watch(run.pipeline, timeout=options.hang_timeout, request_end=run.request_end))
        for report in run.steps():
            reports.append(report)
            for show in shows:
                show(report)
        if run.saver is not None and run.ended_by is not None:
            raise StoppedRunError(
                f"The run was stopped by a signal after step {run.step} of {options.steps}: go on from"
                f" {run.saver.newest} by the same call with --resume."
            )
    if options.save is not None:
        run.save_weights(options.save)
    cores = _shared_cores(run)
    steps = tuple(step for traced in run.traces for step in traced.steps)
    trace = Trace(devices=run.plan.devices, steps=steps, cores=cores)
    allocator = run.pipeline.measured.gather_allocator_peaks()
    if not leader:
        return None
    if options.trace is not None:
        trace.save(options.trace)
    comparison = compare_timelines(run.plan, trace, html=options.html)
    return TrainingSummary(
        reports=reports,
        comparison=comparison,
        checkpoint=run.saver.newest if run.saver else None,
        allocator=allocator,
        switches=run.online.entries if run.online else (),
    )


def _save_weights(run: TrainingRun, *, leader: bool) -> None:
    """Write the weights of a finished run."""
    assert run.options.save is not None
    run.close()
    run.save_weights(run.options.save)
    if leader:
        words = f"All {run.options.steps} steps are taken: its weights are in {run.options.save}."
        Console(stderr=True, highlight=False).print(words, soft_wrap=True)


def _shared_cores(run: TrainingRun) -> int | None:
    """The number of CPU cores that the run's devices share; None if they are GPUs."""
    return available_cores() if run.device.type == "cpu" else None


def _displays(options: TrainOptions, *, done: int, cores: int | None) -> Iterator[AbstractContextManager[Show]]:
    """The displays and loggers of step reports."""
    yield display(steps=options.steps, done=done)
    metrics = options.metrics or (options.checkpoint and options.checkpoint / RECORD)
    if metrics is not None:
        yield record(metrics, plan=options.plan, done=done, steps=options.steps, cores=cores)
    if options.tensorboard is not None:
        yield tensorboard(options.tensorboard, done=done)
    if options.wandb is not None:
        yield weights_and_biases(options.wandb, options.recipe.settings)
