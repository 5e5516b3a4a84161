"""The costs of each operation of each stage: all that lowering and simulation need to know of a model.

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

MOST_STAGES = 2**16
LARGEST = 10**18
"""Far more seconds or bytes than any run has; sums and products of such numbers are still exact or finite."""


@dataclass(frozen=True)
class HostTransfers:
    """Transfers of whole activations between a device and its host.

    Attributes:
        offload: Time of O per stage, device to host.
        reload: Time of L per stage, host to device.
        half_duplex: Whether the directions of the link exclude each other.
    """

    offload: PerStage
    reload: PerStage
    half_duplex: bool

    def busy(self, stage: int) -> Number:
        """Time that the link needs for both transfers of one activation of a stage."""
        out, back = self.offload[stage], self.reload[stage]
        return out + back if self.half_duplex else max(out, back)


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Times and sizes of every stage.  Build it with `StageCosts.of`.

    Entries of type PerStage have one number per stage.  `static` and `memory_limit` have one per device, or a
    single one that holds for all.  `communication[s]` is the time of a message between stages s and s + 1, either
    way.  `offload` and `reload` move the whole kept activation; None means that there is no offload.

    A stage's units compute one after the other, so transfers stream: the first ones' activations leave while the next
    ones' forwards run, and the last one's backward begins while those of earlier units are still coming.  The overlaps
    are the shares of the shorter of the two operations that can run next to the longer one: `n` equal units have
    (n - 1) / n.  `OpCosts` says how early that lets an operation start.
    """

    forward: PerStage
    backward_input: PerStage
    backward_weight: PerStage
    recompute: PerStage
    activation: PerStage
    """Bytes that F leaves for the backward."""
    activation_after_input: PerStage
    """Bytes of them that remain between I and W; more than `activation` if I allocates what W needs."""
    activation_recomputed: PerStage
    """Bytes that F leaves when the stage recomputes."""
    recompute_deeper: PerStage | None = None
    """Time of an R of a micro-batch that the schedule recomputes deeper; None: no stage has such a level."""
    activation_deeper: PerStage | None = None
    """Bytes that F leaves for it."""
    recompute_workspace: PerStage | None = None
    """Bytes that a fused recomputation brings back at a time before B; None: all that was dropped.  Stages of several
    units recompute unit by unit, and what lies after a unit is already free."""
    recompute_workspace_input: PerStage | None = None
    """Bytes that it brings back before I, which leaves what W needs of the units after; None: as before B."""
    communication: PerStage
    communication_model: CommunicationModel = "latency"
    offload: PerStage | None = None
    reload: PerStage | None = None
    offload_overlap: PerStage = (0,)
    """Share of O that can run next to its F, 0 to 1; an offload to a peer device waits for the whole F."""
    reload_overlap: PerStage = (0,)
    """Share of L that can run next to the B or I that reads it, 0 to 1."""
    recompute_overlap: PerStage = (0,)
    """Share of L that can run next to the R that reads it, 0 to 1."""
    host_link: HostLink = "full-duplex"
    link_groups: tuple[tuple[int, ...], ...] = ()
    """Devices after one switch, which share the host link's lanes."""
    static: PerStage = (0,)
    memory_limit: PerStage | None = None
    micro_batch_scale: tuple[Number, ...] | None = None
    """Relative length of each micro-batch; scales times and activations."""
    slices: int = 1
    """Slices of every sequence, each of which counts as a micro-batch."""
    attention_scale: tuple[Number, ...] | None = None
    """The keys that a token attends to on average, over those where they are least, per slice of a sequence or per
    micro-batch; equal slices have 1, 3, 5 and so on.  None: all tokens attend to equally many."""
    attention_forward: PerStage = (0,)
    """Time that F takes more for each such measure of tokens more."""
    attention_backward: PerStage = (0,)
    """Time that the backward for inputs takes more."""
    attention_recompute: PerStage = (0,)
    """Time that the recomputation takes more."""
    keys_and_values: PerStage = (0,)
    """Bytes of a slice's keys and values, a part of every `activation` that is neither dropped nor offloaded."""
    key_value_gradient: PerStage = (0,)
    """Bytes of the gradients of a slice's keys and values, from the last slice's backward to its own."""
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
    """Time of gathering the stage's parameters, where the data-parallel ranks divide them (ZeRO-3)."""
    gathered: PerStage = (0,)
    """Bytes of the stage's whole parameters, once they are gathered; `static` has room for those that a device has at a
    time (see `gathered_bytes`)."""

    @property
    def gathers(self) -> bool:
        """True if the data-parallel ranks divide parameters."""
        return any(self.parameter_gather) or any(self.gathered)

    def gathered_bytes(self, stages: Sequence[int]) -> Number:
        """Bytes of gathered parameters that a device with these stages has at a time: those of two, at most."""
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
        Raises InputError if a list has another length than `stages`, a number is negative or out of all proportion,
        an overlap is more than 1, or a device is in two link groups.
        """
        given = locals()
        lists = [v for k, v in given.items() if k in PER_STAGE and isinstance(v, Sequence)]
        count = stages if stages is not None else max(map(len, lists), default=1) or 1
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise InputError(f"'stages' must be a whole number, 1 or more, not {count!r}.")
        if count > MOST_STAGES:
            raise InputError(f"{count} stages are more than the {MOST_STAGES} that debubble handles; ask for fewer.")
        each = {k: _per_stage(k, given[k], count) for k in PER_STAGE if given[k] is not None or k not in _OPTIONAL}
        each.setdefault("recompute", each["forward"])
        each.setdefault("activation_after_input", tuple(_half(a) for a in each["activation"]))
        if "offload" in each:
            each.setdefault("reload", each["offload"])
        _check_pairs(each)
        if communication_model not in get_args(CommunicationModel):
            raise InputError(
                f"communication_model is '{communication_model}'; it must be latency, exclusive, receiver or blocking."
            )
        check_slices(slices, attention_scale)
        if host_link not in get_args(HostLink):
            raise InputError(f"host_link is '{host_link}'; it must be full-duplex or half-duplex.")
        others: dict[str, Any] = {k: None if given[k] is None else _numbers(k, given[k]) for k in _LISTS}
        return StageCosts(
            **each, **others, communication_model=communication_model, host_link=host_link,
            link_groups=link_groups_of(link_groups), slices=slices,
        )  # fmt: skip

    @staticmethod
    def from_dict(entries: Mapping[str, Any], *, stages: int | None = None) -> StageCosts:
        """Build costs from a costs file's entries.  Raises InputError on an unknown or malformed one."""
        if not isinstance(entries, Mapping):
            raise InputError('A costs file is a JSON object with entries such as "forward".')
        known = {"stages", *(f.name for f in fields(StageCosts))}
        for key in entries:
            if key not in known:
                raise InputError(f"A costs file has no entry '{key}'; it may have: {', '.join(sorted(known))}.")
        given = dict(entries)
        declared = stages if stages is None else given.setdefault("stages", stages)
        if isinstance(declared, int) and declared != stages:
            raise InputError(
                f"The costs are for {declared} stages, but {stages} are asked for: devices x chunks must be {declared}."
            )
        costs = StageCosts.of(**given)
        check_step_time(map(costs.work, range(costs.stages)), costs.micro_batch_scale)
        return costs

    def to_dict(self) -> dict[str, Any]:
        """The costs file's entries, without those that are at their default."""
        result: dict[str, Any] = {"stages": self.stages}
        for f in fields(self):
            value = getattr(self, f.name)
            if value != f.default and (f.name not in SLICED or any(value)):
                result[f.name] = _plain(value)
        return result

    def replace(self, **changes: Any) -> StageCosts:
        """A copy with other entries, given as in `of`."""
        entries = {f.name: getattr(self, f.name) for f in fields(self)}
        return StageCosts.of(**{"stages": self.stages, **entries, **changes})

    def divided(self, parts: int) -> StageCosts:
        """The costs of as many stages with a part of these stages' work each; their messages stay as long."""
        if parts == 1:
            return self
        changes: dict[str, Any] = {}
        for name in (f.name for f in fields(self) if f.name not in UNDIVIDED):
            if isinstance(entry := getattr(self, name), tuple):
                changes[name] = tuple(Fraction(n) / parts if isinstance(n, int) else n / parts for n in entry)
        return replace(self, **changes)

    def joined(self, stages: int) -> StageCosts:
        """The costs of fewer stages, each of which is several consecutive ones of these.

        Raises InputError if these stages cannot be shared out evenly, or an entry of them cannot be added.
        """
        if stages == self.stages:
            return self
        if self.stages % stages:
            raise InputError(
                f"The costs are for {self.stages} stages, but {stages} are asked for: devices x chunks must be"
                f" {self.stages}, or divide it."
            )
        for name in NOT_ADDED:
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
        """A copy under another memory limit per device."""
        return replace(self, memory_limit=None if memory_limit is None else _numbers("memory_limit", memory_limit))

    def check_for(self, *, devices: int, micro_batches: int) -> None:
        """Raise InputError if an entry is for another number of devices or micro-batches."""
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
        """Bytes that are on a device throughout."""
        return self.static[device if len(self.static) > 1 else 0]

    def limit_of(self, device: int) -> Number | None:
        """The memory limit of a device in bytes; None if there is none."""
        limit = self.memory_limit
        return None if limit is None else limit[device if len(limit) > 1 else 0]

    def capacity_of(self, device: int) -> Number | None:
        """Bytes that the limit leaves for activations on a device; None if there is no limit."""
        limit = self.limit_of(device)
        return None if limit is None else limit - self.static_of(device)

    def scale_of(self, micro_batch: int) -> Number:
        """The factor on times and activations of a micro-batch."""
        return 1 if self.micro_batch_scale is None else self.micro_batch_scale[micro_batch]

    def attention_scale_of(self, micro_batch: int) -> Number:
        """The factor on the part of times that grows with the keys that a token attends to."""
        pattern = self.attention_scale
        return self.scale_of(micro_batch) * (1 if pattern is None else pattern[micro_batch % len(pattern)])

    def backward(self, stage: int) -> Number:
        """Time of the fused backward B, without recomputation."""
        return self.backward_input[stage] + self.backward_weight[stage]

    def work(self, stage: int) -> Number:
        """Recompute-free compute time of one micro-batch on a stage."""
        return self.forward[stage] + self.backward(stage)

    def dropped_bytes(self, stage: int) -> Number:
        """Bytes that recomputation does not keep."""
        return self.activation[stage] - self.activation_recomputed[stage]


