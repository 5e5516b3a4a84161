"""The options of `debubble train`, in the order of its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
    Path | None, typer.Option(help="Text file or directory whose loss is computed, without training on it.")
]
ValidateEvery = Annotated[int, typer.Option(help="Steps between validations.")]
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
Warmup = Annotated[int | None, typer.Option(help="Steps until the peak; then a cosine to a tenth of it (default: 10).")]
WeightDecay = Annotated[float | None, typer.Option(help="AdamW's weight decay (default: 0.01).")]
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
Trace = Annotated[Path | None, typer.Option(help="Write the trace of the last steps here.")]
Html = Annotated[Path | None, typer.Option(help="Write the predicted and measured timelines here.")]
Online = Annotated[bool, typer.Option("--online", help="Search a better order beside the training, and go on with it.")]
