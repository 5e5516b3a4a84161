"""The costs of every stage's operations: the only input on a model that lowering and simulation need.

Times are seconds and sizes bytes, or abstract units; integers and fractions stay exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any, Literal, get_args

from debubble.errors import InputError

Number = int | float | Fraction
PerStage = tuple[Number, ...]

CommunicationModel = Literal["latency", "exclusive", "receiver", "blocking"]
HostLink = Literal["full-duplex", "half-duplex"]

MAX_STAGES = 2**16
LARGEST = 10**18
"""Upper limit of times and sizes, far above real ones; sums and products of such numbers stay exact or finite."""


@dataclass(frozen=True)
class HostTransfers:
    """Transfers of full activations between a device and its host.

    Attributes:
        offload: Time of O per stage, device to host.
        reload: Time of L per stage, host to device.
        half_duplex: Whether the directions of the link exclude each other.
    """

    offload: PerStage
    reload: PerStage
    half_duplex: bool

    def busy(self, stage: int) -> Number:
        """Link time of both transfers of one activation of a stage."""
        out, back = self.offload[stage], self.reload[stage]
        return out + back if self.half_duplex else max(out, back)


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Times and sizes of every stage.  Build it with `StageCosts.of`.

    Entries of type PerStage have one number per stage.  `static` and `memory_limit` have one per device, or one for all
    devices.  `communication[s]` is the time of a message between stages s and s + 1, in either direction.  `offload`
    and `reload` are times for the full saved activation; None means that there is no offload.

    A stage's units compute one after the other, so transfers stream: the first units' activations are offloaded during
    the next units' forwards, and the last unit's backward begins during the reload of earlier units.  An overlap is the
    fraction of the shorter of the two operations that can run next to the longer one: (n - 1) / n for n equal units.
    `OpCosts` derives from it how early an operation may start.
    """

    forward: PerStage
    backward_input: PerStage
    backward_weight: PerStage
    recompute: PerStage
    activation: PerStage
    """Bytes that F saves for the backward."""
    activation_after_input: PerStage
    """Bytes that remain between I and W; more than `activation` if I allocates inputs of W."""
    activation_recomputed: PerStage
    """Bytes that F saves if the stage recomputes."""
    recompute_deeper: PerStage | None = None
    """Time of R for a micro-batch that recomputes at the deeper level; None: there is no such level."""
    activation_deeper: PerStage | None = None
    """Bytes that F saves for such a micro-batch."""
    recompute_workspace: PerStage | None = None
    """Peak bytes that a fused recomputation before B adds; None: all bytes that F dropped.  Stages of several units
    recompute unit by unit, when later units are already freed."""
    recompute_workspace_input: PerStage | None = None
    """The same before I, after which inputs of W remain in later units; None: as before B."""
    communication: PerStage
    communication_model: CommunicationModel = "latency"
    offload: PerStage | None = None
    reload: PerStage | None = None
    offload_overlap: PerStage = (0,)
    """Fraction of O, 0 to 1, that can run next to its F; an offload to a peer device waits for the end of F."""
    reload_overlap: PerStage = (0,)
    """Fraction of L, 0 to 1, that can run next to the B or I that reads it."""
    recompute_overlap: PerStage = (0,)
    """Fraction of L, 0 to 1, that can run next to the R that reads it."""
    host_link: HostLink = "full-duplex"
    link_groups: tuple[tuple[int, ...], ...] = ()
    """Groups of devices on one switch, which share a host link."""
    static: PerStage = (0,)
    memory_limit: PerStage | None = None
    micro_batch_scale: tuple[Number, ...] | None = None
    """Relative length of each micro-batch; scales times and activations."""
    slices: int = 1
    """Slices per sequence; a slice counts as a micro-batch."""
    attention_scale: tuple[Number, ...] | None = None
    """Mean keys that a token attends to, per slice of a sequence or per micro-batch, as a multiple of the minimum;
    equal slices have 1, 3, 5 and so on.  None: all tokens attend to equally many."""
    attention_forward: PerStage = (0,)
    """Additional time of F per unit of `attention_scale` above 1."""
    attention_backward: PerStage = (0,)
    """The same for the backward for inputs."""
    attention_recompute: PerStage = (0,)
    """The same for the recomputation."""
    keys_and_values: PerStage = (0,)
    """Bytes of a slice's keys and values, which are included in `activation`, but neither dropped nor offloaded."""
    key_value_gradient: PerStage = (0,)
    """Bytes of the gradients of a slice's keys and values, which exist from the last slice's backward to its own."""
    optimizer_step: PerStage = (0,)
    """Time of S on the device."""
    host_step: PerStage = (0,)
    """Time of S on the host."""
    gradient_offload: PerStage = (0,)
    """Time of D."""
    parameter_load: PerStage = (0,)
    """Time of P."""
    gradient_reduce: PerStage = (0,)
    """Time of G."""
    parameter_gather: PerStage = (0,)
    """Time to gather the stage's parameters if they are sharded over data-parallel ranks (ZeRO-3)."""
    gathered: PerStage = (0,)
    """Bytes of the stage's gathered parameters; `static` includes the peak of them (see `gathered_bytes`)."""

    @property
    def gathers(self) -> bool:
        """True if parameters are sharded over data-parallel ranks."""
        return any(self.parameter_gather) or any(self.gathered)

    def gathered_bytes(self, stages: Sequence[int]) -> Number:
        """Peak bytes of gathered parameters of a device with these stages: those of the two largest."""
        return sum(sorted((self.gathered[s if len(self.gathered) > 1 else 0] for s in stages), reverse=True)[:2])

    @property
    def transfers(self) -> HostTransfers | None:
        """The transfers of activations to the host and back; None without offload."""
        if self.offload is None or self.reload is None:
            return None
        return HostTransfers(self.offload, self.reload, half_duplex=self.host_link == "half-duplex")

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.forward)

    @staticmethod
    def of(
        *,
        stages: int | None = None,
        forward: Number | Sequence[Number] = 1,
        backward_input: Number | Sequence[Number] = 1,
        backward_weight: Number | Sequence[Number] = 1,
        recompute: Number | Sequence[Number] | None = None,
        activation: Number | Sequence[Number] = 1,
        activation_after_input: Number | Sequence[Number] | None = None,
        activation_recomputed: Number | Sequence[Number] = 0,
        recompute_deeper: Number | Sequence[Number] | None = None,
        activation_deeper: Number | Sequence[Number] | None = None,
        recompute_workspace: Number | Sequence[Number] | None = None,
        recompute_workspace_input: Number | Sequence[Number] | None = None,
        communication: Number | Sequence[Number] = 0,
        communication_model: CommunicationModel = "latency",
        offload: Number | Sequence[Number] | None = None,
        reload: Number | Sequence[Number] | None = None,
        offload_overlap: Number | Sequence[Number] = 0,
        reload_overlap: Number | Sequence[Number] = 0,
        recompute_overlap: Number | Sequence[Number] = 0,
        host_link: HostLink = "full-duplex",
        link_groups: Sequence[Sequence[int]] = (),
        static: Number | Sequence[Number] = 0,
        memory_limit: Number | Sequence[Number] | None = None,
        micro_batch_scale: Sequence[Number] | None = None,
        slices: int = 1,
        attention_scale: Sequence[Number] | None = None,
        attention_forward: Number | Sequence[Number] = 0,
        attention_backward: Number | Sequence[Number] = 0,
        attention_recompute: Number | Sequence[Number] = 0,
        keys_and_values: Number | Sequence[Number] = 0,
        key_value_gradient: Number | Sequence[Number] = 0,
        optimizer_step: Number | Sequence[Number] = 0,
        host_step: Number | Sequence[Number] = 0,
        gradient_offload: Number | Sequence[Number] = 0,
        parameter_load: Number | Sequence[Number] = 0,
        gradient_reduce: Number | Sequence[Number] = 0,
        parameter_gather: Number | Sequence[Number] = 0,
        gathered: Number | Sequence[Number] = 0,
    ) -> StageCosts:
        """Build costs from numbers (the same for every stage) or lists (one number per stage).

        `recompute` defaults to `forward`; `activation_after_input` to half of `activation`; `reload` to `offload`.
        Raises InputError if a list has another length than `stages`, a number is negative or above `LARGEST`, an
        overlap is more than 1, or a device is in two link groups.
        """
        arguments = locals()
        lists = [v for k, v in arguments.items() if k in PER_STAGE and isinstance(v, Sequence)]
        count = stages if stages is not None else max(map(len, lists), default=1) or 1
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise InputError(f"'stages' must be a whole number, 1 or more, not {count!r}.")
        if count > MAX_STAGES:
            raise InputError(f"{count} stages are more than the {MAX_STAGES} that debubble handles; ask for fewer.")
        per_stage = {
            k: _per_stage(k, arguments[k], count) for k in PER_STAGE if arguments[k] is not None or k not in _OPTIONAL
        }
        per_stage.setdefault("recompute", per_stage["forward"])
        per_stage.setdefault("activation_after_input", tuple(_half(a) for a in per_stage["activation"]))
        if "offload" in per_stage:
            per_stage.setdefault("reload", per_stage["offload"])
        _check_pairs(per_stage)
        if communication_model not in get_args(CommunicationModel):
            raise InputError(
                f"communication_model is '{communication_model}'; it must be latency, exclusive, receiver or blocking."
            )
        check_slices(slices, attention_scale)
        if host_link not in get_args(HostLink):
            raise InputError(f"host_link is '{host_link}'; it must be full-duplex or half-duplex.")
        lists_of: dict[str, Any] = {k: None if (v := arguments[k]) is None else _numbers(k, v) for k in _LISTS}
        return StageCosts(
            **per_stage, **lists_of, communication_model=communication_model, host_link=host_link,
            link_groups=link_groups_of(link_groups), slices=slices,
        )  # fmt: skip

    @staticmethod
    def from_dict(entries: Mapping[str, Any], *, stages: int | None = None) -> StageCosts:
        """Build costs from a costs file's entries.  Raises InputError for unknown or malformed entries."""
        if not isinstance(entries, Mapping):
            raise InputError('A costs file is a JSON object with entries such as "forward".')
        known = {"stages", *(f.name for f in fields(StageCosts))}
        for key in entries:
            if key not in known:
                raise InputError(f"A costs file has no entry '{key}'; it may have: {', '.join(sorted(known))}.")
        arguments = dict(entries)
        declared = stages if stages is None else arguments.setdefault("stages", stages)
        if isinstance(declared, int) and declared != stages:
            raise InputError(
                f"The costs are for {declared} stages, but {stages} are asked for: devices x chunks must be {declared}."
            )
        costs = StageCosts.of(**arguments)
        check_step_time(map(costs.work, range(costs.stages)), costs.micro_batch_scale)
        return costs

    def to_dict(self) -> dict[str, Any]:
        """The costs file's entries, without defaults."""
        result: dict[str, Any] = {"stages": self.stages}
        for f in fields(self):
            value = getattr(self, f.name)
            if value != f.default and (f.name not in SLICED or any(value)):
                result[f.name] = _plain(value)
        return result

    def replace(self, **changes: Any) -> StageCosts:
        """A copy with other entries, which have the form of `of`'s arguments."""
        entries = {f.name: getattr(self, f.name) for f in fields(self)}
        return StageCosts.of(**{"stages": self.stages, **entries, **changes})

    def divided(self, parts: int) -> StageCosts:
        """The costs of as many stages with 1 / `parts` of the work; messages take the same time."""
        if parts == 1:
            return self
        changes: dict[str, Any] = {}
        for name in (f.name for f in fields(self) if f.name not in UNDIVIDED):
            if isinstance(entry := getattr(self, name), tuple):
                changes[name] = tuple(Fraction(n) / parts if isinstance(n, int) else n / parts for n in entry)
        return replace(self, **changes)

    def joined(self, stages: int) -> StageCosts:
        """Join consecutive stages, in groups of the same size, into fewer stages.

        Raises InputError if the number of stages is not a multiple, or an entry cannot be added up.
        """
        if stages == self.stages:
            return self
        if self.stages % stages:
            raise InputError(
                f"The costs are for {self.stages} stages, but {stages} are asked for: devices x chunks must be"
                f" {self.stages}, or divide it."
            )
        for name in NON_ADDITIVE:
            if any(getattr(self, name) or ()):
                raise InputError(
                    f"'{name}' of {self.stages} stages is not known of {stages}: leave it out, or give the costs of"
                    f" {stages} stages."
                )
        count = self.stages // stages
        changes: dict[str, Any] = {"communication": self.communication[count - 1 :: count]}
        for name in set(PER_STAGE).difference(changes):
            if (entry := getattr(self, name)) is not None and len(entry) == self.stages:
                changes[name] = tuple(sum(entry[first : first + count]) for first in range(0, self.stages, count))
        return replace(self, **changes)

    def with_limit(self, memory_limit: Number | Sequence[Number] | None) -> StageCosts:
        """A copy with another memory limit per device."""
        return replace(self, memory_limit=None if memory_limit is None else _numbers("memory_limit", memory_limit))

    def check_for(self, *, devices: int, micro_batches: int) -> None:
        """Raise InputError if the length of an entry does not match the devices or micro-batches."""
        check_counts(
            devices=devices,
            micro_batches=micro_batches,
            static=self.static,
            memory_limit=self.memory_limit,
            micro_batch_scale=self.micro_batch_scale,
            attention_scale=None if self.slices > 1 else self.attention_scale,
            link_groups=self.link_groups,
        )

    def static_of(self, device: int) -> Number:
        """Static bytes of a device."""
        return self.static[device if len(self.static) > 1 else 0]

    def limit_of(self, device: int) -> Number | None:
        """The memory limit of a device in bytes, or None."""
        limit = self.memory_limit
        return None if limit is None else limit[device if len(limit) > 1 else 0]

    def capacity_of(self, device: int) -> Number | None:
        """Bytes of a device for activations under its limit; None if there is no limit."""
        limit = self.limit_of(device)
        return None if limit is None else limit - self.static_of(device)

    def scale_of(self, micro_batch: int) -> Number:
        """The factor of a micro-batch's times and activations."""
        return 1 if self.micro_batch_scale is None else self.micro_batch_scale[micro_batch]

    def attention_scale_of(self, micro_batch: int) -> Number:
        """The factor of the times that are proportional to the keys that a token attends to."""
        pattern = self.attention_scale
        return self.scale_of(micro_batch) * (1 if pattern is None else pattern[micro_batch % len(pattern)])

    def backward(self, stage: int) -> Number:
        """Time of the fused backward B, without recomputation."""
        return self.backward_input[stage] + self.backward_weight[stage]

    def work(self, stage: int) -> Number:
        """Compute time of one micro-batch on a stage without recomputation."""
        return self.forward[stage] + self.backward(stage)

    def dropped_bytes(self, stage: int) -> Number:
        """Bytes that recomputation drops."""
        return self.activation[stage] - self.activation_recomputed[stage]


