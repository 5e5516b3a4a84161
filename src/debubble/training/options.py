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
    if options.resume:
        check_resume(options, plan)
    return plan


def runnable(path: Path) -> Plan:
    """Load a plan that was made for a model.  Raises InputError if it was made from abstract costs."""
    plan = Plan.load(path)
    if plan.model is None or plan.partition is None:
        raise InputError(f"{path} was made from abstract costs and has no model to run: plan a MODEL instead.")
    return plan


def sequences_of(options: TrainOptions, plan: Plan) -> Sequences:
    """The run's samples.  Raises InputError if the data or the model's vocabulary does not do."""
    assert plan.model is not None
    vocabulary = int(plan.model.get("vocab_size", VOCABULARY))
    if vocabulary < VOCABULARY:
        raise InputError(f"The model's vocabulary has {vocabulary} tokens, but text as bytes needs {VOCABULARY}.")
    return Sequences(corpus=Corpus.load(options.data), sequence_length=plan.options.sequence_length, seed=options.seed)


def check_resume(options: TrainOptions, plan: Plan) -> None:
    """Raise InputError unless there is a checkpoint of the plan's model."""
    from debubble.training.checkpoint import latest, progress_of

    assert options.checkpoint is not None
    checkpoint = latest(options.checkpoint)
    if progress_of(checkpoint).model != plan.model:
        raise InputError(f"{checkpoint} is a checkpoint of another model than the plan's.")
