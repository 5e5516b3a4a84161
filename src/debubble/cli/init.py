"""`debubble init`: a commented job file to begin with."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from debubble.cli import options as o
from debubble.cli.app import app
from debubble.cli.output import console
from debubble.cli.plan_options import PlanOptions
from debubble.files import check_writable, write_whole
from debubble.ir import InputError


@app.command(rich_help_panel="Plan")
def init(
    file: Annotated[Path, typer.Argument(help="The job file to write.", metavar="[FILE]")] = Path("job.toml"),
    *,
    model: Annotated[str, typer.Option(help="A built-in name, a config.json, or a folder with one.")] = "llama3-8b",
    cluster: Annotated[str, typer.Option(help=o.CLUSTER)] = "8xH100-80GB",
    global_batch: Annotated[int, typer.Option(help="Sequences per step.")] = 64,
    sequence_length: o.SequenceLength = 4096,
    lora: o.Lora = 0,
) -> None:
    """Write a commented job file, which stands for a call's options.

    `plan`, `fits`, `simulate` and `sweep` take it as their MODEL.
    """
    from debubble.cli.job_file import job_text
    from debubble.models import named_model

    o.check_counts(global_batch=global_batch, sequence_length=sequence_length)
    named_model(model)
    o.parse_cluster(cluster)
    if file.exists():
        raise InputError(f"{file} is there already: name another file, or remove it.")
    check_writable(file)
    entries: dict[str, Any] = dict(
        model=model, cluster=cluster, global_batch=global_batch, sequence_length=sequence_length,
        **({"lora": lora} if lora else {}),
    )  # fmt: skip
    notes = {
        **_notes(),
        "model": "A built-in name (`debubble models`), a Hugging Face config.json, or a folder with one.",
        "global_batch": "Sequences per step: degrees, ZeRO and micro-batches that are not given are searched.",
    }
    notes["profile"] = "Measured units (`debubble profile`), with micro_batches in place of global_batch."
    unset = dict.fromkeys(name for name in notes if name not in entries)
    write_whole(file, job_text({**entries, **unset}, notes).encode())
    console().print(f"Wrote {file}: edit it, then `debubble plan {file}`.", soft_wrap=True)


PLAN_ENTRIES = ("micro_batches", "memory_limit", "target", "effort")
"""Options of `plan` that a new job file lists."""


def _notes() -> dict[str, str]:
    """Help texts by job file entry, of all options of a model's run and some of `plan`."""
    notes = {}
    for group in (o.ModelRun, PlanOptions, o.SearchLimits):
        types = get_type_hints(group, include_extras=True)
        for f in fields(group):
            if group is o.ModelRun or f.name in PLAN_ENTRIES:
                declared = f.metadata.get("option") or types[f.name].__metadata__[0]
                value = str(f.default).lower() if isinstance(f.default, bool) else str(f.default)
                default = "" if f.default in (None, "", False) else f" (default: {value})"
                notes["for" if f.name == "target" else f.name] = f"{declared.help}{default}"
    return notes
