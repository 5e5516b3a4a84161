"""`debubble train`: run a plan on real data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from debubble.cli.app import app
from debubble.cli.output import Json, log
from debubble.cli.torch_extra import require_torch


@app.command()
def train(
    plan: Annotated[Path, typer.Argument(help="A plan file, made for a MODEL.")],
    data: Annotated[
        Path | None,
        typer.Option(help="Text file or directory (default: the sources of Python's standard library)."),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Hugging Face tokenizer.json or its folder (default: tokens are bytes).")
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(help="module:function that takes the plan and returns a Dataset, instead of --data."),
    ] = None,
    load: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of a Hugging Face checkpoint to start from; again for LoRA adapters on top of it."),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(help="Folder for a Hugging Face checkpoint (of LoRA adapters: peft's) of the trained model."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Training steps, those before a resumed checkpoint included (default: 100).")
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option("--lr", help="Peak of the learning rate (default: 3e-3).")
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(help="Steps until the peak; then a cosine to a tenth of it (default: 10).")
    ] = None,
    weight_decay: Annotated[float | None, typer.Option(help="AdamW's weight decay (default: 0.01).")] = None,
    clip: Annotated[float | None, typer.Option(help="Largest global norm of the gradients (default: 1).")] = None,
    post_validation: Annotated[
        bool | None,
        typer.Option(
            "--post-validation/--no-post-validation",
            help="Update before the gradients' norm is known, and take it back where that was wrong (default: only"
            " where the plan steps stages inside the step).",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the initial weights and the order of the data.")] = 0,
    checkpoint: Annotated[Path | None, typer.Option(help="Folder for checkpoints.")] = None,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100,
    keep: Annotated[int, typer.Option(help="Checkpoints to keep.")] = 2,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint, with its settings where none are given.")
    ] = False,
    auto_resume: Annotated[
        bool, typer.Option("--auto-resume", help="The same, or start where there is none: for torchrun's restarts.")
    ] = False,
    hang_timeout: Annotated[
        float, typer.Option(help="Seconds in which no operation of any rank ends, after which the run does.")
    ] = 600,
    offload_to: Annotated[
        Path | None, typer.Option(help="Folder on a fast disk for offloaded activations (default: host memory).")
    ] = None,
    tensorboard: Annotated[Path | None, typer.Option(help="Folder for TensorBoard's scalars.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the trace of the last steps here.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the predicted and measured timelines here.")] = None,
    online: Annotated[
        bool, typer.Option("--online", help="Search a better order beside the training, and go on with it.")
    ] = False,
    json: Json = False,
) -> None:
    """Run a plan: start its ranks here, or join when started by torchrun."""
    require_torch()
    from debubble.training.options import TrainOptions, check, settle

    recipe = {
        "steps": steps, "learning_rate": learning_rate, "warmup": warmup, "weight_decay": weight_decay, "clip": clip,
    }  # fmt: skip
    options = TrainOptions(
        plan=plan, data=data, tokenizer=tokenizer, dataset=dataset, post_validation=post_validation, seed=seed,
        load=tuple(load or ()), save=save,
        checkpoint=checkpoint, save_every=save_every, keep=keep, resume=resume, auto_resume=auto_resume,
        hang_timeout=hang_timeout, offload_to=offload_to, tensorboard=tensorboard, trace=trace, html=html,
        online=online, json=json,
    )  # fmt: skip
    options = settle(recipe, options)
    checked = check(options)
    from debubble.runtime.launcher import joined, packed, start
    from debubble.training.room import check_room

    if not joined() and (remark := check_room(checked)):
        log().print(remark)
    start("debubble.training.rank", packed(options), ranks=checked.ranks)