SLICED = (
    "attention_forward", "attention_backward", "attention_recompute", "keys_and_values", "key_value_gradient",
)  # fmt: skip
"""Entries per stage for slices of sequences, or micro-batches of different lengths."""
PER_STAGE = (
    "forward", "backward_input", "backward_weight", "recompute", "activation", "activation_after_input",
    "activation_recomputed", "recompute_deeper", "activation_deeper", "recompute_workspace",
    "recompute_workspace_input", "communication",
    "offload", "reload", "offload_overlap", "reload_overlap", "recompute_overlap", "optimizer_step", "host_step",
    "gradient_offload", "parameter_load", "gradient_reduce", "parameter_gather", "gathered", *SLICED,
)  # fmt: skip
"""Entries with a number per stage."""
OVERLAPS = ("offload_overlap", "reload_overlap", "recompute_overlap")
NON_ADDITIVE = (*OVERLAPS, "recompute_workspace", "recompute_workspace_input")
"""Entries from which those of joined stages do not follow, unless they are 0."""
UNDIVIDED = (
    *OVERLAPS, "communication", "link_groups", "static", "memory_limit", "micro_batch_scale", "attention_scale",
)  # fmt: skip
"""Entries that do not scale with the work of a stage."""
_OPTIONAL = (
    "recompute", "activation_after_input", "recompute_deeper", "activation_deeper", "recompute_workspace",
    "recompute_workspace_input", "offload", "reload",
)  # fmt: skip
"""Entries per stage that may be absent, or None."""


