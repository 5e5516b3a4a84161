"""What a training run is asked for, and whether it can be done, before any rank starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from debubble.ir import InputError, Plan
from debubble.training.data import VOCABULARY, Corpus, Sequences


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """One training run; every rank gets the same."""

    plan: Path
    data: Path | None = None
    """Text file or directory; None: the Python standard library's sources."""
    steps: int = 100
    learning_rate: float = 3e-3
    warmup: int = 10
    weight_decay: float = 0.01
    clip: float = 1.0
    """Largest global norm of the gradients."""
    seed: int = 0
    """Of the initial weights and the order of the data."""
    checkpoint: Path | None = None
    """Folder for checkpoints; None: none."""
    save_every: int = 100
    """Steps between checkpoints; the last step always has one."""
    keep: int = 2
    resume: bool = False
    trace: Path | None = None
    """Where the trace of the last steps goes."""
    html: Path | None = None
    """Where the predicted and measured timelines go."""
    json: bool = False


def check(options: TrainOptions) -> Plan:
    """The plan, if this run can be done.  Raises InputError with one sentence if not."""
    plan = runnable(options.plan)
    for name in ("steps", "save_every", "keep"):
        if getattr(options, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(options, name)}.")
    sequences_of(options, plan)
    if options.resume and options.checkpoint is None:
        raise InputError("--resume needs --checkpoint with the folder that holds the checkpoint.")
    if options.checkpoint is not None:
        _check_checkpoints(options, options.checkpoint, plan)
    return plan


def runnable(path: Path) -> Plan:
    """Load a plan that was made for a model.  Raises InputError if it was made from abstract costs."""
    plan = Plan.load(path)
    if plan.model is None:
        raise InputError(f"{path} was made from abstract costs and has no model to run: plan a MODEL instead.")
    return plan


def sequences_of(options: TrainOptions, plan: Plan) -> Sequences:
    """The run's samples.  Raises InputError if the data or the model's vocabulary does not do."""
    assert plan.model is not None
    vocabulary = int(plan.model.get("vocab_size", VOCABULARY))
    if vocabulary < VOCABULARY:
        raise InputError(f"The model's vocabulary has {vocabulary} tokens, but text as bytes needs {VOCABULARY}.")
    return Sequences(corpus=Corpus.load(options.data), sequence_length=plan.options.sequence_length, seed=options.seed)


def _check_checkpoints(options: TrainOptions, folder: Path, plan: Plan) -> None:
    """Refuse to resume without a checkpoint of the plan's model and steps to go, or to mix two runs in a folder."""
    from debubble.training.checkpoint import checkpoints, latest, progress_of

    if plan.options.zero and plan.options.data > 1:
        raise InputError(
            "Checkpoints hold no divided optimizer states: train without --checkpoint, or plan with zero 0."
        )
    if not options.resume:
        if checkpoints(folder):
            raise InputError(f"{folder} holds checkpoints already: add --resume, or give another folder.")
        return
    newest = latest(folder)
    progress = progress_of(newest)
    if progress.model != plan.model:
        raise InputError(f"{newest} is a checkpoint of another model than the plan's.")
    if progress.step >= options.steps:
        raise InputError(f"{newest} has done all of the {options.steps} steps: give more with --steps.")