SLICED = (
    "attention_forward", "attention_backward", "attention_recompute", "keys_and_values", "key_value_gradient",
)  # fmt: skip
"""Entries per stage that slices of sequences, or micro-batches of different lengths, add."""
PER_STAGE = (
    "forward", "backward_input", "backward_weight", "recompute", "activation", "activation_after_input",
    "activation_recomputed", "recompute_deeper", "activation_deeper", "recompute_workspace",
    "recompute_workspace_input", "communication",
    "offload", "reload", "offload_overlap", "reload_overlap", "recompute_overlap", "optimizer_step", "host_step",
    "gradient_offload", "parameter_load", "gradient_reduce", "parameter_gather", "gathered", *SLICED,
)  # fmt: skip
"""Entries that have a number for each stage."""
OVERLAPS = ("offload_overlap", "reload_overlap", "recompute_overlap")
NOT_ADDED = (*OVERLAPS, "recompute_workspace", "recompute_workspace_input")
"""Entries of stages that do not say those of their union, unless they are 0."""
UNDIVIDED = (
    *OVERLAPS, "communication", "link_groups", "static", "memory_limit", "micro_batch_scale", "attention_scale",
)  # fmt: skip
"""Entries that say nothing of how much a stage computes or keeps."""
_OPTIONAL = (
    "recompute", "activation_after_input", "recompute_deeper", "activation_deeper", "recompute_workspace",
    "recompute_workspace_input", "offload", "reload",
)  # fmt: skip
"""Entries per stage that may be left out, or None."""


