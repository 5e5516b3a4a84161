"""The options of `debubble train`, in the order of its help."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from debubble.cli.names import learning_rate_names
from debubble.cli.options import OptionGroup, flag, option
from debubble.errors import InputError


@dataclass(frozen=True, kw_only=True)
class TrainingData(OptionGroup):
    """The data for training and for validation."""

    section: ClassVar[str] = "Data"

    data: Path | None = option("Text file or directory (default: the sources of Python's standard library).")
    tokenizer: Path | None = option("Hugging Face tokenizer.json or its folder (default: tokens are bytes).")
    separate_texts: bool = flag("Tokens attend to their own text alone, of those packed in a sequence.")
    dataset: str | None = option("module:function that takes the plan and returns a Dataset, instead of --data.")
    validation: str | None = option(
        "Text file or directory whose loss is computed beside; with --dataset: module:function."
    )
    validate_every: int = option("Steps between validations.", default=100)
    prompt: str | None = option("Text that the model continues at each validation interval.")
    sample_tokens: int = option("Tokens that follow the prompt.", default=40)
    seed: int = option("Of the initial weights and the order of the data.", default=0)


@dataclass(frozen=True, kw_only=True)
class Weights(OptionGroup):
    """Source and destination of the weights."""

    section: ClassVar[str] = "Weights"

    load: list[Path] | None = option(
        "Folder of a Hugging Face checkpoint to start from; again for LoRA adapters on top of it."
    )
    save: Path | None = option("Folder for a Hugging Face checkpoint (of LoRA adapters: peft's) of the trained model.")


@dataclass(frozen=True, kw_only=True)
class Recipe(OptionGroup):
    """The settings that a checkpoint remembers; None: not given."""

    section: ClassVar[str] = "Recipe"

    steps: int | None = option("Training steps, those before a resumed checkpoint included (default: 100).")
    learning_rate: float | None = option("Peak of the learning rate (default: 3e-3; with --load 1e-5).", "--lr")
    warmup: int | None = option("Steps until the peak (default: 10).")
    lr_schedule: str | None = option(
        "After the warm-up, to a tenth of the peak: cosine (default), linear, wsd; or constant.",
        names=learning_rate_names,
        what="schedule of the learning rate",
    )
    optimizer: str | None = option("adamw, adam, momentum, sgd, or module:Class (default: what the plan was made for).")
    optimizer_option: list[str] | None = option(
        "Argument of the optimizer's class, such as betas=[0.9,0.99]; repeatable."
    )
    weight_decay: float | None = option("Weight decay of matrices (default: 0.01).")
    clip: float | None = option("Largest global norm of the gradients (default: 1).")
    ema: float | None = option(
        "Decay of a moving average of the weights, such as 0.999, which validation, samples and --save use"
        " (default: there is none)."
    )

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by the names that a checkpoint has; those that were not given are None."""
        names = ("steps", "learning_rate", "warmup", "lr_schedule", "optimizer", "weight_decay", "clip")
        own = {"optimizer_settings": settings(self.optimizer_option), "ema_decay": self.ema}
        return {name: getattr(self, name) for name in names} | own


@dataclass(frozen=True, kw_only=True)
class Checkpoints(OptionGroup):
    """Checkpoints of the run, and the way it goes on from one."""

    section: ClassVar[str] = "Checkpoints"

    checkpoint: Path | None = option("Folder for checkpoints.")
    save_every: int = option("Steps between checkpoints.", default=100)
    keep: int = option("Checkpoints to keep.", default=2)
    resume: bool = flag("Go on from the newest checkpoint, with its settings where none are given.")
    auto_resume: bool = flag("The same, or start where there is none: for torchrun's restarts.")


@dataclass(frozen=True, kw_only=True)
class Execution(OptionGroup):
    """Execution of the steps."""

    section: ClassVar[str] = "Execution"

    post_validation: bool | None = option(
        "Update before the gradients' norm is known, and take it back where that was wrong (default: only"
        " for plans made with it; what hosts step does so in any case).",
        "--post-validation/--no-post-validation",
    )
    compile: bool = flag("Compile the units with torch.compile, in the first step.")
    fp8: bool = flag("Multiply in 8 bits, through torchao, on GPUs that can.")
    offload_to: Path | None = option("Folder on a fast disk for offloaded activations (default: host memory).")
    hang_timeout: float = option(
        "Seconds in which no operation of any rank ends, after which the run does.", default=600
    )
    online: bool = flag("Search a better order beside the training, and go on with it.")


@dataclass(frozen=True, kw_only=True)
class Records(OptionGroup):
    """The records that a run writes beside its checkpoints."""

    section: ClassVar[str] = "Records"

    tensorboard: Path | None = option("Folder for TensorBoard's scalars.")
    wandb: str | None = option("Project of Weights & Biases for the same.")
    trace: Path | None = option("Write the trace of the last steps here.")
    html: Path | None = option("Write the predicted and measured timelines here.")


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
