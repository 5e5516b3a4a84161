"""The options of `debubble train`, in the order of its help."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from debubble.cli.names import learning_rate_names, name_option
from debubble.cli.options import OptionGroup
from debubble.errors import InputError


@dataclass(frozen=True, kw_only=True)
class TrainingData(OptionGroup):
    """The data for training and for validation."""

    section: ClassVar[str] = "Data"

    data: Annotated[
        Path | None,
        typer.Option(help="Text file or directory (default: the sources of Python's standard library)."),
    ] = None
    tokenizer: Annotated[
        Path | None, typer.Option(help="Hugging Face tokenizer.json or its folder (default: tokens are bytes).")
    ] = None
    separate_texts: Annotated[
        bool,
        typer.Option("--separate-texts", help="Tokens attend to their own text alone, of those packed in a sequence."),
    ] = False
    dataset: Annotated[
        str | None,
        typer.Option(help="module:function that takes the plan and returns a Dataset, instead of --data."),
    ] = None
    validation: Annotated[
        str | None,
        typer.Option(help="Text file or directory whose loss is computed beside; with --dataset: module:function."),
    ] = None
    validate_every: Annotated[int, typer.Option(help="Steps between validations.")] = 100
    prompt: Annotated[str | None, typer.Option(help="Text that the model continues at each validation interval.")] = (
        None
    )
    sample_tokens: Annotated[int, typer.Option(help="Tokens that follow the prompt.")] = 40
    seed: Annotated[int, typer.Option(help="Of the initial weights and the order of the data.")] = 0


@dataclass(frozen=True, kw_only=True)
class Weights(OptionGroup):
    """Source and destination of the weights."""

    section: ClassVar[str] = "Weights"

    load: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of a Hugging Face checkpoint to start from; again for LoRA adapters on top of it."),
    ] = None
    save: Annotated[
        Path | None,
        typer.Option(help="Folder for a Hugging Face checkpoint (of LoRA adapters: peft's) of the trained model."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Recipe(OptionGroup):
    """The settings that a checkpoint remembers; None: not given."""

    section: ClassVar[str] = "Recipe"

    steps: Annotated[
        int | None, typer.Option(help="Training steps, those before a resumed checkpoint included (default: 100).")
    ] = None
    learning_rate: Annotated[
        float | None, typer.Option("--lr", help="Peak of the learning rate (default: 3e-3; with --load 1e-5).")
    ] = None
    warmup: Annotated[int | None, typer.Option(help="Steps until the peak (default: 10).")] = None
    lr_schedule: Annotated[
        str | None,
        name_option(
            learning_rate_names,
            what="schedule of the learning rate",
            help="After the warm-up, to a tenth of the peak: cosine (default), linear, wsd; or constant.",
        ),
    ] = None
    optimizer: Annotated[
        str | None,
        typer.Option(help="adamw, adam, momentum, sgd, or module:Class (default: what the plan was made for)."),
    ] = None
    optimizer_option: Annotated[
        list[str] | None, typer.Option(help="Argument of the optimizer's class, such as betas=[0.9,0.99]; repeatable.")
    ] = None
    weight_decay: Annotated[float | None, typer.Option(help="Weight decay of matrices (default: 0.01).")] = None
    clip: Annotated[float | None, typer.Option(help="Largest global norm of the gradients (default: 1).")] = None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by the names that a checkpoint has; those that were not given are None."""
        names = ("steps", "learning_rate", "warmup", "lr_schedule", "optimizer", "weight_decay", "clip")
        return {name: getattr(self, name) for name in names} | {"optimizer_settings": settings(self.optimizer_option)}


@dataclass(frozen=True, kw_only=True)
class Checkpoints(OptionGroup):
    """Checkpoints of the run, and the way it goes on from one."""

    section: ClassVar[str] = "Checkpoints"

    checkpoint: Annotated[Path | None, typer.Option(help="Folder for checkpoints.")] = None
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100
    keep: Annotated[int, typer.Option(help="Checkpoints to keep.")] = 2
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint, with its settings where none are given.")
    ] = False
    auto_resume: Annotated[
        bool, typer.Option("--auto-resume", help="The same, or start where there is none: for torchrun's restarts.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class Execution(OptionGroup):
    """Execution of the steps."""

    section: ClassVar[str] = "Execution"

    post_validation: Annotated[
        bool | None,
        typer.Option(
            "--post-validation/--no-post-validation",
            help="Update before the gradients' norm is known, and take it back where that was wrong (default: only"
            " for plans made with it; what hosts step does so in any case).",
        ),
    ] = None
    offload_to: Annotated[
        Path | None, typer.Option(help="Folder on a fast disk for offloaded activations (default: host memory).")
    ] = None
    hang_timeout: Annotated[
        float, typer.Option(help="Seconds in which no operation of any rank ends, after which the run does.")
    ] = 600
    online: Annotated[
        bool, typer.Option("--online", help="Search a better order beside the training, and go on with it.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class Records(OptionGroup):
    """The records that a run writes beside its checkpoints."""

    section: ClassVar[str] = "Records"

    tensorboard: Annotated[Path | None, typer.Option(help="Folder for TensorBoard's scalars.")] = None
    wandb: Annotated[str | None, typer.Option(help="Project of Weights & Biases for the same.")] = None
    trace: Annotated[Path | None, typer.Option(help="Write the trace of the last steps here.")] = None
    html: Annotated[Path | None, typer.Option(help="Write the predicted and measured timelines here.")] = None


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
