"""Options and option groups that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NoReturn, get_type_hints

import typer

from debubble.cli.job_file import DEGREES as DEGREES
from debubble.cli.names import (
    Names,
    cluster_completion,
    completion,
    dtype_names,
    known_frameworks,
    model_names,
    name_option,
    optimizer_names,
)
from debubble.errors import check_at_least_one
from debubble.ir import DEFAULT_EFFORT, InputError, RunOptions

if TYPE_CHECKING:
    from debubble.costs import Cluster

SequenceLength = Annotated[int, typer.Option(help="Tokens per sequence.")]
Lora = Annotated[int, typer.Option(help="Train LoRA adapters of that rank on every linear layer (0: the whole model).")]
Dtype = Annotated[
    str, name_option(dtype_names, noun="dtype", help="bf16, fp16, fp32, or of linear layers alone: fp8, mxfp8, nvfp4.")
]
PLANNING, COSTS, OUTPUT = "What is asked", "Costs instead of a MODEL", "Output"
"""Section titles of the help."""

Chunks = Annotated[int | None, typer.Option(help="Stages per device.", rich_help_panel=PLANNING)]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        help="Per device: bytes, with a unit such as 20GiB, or its share such as 70%.",
        rich_help_panel=PLANNING,
    ),
]
Devices = Annotated[int | None, typer.Option(help="Pipeline devices, with abstract costs.", rich_help_panel=COSTS)]
Costs = Annotated[
    Path | None,
    typer.Option("--costs", help="Stage costs, as a costs file, whose unit --memory-limit has.", rich_help_panel=COSTS),
]
UnitsFile = Annotated[Path | None, typer.Option("--units", help="Model units, as a units file.", rich_help_panel=COSTS)]
_MODEL = typer.Argument(
    metavar="MODEL",
    help="A built-in name, a config.json, a folder with one, or a job file (see `init`).",
    autocompletion=completion(model_names),
)
ModelName = Annotated[str, _MODEL]
OptionalModelName = Annotated[str | None, _MODEL]
PlanFile = Annotated[Path, typer.Argument(help="A plan file.", metavar="PLAN")]

CLUSTER = "Devices, as NxNAME (8xA100-80GB), nodes of them (2x4xL40S-48GB) or a YAML file; see `hardware`."
"""The help of --cluster."""


def parse_cluster(text: str | None) -> Cluster:
    """Parse --cluster.  Raises InputError if it is missing or unknown."""
    from debubble.costs import Cluster

    if text is None:
        raise InputError("Give the devices with --cluster, such as --cluster 8xA100-80GB (see `debubble hardware`).")
    return Cluster.parse(text)


def refuse_without_model(name: str) -> NoReturn:
    """Raise the InputError for an option that needs a model."""
    option = f"--{name.replace('_', '-')}"
    raise InputError(f"{option} is an option of a MODEL on a --cluster; leave it out here.")


@dataclass(frozen=True, kw_only=True)
class OptionGroup:
    """Options of a section of the help, one per field."""

    section: ClassVar[str]

    def __post_init__(self) -> None:
        check_counts(**{f.name: getattr(self, f.name) for f in fields(self)})


COUNTS = frozenset(DEGREES) - {"zero"} | {
    "sequence_length",
    "images",
    "image_patches",
    "global_batch",
    "micro_batches",
    "chunks",
}
"""Options whose values are counts, which must be at least 1."""


def check_counts(**values: Any) -> None:
    """Raise InputError, which names the option, for a count below 1 among these values."""
    check_at_least_one(**{name: values[name] for name in COUNTS & values.keys()})


def option(
    help: str, *declarations: str, default: Any = None, names: Names | None = None, noun: str = "", **settings: Any
) -> Any:
    """Declare a field of an OptionGroup.

    Args:
        help: The help text.
        declarations: The option's names, if they differ from the field's.
        default: The default value.
        names: The names that the option accepts; None: any value.
        noun: The word for such a name in errors.
        settings: Further arguments of `typer.Option`.
    """
    if names is None:
        declared = typer.Option(*declarations, help=help, **settings)
    else:
        declared = name_option(names, *declarations, noun=noun, help=help, **settings)
    return field(default=default, metadata={"option": declared})


def flag(help: str) -> Any:
    """Declare a field of an OptionGroup that is a flag without a value."""
    return option(help, default=False)


@dataclass(frozen=True, kw_only=True)
class ModelRun(OptionGroup):
    """Options of a model's run, for all commands that take a model.

    Degrees are None if unset; the command then chooses them.
    """

    section: ClassVar[str] = "The run of the MODEL"

    cluster: str | None = option(CLUSTER, autocompletion=cluster_completion)
    pipeline: int | None = option("Pipeline devices.")
    tensor: int | None = option("Tensor-parallel degree.")
    data: int | None = option("Data-parallel degree.")
    context: int | None = option("Context-parallel degree.")
    expert: int | None = option("Ranks between which a layer's experts are divided.")
    expert_tensor: int | None = option("Ranks that divide each expert (default: the tensor-parallel degree).")
    micro_batch_size: int | None = option("Sequences per micro-batch.")
    sequence_length: SequenceLength = RunOptions.sequence_length
    images: int = option("Images of each sequence, for a model with a vision tower.", default=1)
    image_patches: int | None = option("Patches of each image (vision towers that take images of any size).")
    freeze: str | None = option(
        "vision: the vision tower is frozen, as it always is with --lora.",
        names=lambda: ("vision",),
        noun="part to freeze",
    )
    slices: int | None = option("Slices of every sequence, which pass the pipeline one after the other.")
    optimizer: str = option(
        "Whose states count as memory: adamw, adam, adamw-8bit, lion, muon, momentum or sgd.",
        names=optimizer_names,
        default="adamw",
        noun="optimizer",
    )
    zero: int | None = option("ZeRO level over the data- and context-parallel ranks.", min=0, max=3)
    dtype: Dtype = "bf16"
    lora: Lora = 0
    quantize: str | None = option(
        "Format of the frozen weights next to adapters: nf4 (4 bits, as in QLoRA), or nf4-dq (double quantisation)."
    )
    post_validation: bool = flag(
        "Update before the gradients' norm is known: the span counts, and copies that take updates back."
    )
    framework: str = option(
        "Whose kernels and overlaps are priced: NAME@VERSION[,TRAIT=VALUE ...], as in `frameworks`.",
        default="",
        autocompletion=completion(known_frameworks),
    )
    host_optimizer: float = option(
        "Share of the optimizer states that hosts keep, and step after the pipeline (megatron, primus; deepspeed: 1).",
        default=0.0,
        min=0,
        max=1,
    )
    expert_overlap: bool = option(
        "Tokens travel to experts during another micro-batch's computing (megatron, primus: combined 1F1B).",
        default=False,
    )
    gradient_dtype: str = option(
        "Dtype of gradients in mixed precision: fp32, bf16 or fp16 (megatron, primus).", default="fp32"
    )
    moment_dtype: str = option("Dtype of the optimizer's moments: fp32 or bf16 (megatron, primus).", default="fp32")
    master_dtype: str = option(
        "Dtype of the weights that the optimizer steps: fp32, or bf16, as of gradients and moments then (debubble,"
        " torchtitan, automodel, deepspeed).",
        default="fp32",
    )
    sequence_parallel: bool = option(
        "Whether tensor-parallel ranks divide norms, too, if the framework does.", default=True
    )
    flash_attention: bool = option(
        "Whether attention keeps no scores, if the framework has such a kernel.", default=True
    )

    @property
    def degrees(self) -> dict[str, Any]:
        """The degrees that are set, including the pipeline's and the micro-batch size."""
        return {name: value for name in DEGREES if (value := getattr(self, name)) is not None}

    @property
    def run_options(self) -> RunOptions:
        """The RunOptions of these options, with defaults for unset degrees."""
        degrees = {name: value for name, value in self.degrees.items() if name != "pipeline"}
        return RunOptions(**degrees, **self.settings)

    @property
    def settings(self) -> dict[str, Any]:
        """The entries of RunOptions other than degrees."""
        return {f.name: getattr(self, f.name) for f in fields(RunOptions) if f.name not in DEGREES}

    def refuse_options(self) -> None:
        """Raise InputError for the first set option that needs a model, which post-validation does not."""
        for f in fields(self):
            if f.name != "post_validation" and getattr(self, f.name) != f.default:
                refuse_without_model(f.name)

    def require_cluster(self) -> Cluster:
        """Parse --cluster.  Raises InputError if it is missing or unknown."""
        return parse_cluster(self.cluster)


