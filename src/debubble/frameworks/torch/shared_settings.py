"""Settings of frameworks on torch's pipelining: schedules by name or CSV, and stages by their modules."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from debubble.frameworks.torch import export as torch_csv
from debubble.imports.kinds import STAGES, suggest
from debubble.imports.reader import SettingsReader
from debubble.imports.torch_orders import ZERO_BUBBLE
from debubble.ir import InputError, Schedule
from debubble.models import Model

ORDERS = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved",
    "loopedbfs": "breadth-first",
    "zbvzerobubble": "zb-v",
    "dualpipev": "dualpipe-v",
    "interleavedzerobubble": ZERO_BUBBLE,
}
"""torch's schedules, in lower case -> debubble's names."""


_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)$")


def order_of(entry: str, name: str, csv: str, path: Path) -> str | Schedule:
    """The order of a configuration: of its CSV file if it names one, otherwise of torch's schedule of that name.

    Args:
        entry: The entry that names the schedule.
        name: Its value.
        csv: The CSV file that the configuration names; empty: none.
        path: The configuration.

    Raises:
        InputError: if torch has no such schedule that debubble knows, or the CSV cannot be read.
    """
    if csv:
        return torch_csv.read(path.with_name(Path(csv).name) if not Path(csv).exists() else Path(csv))
    if name.lower() not in ORDERS:
        raise InputError(
            f"{path}: {entry} is '{name}', which is not known here{suggest(name, ORDERS)}; known are"
            f" {', '.join(ORDERS)}, and any order as a CSV ({entry}_csv), which torch writes of a schedule."
        )
    return ORDERS[name.lower()]


def chunks_of(order: str | Schedule) -> int:
    """Stages per device if the configuration does not set them."""
    if isinstance(order, Schedule):
        return order.placement.chunks
    return 1 if order in ("1f1b", "gpipe") else 2


def expert_ranks(read: SettingsReader, name: str, model: Model, *, tensor: int) -> tuple[int, int | None]:
    """The expert-parallel degree, and the ranks that shard an expert: 1 with expert and tensor parallelism."""
    ranks = read.size(name, 1)
    if model.experts is None:
        return 1, None
    return ranks, 1 if ranks > 1 and tensor > 1 else None


def balanced_layers(layers: int, stages: int, *, first_less: int, last_less: int) -> tuple[int, ...]:
    """Torchtitan's default split: embedding and head count as layers, and the first stages take the remainder.

    Source: torchtitan, `generate_llm_fqn_per_model_part`.

    Raises:
        InputError: if there are more stages than layers for them.
    """
    if stages > layers + first_less + last_less:
        raise InputError(f"{layers} layers cannot fill {stages} stages.")
    total = layers + first_less + last_less
    counts = [total // stages + (stage < total % stages) for stage in range(stages)]
    counts[0] -= first_less
    counts[-1] -= last_less
    return tuple(counts)


def layers_of(stages: object) -> tuple[int, ...]:
    """Decoder layers per stage, counted among modules such as `model.layers.3` or `transformer.h.3`.

    Raises:
        InputError: if `stages` is not a list of lists of names.
    """
    if not isinstance(stages, list) or not all(isinstance(modules, list) for modules in stages):
        raise InputError(f"The modules of the stages are {stages!r}, which is no list of lists of names.")
    if not all(isinstance(name, str) for modules in stages for name in modules):
        raise InputError("The modules of the stages are no names.")
    return tuple(sum(_LAYER.search(name) is not None for name in modules) for modules in stages)


def layers_by_modules(read: SettingsReader, name: str, model: Model) -> tuple[int, ...]:
    """Decoder layers per stage, counted among the modules in an entry; empty if it is missing.

    Raises:
        InputError: if it is not a list of lists of names, or does not have every layer once.
    """
    modules = read.entry(name, STAGES)
    layers = layers_of(modules or [])
    if layers and sum(layers) != model.layers:
        raise read.refusal(name, f"has {sum(layers)} layers, and the model has {model.layers}")
    return layers


def layer_strategies(layers: Sequence[int], operators: str = "full") -> dict[int, tuple[str, str]]:
    """Recomputation of the same operators in both halves of the layers."""
    return dict.fromkeys(layers, (operators, operators))
