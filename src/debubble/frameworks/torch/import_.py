"""Imports torch's schedule CSV, and the modules of each stage as debubble exports them."""

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


def _read_csv(path: Path) -> Settings:
    return {path.name: read_file(path, "schedule file").decode(errors="replace")}


def torch(read: SettingsReader, facts: UserFacts) -> ImportedJob:
    """The job of a schedule CSV; the rest is given by the user, or 1."""
    if facts.model is None or facts.sequence_length is None:
        raise InputError("A schedule file is an order alone: give --model and --sequence-length too.")
    order = torch_csv.read(read.path)
    modules = read.path.with_name("modules.json")
    if modules.exists():
        layers = layers_of(parse(json.loads, read_file(modules, "list of modules"), f"{modules} is no JSON"))
    else:
        layers = balanced_layers(facts.model.layers, order.stages, first_less=0, last_less=0)
    data = replicas(facts.cluster, read.path, pipeline=order.devices)
    return ImportedJob(
        target="torch",
        model=facts.model,
        options=RunOptions(sequence_length=facts.sequence_length, data=data, zero=int(data > 1)),
        pipeline=order.devices,
        micro_batches=order.micro_batches,
        layers=layers,
        order=order,
        strategies={},
        rest=Unread(tuple(_remarks(facts, listed=modules.exists()))),
        defaulted=dict.fromkeys(("dtype", "gradients", "zero"), read.defaults.source),
    )


imports.add(
    "torch",
    Importer(
        name="torch", read_job=torch, settings=_read_csv, file="schedule.csv", defaults=Defaults("this importer"),
    ),
)  # fmt: skip


def _remarks(facts: UserFacts, *, listed: bool) -> Iterator[str]:
    if facts.recompute is None:
        yield "What is recomputed is your model's: predicted is that nothing is."
    if not listed:
        yield "There is no modules.json next to the CSV: predicted are stages of equally many layers."
    yield "Micro-batches are taken for one sequence, optimizer and dtype for adamw and bf16, and replicas for ZeRO-1."
