"""The options of `debubble train`, in the order of its help."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from debubble.errors import InputError

Plan = Annotated[Path, typer.Argument(help="A plan file, made for a MODEL.")]
Data = Annotated[
    Path | None,
    typer.Option(help="Text file or directory (default: the sources of Python's standard library)."),
]
Tokenizer = Annotated[
    Path | None, typer.Option(help="Hugging Face tokenizer.json or its folder (default: tokens are bytes).")
]
Dataset = Annotated[
    str | None,
    typer.Option(help="module:function that takes the plan and returns a Dataset, instead of --data."),
]
Validation = Annotated[
    str | None,
    typer.Option(
        help="Text file or directory whose loss is computed, without training on it; with --dataset: module:function."
    ),
]
ValidateEvery = Annotated[int, typer.Option(help="Steps between validations.")]
Prompt = Annotated[str | None, typer.Option(help="Text that the model continues at each validation interval.")]
SampleTokens = Annotated[int, typer.Option(help="Tokens that follow the prompt.")]
Load = Annotated[
    list[Path] | None,
    typer.Option(help="Folder of a Hugging Face checkpoint to start from; again for LoRA adapters on top of it."),
]
Save = Annotated[
    Path | None,
    typer.Option(help="Folder for a Hugging Face checkpoint (of LoRA adapters: peft's) of the trained model."),
]
Steps = Annotated[
    int | None, typer.Option(help="Training steps, those before a resumed checkpoint included (default: 100).")
]
LearningRate = Annotated[
    float | None, typer.Option("--lr", help="Peak of the learning rate (default: 3e-3; with --load 1e-5).")
]
Warmup = Annotated[int | None, typer.Option(help="Steps until the peak (default: 10).")]
LrSchedule = Annotated[
    str | None,
    typer.Option(help="After the warm-up, to a tenth of the peak: cosine (default), linear, wsd; or constant."),
]
Optimizer = Annotated[
    str | None,
    typer.Option(help="adamw, adam, momentum, sgd, or module:Class (default: what the plan was made for)."),
]
OptimizerOption = Annotated[
    list[str] | None, typer.Option(help="Argument of the optimizer's class, such as betas=[0.9,0.99]; repeatable.")
]
WeightDecay = Annotated[float | None, typer.Option(help="Weight decay of matrices (default: 0.01).")]
Clip = Annotated[float | None, typer.Option(help="Largest global norm of the gradients (default: 1).")]
PostValidation = Annotated[
    bool | None,
    typer.Option(
        "--post-validation/--no-post-validation",
        help="Update before the gradients' norm is known, and take it back where that was wrong (default: only"
        " for plans made with it; what hosts step does so in any case).",
    ),
]
Seed = Annotated[int, typer.Option(help="Of the initial weights and the order of the data.")]
Checkpoint = Annotated[Path | None, typer.Option(help="Folder for checkpoints.")]
SaveEvery = Annotated[int, typer.Option(help="Steps between checkpoints.")]
Keep = Annotated[int, typer.Option(help="Checkpoints to keep.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on from the newest checkpoint, with its settings where none are given.")
]
AutoResume = Annotated[
    bool, typer.Option("--auto-resume", help="The same, or start where there is none: for torchrun's restarts.")
]
HangTimeout = Annotated[
    float, typer.Option(help="Seconds in which no operation of any rank ends, after which the run does.")
]
OffloadTo = Annotated[
    Path | None, typer.Option(help="Folder on a fast disk for offloaded activations (default: host memory).")
]
Tensorboard = Annotated[Path | None, typer.Option(help="Folder for TensorBoard's scalars.")]
Wandb = Annotated[str | None, typer.Option(help="Project of Weights & Biases for the same.")]
Trace = Annotated[Path | None, typer.Option(help="Write the trace of the last steps here.")]
Html = Annotated[Path | None, typer.Option(help="Write the predicted and measured timelines here.")]
Online = Annotated[bool, typer.Option("--online", help="Search a better order beside the training, and go on with it.")]


def settings(given: Sequence[str] | None) -> dict[str, Any] | None:
    """Read arguments given as NAME=VALUE, each value as JSON, or as a word.  Raises InputError for another form."""
    if given is None:
        return None
    read: dict[str, Any] = {}
    for argument in given:
        name, sign, text = argument.partition("=")
        if not (sign and name.isidentifier()):
            raise InputError(f"--optimizer-option takes NAME=VALUE, not '{argument}'.")
        try:
            read[name] = json.loads(text)
        except json.JSONDecodeError:
            read[name] = text
    return read
