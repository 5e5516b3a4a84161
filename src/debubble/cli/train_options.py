"""The options of `debubble train` that are not settings of its run as they stand (see `training.settings`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from debubble.cli.names import learning_rate_names
from debubble.cli.options import OptionGroup, option
from debubble.errors import InputError


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
