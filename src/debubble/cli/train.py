"""`debubble train`: run a plan on real data."""

from __future__ import annotations

import os

from debubble.cli import train_options as opt
from debubble.cli.app import app
from debubble.cli.output import Json, log
from debubble.cli.torch_extra import require_torch


@app.command(rich_help_panel="Run")
def train(
    plan: opt.Plan,
    data: opt.Data = None,
    tokenizer: opt.Tokenizer = None,
    dataset: opt.Dataset = None,
    validation: opt.Validation = None,
    validate_every: opt.ValidateEvery = 100,
    prompt: opt.Prompt = None,
    sample_tokens: opt.SampleTokens = 40,
    load: opt.Load = None,
    save: opt.Save = None,
    steps: opt.Steps = None,
    learning_rate: opt.LearningRate = None,
    warmup: opt.Warmup = None,
    lr_schedule: opt.LrSchedule = None,
    optimizer: opt.Optimizer = None,
    optimizer_option: opt.OptimizerOption = None,
    weight_decay: opt.WeightDecay = None,
    clip: opt.Clip = None,
    post_validation: opt.PostValidation = None,
    seed: opt.Seed = 0,
    checkpoint: opt.Checkpoint = None,
    save_every: opt.SaveEvery = 100,
    keep: opt.Keep = 2,
    resume: opt.Resume = False,
    auto_resume: opt.AutoResume = False,
    hang_timeout: opt.HangTimeout = 600,
    offload_to: opt.OffloadTo = None,
    tensorboard: opt.Tensorboard = None,
    wandb: opt.Wandb = None,
    trace: opt.Trace = None,
    html: opt.Html = None,
    online: opt.Online = False,
    json: Json = False,
) -> None:
    """Run a plan: start its ranks here, or join when started by torchrun."""
    require_torch()
    from debubble.training.options import TrainOptions, check, rate_remark, settle

    recipe = {
        "steps": steps, "learning_rate": learning_rate, "warmup": warmup, "lr_schedule": lr_schedule,
        "optimizer": optimizer, "optimizer_settings": opt.settings(optimizer_option), "weight_decay": weight_decay,
        "clip": clip,
    }  # fmt: skip
    options = TrainOptions(
        plan=plan, data=data, tokenizer=tokenizer, dataset=dataset, post_validation=post_validation, seed=seed,
        load=tuple(load or ()), save=save, validation=validation, validate_every=validate_every,
        prompt=prompt, sample_tokens=sample_tokens,
        checkpoint=checkpoint, save_every=save_every, keep=keep, resume=resume, auto_resume=auto_resume,
        hang_timeout=hang_timeout, offload_to=offload_to, tensorboard=tensorboard, wandb=wandb, trace=trace, html=html,
        online=online, json=json,
    )  # fmt: skip
    options = settle(recipe, options)
    checked = check(options)
    from debubble.runtime.launcher import encode_options, is_torchrun_rank, start
    from debubble.training.memory_check import check_host_memory

    if not is_torchrun_rank() and (remark := check_host_memory(checked, offload_to_disk=offload_to is not None)):
        log().print(remark)
    if os.environ.get("RANK", "0") == "0" and (remark := rate_remark(options)):
        log().print(remark)
    start("debubble.training.rank", encode_options(options), ranks=checked.ranks)
