"""The settings of a training run, in groups, with their help texts for the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from debubble.errors import InputError


def setting(help: str, *declarations: str, default: Any = None, min: int | None = None) -> Any:
    """A dataclass field of a setting.

    Args:
        help: Help text of its command-line option.
        declarations: Names of the option, if they differ from the field's name.
        default: Default value.
        min: Minimum value.
    """
    return field(default=default, metadata={"help": help, "declarations": declarations, "min": min})


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The data for training and for validation."""

    section: ClassVar[str] = "Data"

    data: Path | None = setting("Text file or directory (default: the sources of Python's standard library).")
    tokenizer: Path | None = setting("Hugging Face tokenizer.json or its folder (default: tokens are bytes).")
    separate_texts: bool = setting(
        "Tokens attend to their own text alone, of those packed in a sequence.", default=False
    )
    dataset: str | None = setting("module:function that takes the plan and returns a Dataset, instead of --data.")
    lengths: Path | None = setting(
        "JSON lines with `input_ids`, sequences of their own lengths, instead of --data: packed without padding, by a"
        " plan for each class of steps."
    )
    validation: str | None = setting(
        "Text file or directory whose loss is computed too; with --dataset: module:function."
    )
    validate_every: int = setting("Steps between validations.", default=100, min=1)
    prompt: str | None = setting("Text that the model continues at each validation interval.")
    sample_tokens: int = setting("Tokens that follow the prompt.", default=40, min=1)
    seed: int = setting("Of the initial weights and the order of the data.", default=0, min=0)

    def check_files(self) -> None:
        """Raise InputError for files that do not exist, before torch is imported."""
        for name in ("data", "tokenizer", "lengths"):
            file = getattr(self, name)
            try:
                if file is not None:
                    file.stat()
            except OSError as error:
                raise InputError(f"--{name}: {file} cannot be read: {error.strerror}.") from error


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Saving checkpoints and resuming from them."""

    section: ClassVar[str] = "Checkpoints"

    checkpoint: Path | None = setting("Folder for checkpoints.")
    save_every: int = setting("Steps between checkpoints.", default=100, min=1)
    keep: int = setting("Checkpoints to keep.", default=2, min=1)
    resume: bool = setting(
        "Go on from the newest checkpoint, with its settings where none are given; the data has to be given again.",
        default=False,
    )
    auto_resume: bool = setting("The same, or start where there is none: for torchrun's restarts.", default=False)

    def check_folder_given(self) -> None:
        """Raise InputError if the run is to resume without a checkpoint folder."""
        if (self.resume or self.auto_resume) and self.checkpoint is None:
            raise InputError("--resume needs --checkpoint with the folder that holds the checkpoint.")


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Execution of the steps."""

    section: ClassVar[str] = "Execution"

    post_validation: bool | None = setting(
        "Update before the gradients' norm is known, and take it back where that was wrong (default: only"
        " for plans made with it; what hosts step does so in any case).",
        "--post-validation/--no-post-validation",
    )
    compile: bool = setting("Compile the units with torch.compile, in the first step.", default=False)
    fp8: bool = setting("Multiply in 8 bits, through torchao, on GPUs that can.", default=False)
    offload_to: Path | None = setting("Folder on a fast disk for offloaded activations (default: host memory).")
    hang_timeout: float = setting(
        "Seconds in which no operation of any rank ends, after which the run does.", default=600, min=0
    )
    online: bool = setting("Search a better order during the training, and continue with it.", default=False)


@dataclass(frozen=True, kw_only=True)
class Records:
    """The records that a run writes besides its checkpoints."""

    section: ClassVar[str] = "Records"

    metrics: Path | None = setting(
        "File for a line of JSON a step, which `debubble watch` reads (default: metrics.jsonl among the checkpoints)."
    )
    tensorboard: Path | None = setting("Folder for TensorBoard's scalars.")
    wandb: str | None = setting("Project of Weights & Biases for the same.")
    trace: Path | None = setting("Write the trace of the last steps here.")
    html: Path | None = setting("Write the predicted and measured timelines here.")