@dataclass(frozen=True, kw_only=True)
class SearchLimits(OptionGroup):
    """Options that limit a planner's search."""

    section: ClassVar[str] = "The search"

    effort: float = option(
        "Work that a planner may do, in seconds of two idle cores: the same plan on any machine.",
        default=DEFAULT_EFFORT,
    )
    deadline: float | None = option(
        "Seconds on the clock in which the answer is there (default: 10 x effort + 60 for a planner)."
    )
    cache: bool = flag(
        "Start from what this machine has found for the same or a similar question, and keep what is better."
    )
    seed: int = option("Seed of the search.", default=0)

    def reserving(self, seconds: float) -> SearchLimits:
        """The limits with a deadline reduced by these seconds, or by half if that is less.

        Raises InputError for a deadline that is not above 0.
        """
        if self.deadline is not None and not self.deadline > 0:
            raise InputError(f"The deadline must be a number of seconds above 0, not {self.deadline:g}.")
        return (
            self if self.deadline is None else replace(self, deadline=max(self.deadline - seconds, self.deadline / 2))
        )


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command for typer: parameters that are OptionGroups become an option per field."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {n: hint for n, hint in hints.items() if is_dataclass(hint) and hasattr(hint, "section")}
    parameters: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        if name in groups:
            types = get_type_hints(groups[name], include_extras=True)
            for f in fields(groups[name]):
                declared = _declared(f, types[f.name])
                declared.rich_help_panel = groups[name].section
                # Keeps typer from adding --no-NAME, which is useless for flags that are off by default.
                if types[f.name] is bool and f.default is False and not declared.param_decls:
                    declared.param_decls = (f"--{f.name.replace('_', '-')}",)
                type_: Any = Annotated[getattr(types[f.name], "__origin__", types[f.name]), declared]
                parameters.append(Parameter(f.name, Parameter.KEYWORD_ONLY, default=f.default, annotation=type_))
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name]))

    @wraps(command)
    def call(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{f.name: values.pop(f.name) for f in fields(group)})
        command(**values)

    call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _declared(field: Field[Any], hint: Any) -> Any:
    """The option of a field, copied since other commands may show it in another section."""
    if "help" in field.metadata:
        return typer.Option(*field.metadata["declarations"], help=field.metadata["help"], min=field.metadata["min"])
    return copy(field.metadata["option"] if field.metadata else hint.__metadata__[0])


def with_memory_limit(cluster: Cluster, text: str | None) -> Cluster:
    """Apply --memory-limit to a cluster.  Raises InputError if it exceeds the memory of all its devices."""
    if text is None:
        return cluster
    limited, largest = cluster.with_limit(text), max(cluster.types, key=lambda type_: type_.memory)
    if min(limited.memory_limits) > largest.memory:
        has = f"the {largest.memory / 2**30:.4g} GiB that {largest.name} has"
        raise InputError(f"--memory-limit {text} is more than {has}; give less, or memory_limit in a cluster file.")
    return limited


def required_devices(devices: int | None, *, otherwise: str = "") -> int:
    """The pipeline devices of abstract costs.  Raises InputError, with the alternative `otherwise`, if unset."""
    if devices is None:
        raise InputError(f"Give the number of pipeline devices with --devices P{otherwise}.")
    if devices < 1:
        raise InputError(f"A pipeline needs at least one device, not {devices}.")
    return devices


def abstract_limit(text: str | None) -> float | int | None:
    """Parse a memory limit in the unit of abstract costs, as int if it is whole."""
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        raise InputError(f"--memory-limit is '{text}'; with abstract costs it must be a number.") from None
    return int(number) if number.is_integer() else number