_LISTS = ("static", "memory_limit", "micro_batch_scale", "attention_scale")
"""Entries with numbers per device, micro-batch or slice."""


def _check_pairs(entries: Mapping[str, PerStage]) -> None:
    """Raise InputError for an entry without the one that it requires, and for overlaps above 1."""
    if "reload" in entries and "offload" not in entries:
        raise InputError("'reload' has no meaning without 'offload'.")
    for name in OVERLAPS:
        if max(entries[name]) > 1:
            raise InputError(f"'{name}' is a share of a transfer, from 0 to 1, not {max(entries[name])}.")
    if ("recompute_deeper" in entries) != ("activation_deeper" in entries):
        raise InputError("'recompute_deeper' and 'activation_deeper' go together: what R takes, and what F leaves.")


def _half(number: Number) -> Number:
    return number // 2 if isinstance(number, int) and number % 2 == 0 else number / 2


def _numbers(name: str, value: Any) -> tuple[Number, ...]:
    values = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    if not values:
        raise InputError(f"'{name}' must be a number or a list of numbers, not an empty list.")
    for v in values:
        if isinstance(v, bool) or not isinstance(v, int | float | Fraction):
            raise InputError(f"'{name}' must be a number or a list of numbers, not {v!r}.")
        check_number(name, v)
    return values


