"""Costs files, units files and profiles: abstract or measured costs as JSON.

A profile is a units file of measured costs; `apply_profile` replaces computed costs with them.  It names the model and
the run that it measured, so that it is not applied to others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from debubble.costs.step import HOST_MEMORY_BANDWIDTH
from debubble.costs.unit import HostStates, Strategy, Unit
from debubble.costs.units import Units
from debubble.files import convert, decode_json, read_file
from debubble.ir import InputError, RunOptions, StageCosts
from debubble.ir.stage_costs import (
    LARGEST,
    CommunicationModel,
    HostLink,
    check_number,
    check_slices,
    check_step_time,
    link_groups_of,
)
from debubble.models.config import ModelConfig


class ProfileSource(msgspec.Struct, omit_defaults=True):
    """The entry `measured` of a profile."""

    model: dict[str, Any]
    """Hugging Face config."""
    dtype: str
    sequence_length: int
    micro_batch_size: int
    lora: int
    device: str
    """The device's name."""
    unplanned_bytes: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Device bytes of the CUDA context and of kernels' workspaces; None: not measured, as on a CPU."""
    spread: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """Interquartile range over median of repeated forwards and backwards; None: not measured."""


class _ProfileHeader(msgspec.Struct):
    measured: ProfileSource | None = None


def measured_source(profile: Mapping[str, Any]) -> ProfileSource | None:
    """The `measured` entry of a profile; None for a units file written by hand."""
    try:
        return convert(profile, _ProfileHeader).measured
    except msgspec.ValidationError as error:
        raise InputError(f"The profile is no profile: {error}.") from error


def check_measured(profile: Mapping[str, Any], model: ModelConfig, options: RunOptions) -> None:
    """Raise InputError if the profile measured another model or another kind of run."""
    measured = measured_source(profile)
    if measured is None:
        return
    if ModelConfig.from_hf(measured.model) != model:
        raise InputError("The profile measures another model: run `debubble profile` for this one.")
    if options.quantize:
        raise InputError("Profiles measure no quantised weights: plan with --quantize without a profile.")
    for name in ("dtype", "sequence_length", "micro_batch_size", "lora"):
        profiled, planned = getattr(measured, name), getattr(options, name)
        if profiled != planned:
            option = f"--{name.replace('_', '-')}"
            raise InputError(
                f"The profile was measured with {option} {profiled}, not {planned}: give {option} {profiled}, or"
                " profile again."
            )


MAX_UNITS = 100_000
"""Maximum units of a units file, far more than any model has; a plan lists all of them."""
_PER_STAGE_ENTRIES = (
    "optimizer_step", "host_step", "gradient_offload", "parameter_load", "gradient_reduce", "parameter_gather",
)  # fmt: skip
_PARAMETER_NUMBERS = ("gradient_reduce", "optimizer_step", "parameter_gather", "gathered", "undivided")


class StrategyFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A recomputation strategy of a unit."""

    activation: int | float
    recompute: int | float = 0
    operators: str | None = None
    after_full: int | float | None = None
    attention: int | float = 0


class HostFile(msgspec.Struct, forbid_unknown_fields=True):
    """Costs of a unit whose optimizer states are offloaded to the host."""

    static: int | float
    gradients: int | float
    parameters: int | float
    step: int | float


class UnitFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """`count` consecutive equal units."""

    type: str
    forward: int | float
    backward_input: int | float
    backward_weight: int | float
    strategies: dict[str, StrategyFile]
    count: int = 1
    static: int | float = 0
    activation_after_input: int | float | None = None
    workspace: int | float = 0
    on_host: HostFile | None = None
    gradient_reduce: int | float = 0
    optimizer_step: int | float = 0
    parameter_gather: int | float = 0
    gathered: int | float = 0
    undivided: int | float = 0
    attention_forward: int | float = 0
    attention_backward: int | float = 0
    keys_and_values: int | float = 0
    key_value_gradient: int | float = 0


class UnitsFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A units file, field by field."""

    units: list[UnitFile]
    seconds: bool = False
    dtype: Literal["bf16", "fp16", "fp32", "fp64"] | None = None
    communication: int | float = 0
    communication_within_node: int | float | None = None
    devices_per_node: Annotated[int, msgspec.Meta(ge=1)] = 1
    communication_model: CommunicationModel = "latency"
    offload_bandwidth: int | float | None = None
    host_memory: int | float | None = None
    host_step_bandwidth: int | float | None = None
    host_link: HostLink = "full-duplex"
    link_groups: list[list[int]] = []
    memory_limit: int | float | list[int | float] | None = None
    static: int | float = 0
    micro_batch_scale: list[int | float] | None = None
    slices: int = 1
    attention_scale: list[int | float] | None = None
    optimizer_step: int | float = 0
    host_step: int | float = 0
    gradient_offload: int | float = 0
    parameter_load: int | float = 0
    gradient_reduce: int | float = 0
    parameter_gather: int | float = 0
    divides_gradients: bool = True


