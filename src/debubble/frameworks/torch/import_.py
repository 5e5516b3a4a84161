"""torch's pipelining: a schedule as CSV, and the modules of each stage as debubble writes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from debubble.files import parse, read_file
from debubble.frameworks.torch import export as torch_csv
from debubble.frameworks.torch.shared_settings import balanced_layers, layers_of
from debubble.imports.defaults import Defaults
from debubble.imports.job import ImportedJob, replicas
from debubble.imports.reader import SettingsReader
from debubble.imports.registry import Importer, Settings, UserFacts, imports
from debubble.imports.unread import Unread
from debubble.ir import InputError, RunOptions


def _whole(path: Path) -> Settings:
    return {path.name: read_file(path, "schedule file").decode(errors="replace")}


def torch(read: SettingsReader, given: UserFacts) -> ImportedJob:
    """The order of a CSV; all else is the script's, and given or 1."""
    if given.model is None or given.sequence_length is None:
        raise InputError("A schedule file is an order alone: give --model and --sequence-length too.")
    order = torch_csv.read(read.path)
    modules = read.path.with_name("modules.json")
    if modules.exists():
        layers = layers_of(parse(json.loads, read_file(modules, "list of modules"), f"{modules} is no JSON"))
    else:
        layers = balanced_layers(given.model.layers, order.stages, first_less=0, last_less=0)
    data = replicas(given.cluster, read.path, pipeline=order.devices)
    return ImportedJob(
        target="torch",
        model=given.model,
        options=RunOptions(sequence_length=given.sequence_length, data=data, zero=int(data > 1)),
        pipeline=order.devices,
        micro_batches=order.micro_batches,
        layers=layers,
        order=order,
        strategies={},
        rest=Unread(tuple(_remarks(given, listed=modules.exists()))),
        defaulted=dict.fromkeys(("dtype", "gradients", "zero"), read.defaults.source),
    )


imports.add(
    "torch",
    Importer(
        name="torch", read_job=torch, settings=_whole, file="schedule.csv", defaults=Defaults("this importer"),
    ),
)  # fmt: skip


def _remarks(given: UserFacts, *, listed: bool) -> Iterator[str]:
    if given.recompute is None:
        yield "What is recomputed is your model's: predicted is that nothing is."
    if not listed:
        yield "There is no modules.json beside the CSV: predicted are stages of equally many layers."
    yield "Micro-batches are taken for one sequence, optimizer and dtype for adamw and bf16, and replicas for ZeRO-1."