def check_step_time(work: Iterable[Number], micro_batch_scale: Sequence[Number] | None) -> None:
    """Raise InputError for costs with which a step has no compute time, so that fractions of it are undefined."""
    if not any(work) or (micro_batch_scale and not any(micro_batch_scale)):
        raise InputError("The times of forwards and backwards are all 0; a step must take some time.")


def check_slices(slices: int, attention_scale: Sequence[Number] | None) -> None:
    """Raise InputError if `attention_scale` does not have a number per slice."""
    if not isinstance(slices, int) or slices < 1 or (slices > 1 and len(attention_scale or ()) != slices):
        raise InputError(f"'attention_scale' must have a number for each of {slices} 'slices'.")


def check_number(name: str, value: Number) -> None:
    """Raise InputError for a time or size that is negative, infinite or above `LARGEST`."""
    if not 0 <= value < float("inf"):
        raise InputError(f"'{name}' must not be negative or infinite: {value}.")
    if value > LARGEST:
        raise InputError(f"'{name}' must not be more than {LARGEST:.0e}.")


def check_counts(
    *,
    devices: int,
    micro_batches: int,
    static: Sequence[Number],
    memory_limit: Sequence[Number] | None,
    micro_batch_scale: Sequence[Number] | None,
    attention_scale: Sequence[Number] | None,
    link_groups: Sequence[Sequence[int]],
) -> None:
    """Raise InputError if the length of an entry does not match the devices or micro-batches."""
    for name, values in (("static", static), ("memory_limit", memory_limit)):
        if values is not None and len(values) not in (1, devices):
            raise InputError(f"'{name}' has {len(values)} numbers for {devices} devices.")
    for name, values in (("micro_batch_scale", micro_batch_scale), ("attention_scale", attention_scale)):
        if values is not None and len(values) != micro_batches:
            raise InputError(f"'{name}' has {len(values)} numbers for {micro_batches} micro-batches.")
    last = max((device for group in link_groups for device in group), default=0)
    if last >= devices:
        raise InputError(f"'link_groups' names device {last}, but there are {devices} devices.")


