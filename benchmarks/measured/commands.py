"""The `debubble` command line of a record's prediction."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

from debubble.ir import InputError
from debubble.models import models
from measured.records import Record

AMPLE = "100TiB"
"""A memory limit that refuses nothing, as runs are predicted even if they do not fit."""


def command_of(record: Record) -> str:
    """A shell command that prints the prediction's step and memory, after files for what has no name.

    Raises InputError for a run whose layers recompute differently, or that fills its pipeline several times per step.
    """
    e = record.entries
    if e.get("recompute") in ("op", "alternate") or "recompute_layers" in e or e.get("passes", 1) > 1:
        raise InputError(f"{record.name}: no option says that layers recompute differently, or passes of the pipeline.")
    return "\n".join([*_files(record), " ".join(["debubble simulate", *_arguments(record)])])


def _files(record: Record) -> Iterator[str]:
    """Shell lines that write the files of a custom model and cluster."""
    if record.entries["model"] not in models:
        yield f"cat > model.json <<'END'\n{json.dumps(record.model.config)}\nEND"
    if not isinstance(record.entries["cluster"], str):
        yield f"cat > cluster.json <<'END'\n{json.dumps(record.entries['cluster'])}\nEND"


def _arguments(record: Record) -> Iterator[str]:
    job, options = record.job, record.options
    cluster = record.entries["cluster"]
    yield record.entries["model"] if record.entries["model"] in models else "model.json"
    yield from _option("cluster", cluster if isinstance(cluster, str) else "cluster.json")
    yield from _option("schedule", job.order)
    yield from _option("micro-batches", job.micro_batches)
    yield from _option("pipeline", job.pipeline)
    yield from _option("layers", ",".join(map(str, job.layers)))
    degrees = ("tensor", "data", "context", "expert", "expert_tensor", "zero", "micro_batch_size")
    settings = ("sequence_length", "dtype", "lora", "quantize", "optimizer", "master_dtype", "framework")
    for name in (*degrees, *settings):
        if (value := getattr(options, name)) not in (None, 0):
            yield from _option(name.replace("_", "-"), value)
    if recompute := record.entries.get("recompute", record.entries.get("recompute_assumed")):
        yield from _option("recompute", recompute)
    yield from _option("memory-limit", AMPLE)
    yield "--json"


def _option(name: str, value: Any) -> Iterator[str]:
    yield f"--{name} {shlex.quote(str(value))}"