_LISTS = ("static", "memory_limit", "micro_batch_scale", "attention_scale")
"""Entries that have numbers of devices, micro-batches or slices."""


def _check_pairs(each: Mapping[str, PerStage]) -> None:
    """Refuse entries per stage without those that they go with, and shares above 1."""
    if "reload" in each and "offload" not in each:
        raise InputError("'reload' has no meaning without 'offload'.")
    for name in OVERLAPS:
        if max(each[name]) > 1:
            raise InputError(f"'{name}' is a share of a transfer, from 0 to 1, not {max(each[name])}.")
    if ("recompute_deeper" in each) != ("activation_deeper" in each):
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
    """Refuse costs with which a step computes for no time at all, so that no share of its time has a meaning."""
    if not any(work) or (micro_batch_scale and not any(micro_batch_scale)):
        raise InputError("The times of forwards and backwards are all 0; a step must take some time.")


def check_slices(slices: int, attention_scale: Sequence[Number] | None) -> None:
    """Refuse slices of sequences without a number for each in `attention_scale`, with an InputError."""
    if not isinstance(slices, int) or slices < 1 or (slices > 1 and len(attention_scale or ()) != slices):
        raise InputError(f"'attention_scale' must have a number for each of {slices} 'slices'.")


def check_number(name: str, value: Number) -> None:
    """Refuse a time or size that is negative, or no size that anything has, with an InputError that names the entry."""
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
    """Refuse entries that are for another number of devices or micro-batches, with an InputError that names one."""
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
    """The memory limit of each device, of one entry for all of them or one for each; infinite if there is none."""
    limits = (float("inf"),) if memory_limit is None else memory_limit
    return [float(limits[device if len(limits) > 1 else 0]) for device in range(devices)]


def link_groups_of(value: Any) -> tuple[tuple[int, ...], ...]:
    """Link groups: lists of devices, each in at most one of them; lists of no device are left out."""
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
