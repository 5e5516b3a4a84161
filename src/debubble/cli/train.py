"""`debubble train`: run a plan on real data."""

from __future__ import annotations

import os

from debubble.cli import train_options as opt
from debubble.cli.app import app, require_torch
from debubble.cli.options import PlanFile, with_option_groups
from debubble.cli.output import Json, log
from debubble.files import check_writable
from debubble.training import settings


@app.command(rich_help_panel="Run")
@with_option_groups
def train(
    plan: PlanFile,
    *,
    data: settings.TrainingData,
    weights: opt.Weights,
    recipe: opt.Recipe,
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
    from debubble.runtime.launcher import encode_options, is_torchrun_rank, start
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
    start("debubble.training.rank", encode_options(options), ranks=checked.ranks)
