"""`debubble train`: run a plan on real data."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from debubble.cli.app import app, require_torch
from debubble.cli.names import dtype_names, learning_rate_names
from debubble.cli.options import CLUSTER, OptionGroup, PlanFile, option, parse_cluster, with_option_groups
from debubble.cli.output import Json, log, warn_of_other_costs
from debubble.errors import InputError
from debubble.files import check_writable
from debubble.plans import Plan
from debubble.torchrun import check_started, is_torchrun_rank
from debubble.training import settings


@dataclass(frozen=True, kw_only=True)
class Weights(OptionGroup):
    """Where weights are loaded from and saved to."""

    section: ClassVar[str] = "Weights"

    load: list[Path] | None = option(
        "Folder of a Hugging Face checkpoint to start from; again for LoRA adapters on top of it."
    )
    save: Path | None = option("Folder for a Hugging Face checkpoint (of LoRA adapters: peft's) of the trained model.")


@dataclass(frozen=True, kw_only=True)
class Unplanned(OptionGroup):
    """The options of a MODEL without a plan; None: not set."""

    section: ClassVar[str] = "A MODEL in place of PLAN, with --online"

    cluster: str | None = option(f"{CLUSTER}  The run begins by the plan of least memory.")
    micro_batches: int | None = option("Micro-batches per step (default: 32).", min=1)
    micro_batch_size: int | None = option("Sequences per micro-batch (default: 1).", min=1)
    sequence_length: int | None = option("Tokens per sequence (default: 4096).", min=1)
    dtype: str | None = option("bf16, fp16 or fp32 (default: bf16).", names=dtype_names, noun="dtype")
    memory_limit: str | None = option("Per device: bytes, or with a unit such as 20GiB.")

    def plan_of(self, file: Path, *, online: bool, folder: Path | None) -> Path:
        """Return the plan file, or plan a MODEL and return its file."""
        if self.cluster is None:
            for f in fields(self):
                if getattr(self, f.name) is not None:
                    raise InputError(f"--{f.name.replace('_', '-')} is for a MODEL on a --cluster; a plan has its own.")
            return file
        if not online:
            raise InputError("A MODEL without a plan is planned while it trains: add --online, or `debubble plan` it.")
        from debubble.models import named_model
        from debubble.planners.plan_model import MICRO_BATCHES
        from debubble.training.online.first_plan import least_memory_plan, save_first

        names = ("micro_batch_size", "sequence_length", "dtype", "memory_limit")
        plan = least_memory_plan(
            named_model(str(file)), parse_cluster(self.cluster), micro_batches=self.micro_batches or MICRO_BATCHES,
            **{name: value for name in names if (value := getattr(self, name)) is not None},
        )  # fmt: skip
        return save_first(plan, folder)


@dataclass(frozen=True, kw_only=True)
class Recipe(OptionGroup):
    """The settings that checkpoints store; None: not set."""

    section: ClassVar[str] = "Recipe"

    steps: int | None = option("Training steps, those before a resumed checkpoint included (default: 100).", min=1)
    learning_rate: float | None = option("Peak of the learning rate (default: 3e-3; with --load 1e-5).", "--lr", min=0)
    warmup: int | None = option("Steps until the peak (default: 10).", min=0)
    lr_schedule: str | None = option(
        "After the warm-up, to a tenth of the peak: cosine (default), linear, wsd; or constant.",
        names=learning_rate_names,
        noun="schedule of the learning rate",
    )
    optimizer: str | None = option("adamw, adam, momentum, sgd, or module:Class (default: what the plan was made for).")
    optimizer_option: list[str] | None = option(
        "Argument of the optimizer's class, such as betas=[0.9,0.99]; repeatable."
    )
    weight_decay: float | None = option("Weight decay of matrices (default: 0.01).", min=0)
    clip: float | None = option("Largest global norm of the gradients (default: 1).", min=0)
    ema: float | None = option(
        "Decay of a moving average of the weights, such as 0.999, which validation, samples and --save use"
        " (default: there is none)."
    )

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by their names in checkpoints; None: not set."""
        names = ("steps", "learning_rate", "warmup", "lr_schedule", "optimizer", "weight_decay", "clip")
        further = {"optimizer_settings": _parse_arguments(self.optimizer_option), "ema_decay": self.ema}
        return {name: getattr(self, name) for name in names} | further


def _parse_arguments(arguments: Sequence[str] | None) -> dict[str, Any] | None:
    """Parse NAME=VALUE arguments, with values in JSON or as plain words.  Raises InputError for another form."""
    if arguments is None:
        return None
    read: dict[str, Any] = {}
    for argument in arguments:
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
    unplanned: Unplanned,
    data: settings.TrainingData,
    weights: Weights,
    recipe: Recipe,
    checkpoints: settings.Checkpoints,
    execution: settings.Execution,
    records: settings.Records,
    json: Json = False,
) -> None:
    """Run the plan of a MODEL.

    Its ranks are started here, or join when started by torchrun.

    With --online and --cluster, PLAN may be a MODEL: the run measures its operators, and plans, while it trains.
    """
    require_torch()
    checkpoints.check_folder_given()  # before torch is imported, which takes seconds
    data.check_files()
    file = unplanned.plan_of(plan, online=execution.online, folder=checkpoints.checkpoint)
    loaded = Plan.load(file)
    check_started(loaded.ranks)  # before torch is imported, and data read
    warn_of_other_costs(loaded)
    from debubble.training.checks import check, check_unlocked
    from debubble.training.options import TrainOptions, start_remarks, with_settings

    options = TrainOptions(
        plan=file,
        load=tuple(weights.load or ()), save=weights.save, json=json,
        **vars(data), **vars(checkpoints), **vars(execution), **vars(records),
    )  # fmt: skip
    options = with_settings(recipe.settings, options)
    checked = check(options)
    from debubble.runtime.launch.launcher import encode_options, start
    from debubble.training.memory_check import check_host_memory

    if not is_torchrun_rank() and (
        remark := check_host_memory(checked, offload_to_disk=execution.offload_to is not None)
    ):
        log().print(remark)
    if os.environ.get("RANK", "0") == "0":
        check_writable(records.trace, records.html, makes_folders=True)
        for remark in start_remarks(options, checked):
            log().print(remark)
    try:
        start(
            "debubble.training.rank", encode_options(options), ranks=checked.ranks, hang_timeout=options.hang_timeout,
            interrupts=options.checkpoint is None,
        )  # fmt: skip
    finally:
        if not is_torchrun_rank():
            with suppress(InputError):
                check_unlocked(options)  # killed ranks leave their locks