_UNIT_NUMBERS = set(UnitFile.__struct_fields__) - {"type", "strategies", "count", "on_host"}
_UNITS_NUMBERS = set(UnitsFile.__struct_fields__).difference(
    _PER_STAGE_ENTRIES, ("units", "link_groups", "memory_limit", "micro_batch_scale", "attention_scale")
)
"""Entries that Unit and Units have unchanged from the file; all others are converted."""


def load_costs(path: str | Path, *, stages: int | None = None) -> StageCosts:
    """Read a costs file.  Raises InputError if it is malformed or for another number of stages."""
    file = Path(path)
    entries = _json(file, "costs file")
    try:
        return StageCosts.from_dict(entries, stages=stages)
    except InputError as error:
        raise InputError(f"{file}: {error}") from error


def load_units(path: str | Path, *, memory_limit: int | float | None = None) -> Units:
    """Read a units file; `memory_limit` replaces the file's.  Raises InputError if it is malformed."""
    content = _json(Path(path), "units file")
    try:
        units = units_from_dict(content)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    return units if memory_limit is None else replace(units, memory_limit=(memory_limit,))


def load_profile(path: str | Path) -> Units:
    """Read the units of a profile (`debubble profile`).  Raises InputError if it is malformed."""
    return units_from_dict(read_profile(path))


def read_profile(path: str | Path) -> dict[str, Any]:
    """Read the content of a profile, which a plan includes.  Raises InputError if it is malformed."""
    content = _json(Path(path), "profile")
    try:
        units_from_dict(content)
    except InputError as error:
        raise InputError(f"{path} is no profile: {error}  Measure one with `debubble profile`.") from error
    return dict(content)


def with_profile(units: Units, profile: Mapping[str, Any], *, model: ModelConfig, options: RunOptions) -> Units:
    """Replace computed costs with a profile's.

    Bytes of parameters and states stay computed, as they depend on ZeRO, tensor parallelism and post-validation, which
    a profile does not have.  A units file written by hand replaces them, too.  Raises InputError if the profile
    measured another model or run.
    """
    check_measured(profile, model, options)
    applied = apply_profile(units, units_from_dict(profile))
    if "measured" not in profile:
        return applied
    states = zip(applied.units, units.units, strict=True)
    return replace(applied, units=tuple(replace(unit, static=computed.static) for unit, computed in states))


def units_from_dict(entries: Any) -> Units:
    """Build units from a units file's content."""
    if isinstance(entries, Mapping):
        entries = {name: entry for name, entry in entries.items() if name != "measured"}
    try:
        file = convert(entries, UnitsFile)
    except msgspec.ValidationError as error:
        raise InputError(f"This is no units file: {error}.") from error
    if not file.units:
        raise InputError("A units file needs at least one unit.")
    _check_numbers("", msgspec.to_builtins(file))
    if file.offload_bandwidth is not None and file.offload_bandwidth < 1 / LARGEST:
        raise InputError("'offload_bandwidth' must be positive; leave it out if there is no offload.")
    if file.host_step_bandwidth is not None and file.host_step_bandwidth < 1 / LARGEST:
        raise InputError("'host_step_bandwidth' must be positive; leave it out if it was not measured.")
    limit = file.memory_limit
    for name in ("memory_limit", "micro_batch_scale", "attention_scale"):
        if getattr(file, name) == []:
            raise InputError(f"'{name}' must be a number or a list of numbers, not an empty list.")
    check_slices(file.slices, file.attention_scale)
    check_step_time((u.forward + u.backward_input + u.backward_weight for u in file.units), file.micro_batch_scale)
    return Units(
        **{name: getattr(file, name) for name in _UNITS_NUMBERS},
        units=tuple(_expand(file.units)),
        link_groups=link_groups_of(file.link_groups),
        memory_limit=None if limit is None else tuple(limit) if isinstance(limit, list) else (limit,),
        micro_batch_scale=None if file.micro_batch_scale is None else tuple(file.micro_batch_scale),
        attention_scale=None if file.attention_scale is None else tuple(file.attention_scale),
        stage_entries={name: value for name in _PER_STAGE_ENTRIES if (value := getattr(file, name))},
    )


