"""`debubble train`: run a plan on real data."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from debubble.cli.app import app, require_torch
from debubble.cli.names import learning_rate_names
from debubble.cli.options import OptionGroup, PlanFile, option, with_option_groups
from debubble.cli.output import Json, log
from debubble.errors import InputError
from debubble.files import check_writable
from debubble.training import settings


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
        own = {"optimizer_settings": _arguments(self.optimizer_option), "ema_decay": self.ema}
        return {name: getattr(self, name) for name in names} | own


def _arguments(given: Sequence[str] | None) -> dict[str, Any] | None:
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


@app.command(rich_help_panel="Run")
@with_option_groups
def train(
    plan: PlanFile,
    *,
    data: settings.TrainingData,
    weights: Weights,
    recipe: Recipe,
    checkpoints: settings.Checkpoints,
    execution: settings.Execution,
    records: settings.Records,
    json: Json = False,
) -> None:
    """Run a plan made for a MODEL: start its ranks here, or join when started by torchrun."""
    require_torch()
    from debubble.training.checks import check
    from debubble.training.options import TrainOptions, frozen_remark, rate_remark, with_settings

    options = TrainOptions(
        plan=plan, load=tuple(weights.load or ()), save=weights.save, json=json,
        **vars(data), **vars(checkpoints), **vars(execution), **vars(records),
    )  # fmt: skip
    options = with_settings(recipe.settings, options)
    checked = check(options)
    from debubble.runtime.launch.launcher import encode_options, is_torchrun_rank, start
    from debubble.training.memory_check import check_host_memory

    if not is_torchrun_rank() and (
        remark := check_host_memory(checked, offload_to_disk=execution.offload_to is not None)
    ):
        log().print(remark)
    if os.environ.get("RANK", "0") == "0":
        check_writable(records.trace, records.html)
        for remark in (rate_remark(options), frozen_remark(options, checked)):
            if remark:
                log().print(remark)
    start("debubble.training.rank", encode_options(options), ranks=checked.ranks, hang_timeout=options.hang_timeout)
