"""Types of the JSON output of commands that list registries, and the keys of all answers."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from debubble.costs.devices.known_hardware import Hardware
from debubble.costs.frameworks import Framework


class Answer(Struct, forbid_unknown_fields=True, kw_only=True):
    """Any answer; `schema` is the version of its keys."""

    schema: Literal[2]


class HardwareAnswer(Answer, forbid_unknown_fields=True, kw_only=True):
    """`debubble hardware --json`."""

    hardware: list[Hardware]


class FrameworkVersion(Struct, forbid_unknown_fields=True, kw_only=True):
    """A framework's traits from a version on."""

    name: str
    version: str
    traits: Framework


class FrameworksAnswer(Answer, forbid_unknown_fields=True, kw_only=True):
    """`debubble frameworks --json`."""

    frameworks: list[FrameworkVersion]
    traits: Annotated[Framework, Meta(description="What is priced without --framework.")]


class VisionAnswer(Struct, forbid_unknown_fields=True, kw_only=True):
    """The vision tower of a model that is known by name."""

    kind: str
    parameters: int
    layers: int
    hidden: int
    patches: Annotated[int, Meta(description="Of one image, where --image-patches does not say.")]
    tokens: Annotated[int, Meta(description="Of the language model, that such an image takes.")]


class ModelAnswer(Struct, forbid_unknown_fields=True, kw_only=True):
    """A model that is known by name."""

    name: str
    family: str
    parameters: int
    active_parameters: Annotated[int, Meta(description="That a token passes through.")]
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    experts: Annotated[int, Meta(description="Per layer; 0: none.")]
    language: Annotated[str | UnsetType, Meta(description="Family of the language model next to the tower.")] = UNSET
    vision: Annotated[VisionAnswer | UnsetType, Meta(description="The tower, if it has one.")] = UNSET


class ModelsAnswer(Answer, forbid_unknown_fields=True, kw_only=True):
    """`debubble models --json`."""

    models: list[ModelAnswer]


class PlannerAnswer(Struct, forbid_unknown_fields=True, kw_only=True):
    """A planner."""

    name: str
    paper: str
    summary: str


class PlannersAnswer(Answer, forbid_unknown_fields=True, kw_only=True):
    """`debubble planners --json`."""

    planners: list[PlannerAnswer]


class ScheduleAnswer(Struct, forbid_unknown_fields=True, kw_only=True):
    """A schedule."""

    name: str
    paper: str
    bubble: str
    memory: str
    chunks: int
    options: list[str]
    summary: str


class SchedulesAnswer(Answer, forbid_unknown_fields=True, kw_only=True):
    """`debubble schedules --json`."""

    schedules: list[ScheduleAnswer]