def units_to_dict(units: Units) -> dict[str, Any]:
    """The content of a units file; consecutive equal units become one entry with a count."""
    entries: list[UnitFile] = []
    for unit in units.units:
        entry = UnitFile(
            **{name: _plain(getattr(unit, name)) for name in _UNIT_NUMBERS},
            type=unit.type,
            strategies={name: StrategyFile(**_entries(strategy)) for name, strategy in unit.strategies.items()},
            on_host=None if unit.on_host is None else HostFile(**_entries(unit.on_host)),
        )
        if entries and msgspec.structs.replace(entries[-1], count=1) == entry:
            entries[-1].count += 1
        else:
            entries.append(entry)
    file = UnitsFile(
        **{name: _plain(getattr(units, name)) for name in _UNITS_NUMBERS},
        units=entries,
        link_groups=[list(group) for group in units.link_groups],
        memory_limit=None if units.memory_limit is None else [_plain(limit) for limit in units.memory_limit],
        micro_batch_scale=None if units.micro_batch_scale is None else [_plain(s) for s in units.micro_batch_scale],
        attention_scale=None if units.attention_scale is None else [_plain(s) for s in units.attention_scale],
        **{name: _plain(value) for name, value in units.stage_entries.items()},
    )
    return dict(msgspec.to_builtins(file))


def apply_profile(units: Units, profile: Units) -> Units:
    """Replace computed units with measured ones.

    A layer takes its own measurement, or else that of the last measured unit of its type; types without a measurement
    stay computed.  Communication, offload bandwidth and the bandwidth of the CPU optimizer step are replaced if they
    were measured; memory limit, static bytes per device and link groups stay.
    """
    measured: dict[str, dict[int | None, Unit]] = {}
    for unit in profile.units:
        measured.setdefault(unit.type, {})[unit.layer] = unit
    if not measured.keys() & {unit.type for unit in units.units}:
        raise InputError(f"The profile measures {', '.join(measured)}, none of which the model has.")
    messages = profile if profile.communication else units
    return replace(
        units,
        units=tuple(
            _with_measured_step(_with_measurement(unit, measured.get(unit.type)), profile) for unit in units.units
        ),
        communication=messages.communication,
        communication_within_node=messages.communication_within_node,
        devices_per_node=messages.devices_per_node,
        offload_bandwidth=profile.offload_bandwidth or units.offload_bandwidth,
        stage_entries={**units.stage_entries, **profile.stage_entries},
    )


def _with_measurement(unit: Unit, measurements: Mapping[int | None, Unit] | None) -> Unit:
    if measurements is None:
        return unit
    measured = measurements.get(unit.layer, list(measurements.values())[-1])
    return replace(
        measured,
        layer=unit.layer,
        **{name: getattr(measured, name) or getattr(unit, name) for name in ("on_host", *_PARAMETER_NUMBERS)},
    )


def _with_measured_step(unit: Unit, profile: Units) -> Unit:
    """The unit with its CPU optimizer step at the measured host bandwidth."""
    if unit.on_host is None or profile.host_step_bandwidth is None:
        return unit
    step = unit.on_host.step * HOST_MEMORY_BANDWIDTH / profile.host_step_bandwidth
    return replace(unit, on_host=replace(unit.on_host, step=step))


def _expand(entries: list[UnitFile]) -> list[Unit]:
    units: list[Unit] = []
    next_index: dict[str, int] = {}
    if sum(entry.count for entry in entries) > MAX_UNITS:
        raise InputError(f"A units file may have up to {MAX_UNITS} units.")
    for entry in entries:
        if entry.count < 1:
            raise InputError(f"The count of '{entry.type}' must be at least 1, not {entry.count}.")
        if "none" not in entry.strategies:
            raise InputError(f"The unit '{entry.type}' needs a strategy 'none', which keeps everything.")
        strategies = {name: Strategy(**msgspec.structs.asdict(s)) for name, s in entry.strategies.items()}
        on_host = None if entry.on_host is None else HostStates(**msgspec.structs.asdict(entry.on_host))
        numbers = {name: getattr(entry, name) for name in _UNIT_NUMBERS}
        for _ in range(entry.count):
            index = next_index.get(entry.type, 0)
            next_index[entry.type] = index + 1
            layer = None if entry.type in ("embedding", "mtp", "head") else index
            units.append(Unit(type=entry.type, layer=layer, strategies=strategies, on_host=on_host, **numbers))
    return units


def _check_numbers(field: str, value: Any) -> None:
    if isinstance(value, dict):
        for key, entry in value.items():
            _check_numbers(key, entry)
    elif isinstance(value, list):
        for entry in value:
            _check_numbers(field, entry)
    elif isinstance(value, int | float):
        check_number(field, value)


def _json(path: Path, kind: str) -> Any:
    content = read_file(path, kind)
    try:
        return decode_json(content, object)
    except msgspec.DecodeError as error:
        raise InputError(f"The {kind} {path} is not JSON: {error}.") from error


def _entries(value: Strategy | HostStates) -> dict[str, Any]:
    return {name: _plain(entry) for name, entry in asdict(value).items()}


def _plain(value: Any) -> Any:
    """A fraction as a float, for JSON; all other values unchanged."""
    return float(value) if isinstance(value, Fraction) else value