def limits_of(memory_limit: Sequence[Number] | None, devices: int) -> list[float]:
    """The memory limit of every device, from an entry for all or one per device; infinite if there is none."""
    limits = (float("inf"),) if memory_limit is None else memory_limit
    return [float(limits[device if len(limits) > 1 else 0]) for device in range(devices)]


def link_groups_of(value: Any) -> tuple[tuple[int, ...], ...]:
    """Check and convert link groups: lists of devices that do not overlap; empty lists are dropped."""
    lists = isinstance(value, Sequence) and all(isinstance(g, Sequence) and not isinstance(g, str) for g in value)
    devices = [device for group in value for device in group] if lists else [None]
    if not all(isinstance(d, int) and not isinstance(d, bool) and d >= 0 for d in devices):
        raise InputError("'link_groups' must be a list of lists of devices, such as [[0, 1], [2, 3]].")
    twice = next((d for d in devices if devices.count(d) > 1), None)
    if twice is not None:
        raise InputError(f"'link_groups' names device {twice} twice; a device has one link to the host.")
    return tuple(tuple(group) for group in value if group)


def _per_stage(name: str, value: Any, stages: int) -> PerStage:
    values = _numbers(name, value)
    if len(values) == 1:
        return values * stages
    if len(values) != stages:
        raise InputError(f"'{name}' has {len(values)} numbers for {stages} stages.")
    return values


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return float(value) if isinstance(value, Fraction) else value
