"""The registry of importers, which read a framework's configuration as an ImportedJob."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from debubble.costs import Cluster
from debubble.errors import check_at_least_one
from debubble.imports.command_line import CommandLine
from debubble.imports.defaults import Defaults
from debubble.imports.job import ImportedJob
from debubble.imports.reader import SettingsReader
from debubble.imports.unread import known_entries, with_misspelt_first
from debubble.ir import InputError, RunOptions
from debubble.models import Model
from debubble.registry import FRAMEWORKS, Registry


@dataclass(frozen=True, kw_only=True)
class UserFacts:
    """Facts about a job that the user adds to the configuration, or overrides; None: the configuration's.

    Attributes:
        cluster: The devices of the job.
        model: The model.
        pipeline: Pipeline devices.
        sequence_length: Tokens per sequence.
        micro_batches: Micro-batches per step.
        dtype: The dtype of computation.
        lora: Rank of adapters.
        quantize: Format of frozen weights.
        framework: The framework whose costs are predicted, as `NAME@VERSION[,TRAIT=VALUE ...]`.
        recompute: Recomputation of every layer: none or full.
    """

    cluster: Cluster
    model: Model | None = None
    pipeline: int | None = None
    sequence_length: int | None = None
    micro_batches: int | None = None
    dtype: str | None = None
    lora: int | None = None
    quantize: str | None = None
    framework: str | None = None
    recompute: str | None = None

    def __post_init__(self) -> None:
        check_at_least_one(**self._numbers)

    @property
    def _numbers(self) -> dict[str, int | None]:
        return {
            "pipeline": self.pipeline, "sequence-length": self.sequence_length, "micro-batches": self.micro_batches
        }  # fmt: skip

    @property
    def options(self) -> dict[str, Any]:
        """The options of the run that the user overrides."""
        options = {
            "dtype": self.dtype, "lora": self.lora, "quantize": self.quantize, "framework": self.framework
        }  # fmt: skip
        return {name: value for name, value in options.items() if value is not None}

    def check_agreement(self, job: ImportedJob, path: Path) -> None:
        """Raise InputError if the job contradicts the user's numbers, because its configuration determines them."""
        for (name, specified), read in zip(
            self._numbers.items(), (job.pipeline, job.options.sequence_length, job.micro_batches), strict=True
        ):
            if specified not in (None, read):
                raise InputError(f"{path} has {read} where --{name} says {specified}: leave --{name} out.")


Settings = Mapping[str, Any]
"""A configuration's settings, by the framework's names."""

ReadJob = Callable[[SettingsReader, UserFacts], ImportedJob]
"""Reads a job from the settings of a file and the facts that the user adds."""

Environment = Callable[[Settings], Mapping[str, str]]
"""Returns the environment variables that the framework requires with these settings."""

TurnedOff = Callable[[Settings], Mapping[str, str]]
"""Returns setting -> value that turns it off, for settings that the framework has on by default."""

Conflicts = Callable[[Settings, Settings], Iterable[str]]
"""Returns names of a job's settings (first) that conflict with the changed settings (second)."""

Required = Callable[[Settings, Settings], Settings]
"""Returns the settings that must also change when a job's settings (first) are changed (second; None: removed)."""

Notes = Callable[[Settings, Settings], Iterable[str]]
"""Returns sentences on the effects of changes (second) in a job with these settings (first)."""

Switches = Callable[[Settings, RunOptions], Iterable[Settings]]
"""Returns changed settings (None: removed) that may help a job with these settings and options."""


@dataclass(frozen=True, kw_only=True)
class Importer:
    """Reads the jobs of one framework.

    Attributes:
        name: The target that stands for the framework.
        settings: Reads a file's settings as a flat mapping; raises InputError if it cannot.
        read_job: Reads the job from the settings.
        file: The file with the settings, among those that an export writes.
        defaults: The framework's defaults for settings that a file lacks.
        conflicts: Settings of a job that conflict with changes.
        environment: Environment variables required by settings.
        harmless: Name patterns of entries that cost nothing, besides those of all frameworks, separated by blanks.
        with_arguments: Reads the settings with the command line that starts the job; None: it overrides settings.
        turned_off: Values that turn off settings which are on if they are removed.
        required: Settings that must also change.
        per_pass: Settings that apply to one pass of the pipeline; a job may have several passes per step, a plan one.
        notes: Sentences on the effects of changes.
        switches: Changes that may help a job.
        marks: Name patterns that only files of this framework have, separated by blanks.
        complete: Name patterns of entries for which `entries.txt` is complete, separated by blanks.
        converts: Name patterns of entries whose strings the framework's parser converts, separated by blanks.
        own_arguments: Whether the user's program may have arguments (`--name`) besides the framework's.
    """

    name: str
    settings: Callable[[Path], Settings]
    read_job: ReadJob
    file: str
    defaults: Defaults
    conflicts: Conflicts = lambda job, changed: ()
    environment: Environment = lambda settings: {}
    harmless: str = ""
    with_arguments: Callable[[Path, CommandLine | None], Settings] | None = None
    turned_off: TurnedOff = lambda settings: {}
    required: Required = lambda job, changed: {}
    per_pass: tuple[str, ...] = ()
    notes: Notes = lambda job, changed: ()
    switches: Switches = lambda job, options: ()
    marks: str = ""
    complete: str = ""
    converts: str = ""
    own_arguments: bool = False

    def read(self, path: Path, arguments: str | None) -> Settings:
        """A file's settings, with the command line that starts the job; None: unknown."""
        command_line = CommandLine.parse(arguments)
        if self.with_arguments is not None:
            return self.with_arguments(path, None if arguments is None else command_line)
        return command_line.override(self.settings(path))

    def job(self, settings: Settings, path: Path, facts: UserFacts) -> ImportedJob:
        """The job of a file's settings; raises InputError if they are wrong or contradict the user's facts."""
        self._check_marks(settings, path)
        reader = SettingsReader(settings, path, self.defaults, self.harmless, self.converts)
        known = known_entries(self.name)
        try:
            job = self.read_job(reader, facts)
        except InputError as error:
            raise with_misspelt_first(error, reader, known, own_arguments=self.own_arguments) from None
        if known:
            checked = job.rest.with_misspelt(
                known, self.defaults.source, self.complete, own_arguments=self.own_arguments
            )
            job = replace(job, rest=checked)
        if self.marks and settings and not (self._marked(settings) or reader.has_read):
            raise InputError(f"{path} has no entry that {self.name} reads: give the file that has its configuration.")
        facts.check_agreement(job, path)
        if not job.model.known:
            raise InputError(
                f"debubble does not know the family '{job.model.family}', and a job of it is not predicted from"
                " another's: plan it with its units (--units)."
            )
        return job.with_overrides(facts.options).with_recomputation(facts.recompute).with_whole_layer_remark()

    def _check_marks(self, settings: Settings, path: Path) -> None:
        """Raise InputError for a file of an unsupported tool or of another framework."""
        check_tool(settings, path)
        if not self.marks or self._marked(settings):
            return
        other = next((importer.name for importer in imports.values() if importer._marked(settings)), None)
        if other is not None:
            raise InputError(f"{path} is no configuration of {self.name}: `debubble import {other} {path}` reads it.")

    def _marked(self, settings: Settings) -> bool:
        return any(fnmatch(name, mark) for mark in self.marks.split() for name in settings)


def check_tool(settings: Settings, path: Path) -> None:
    """Raise InputError with advice for a file of a tool that no framework's importer reads as its own."""
    for sentence, names in _UNSUPPORTED_TOOLS.items():
        if any(name in settings for name in names):
            raise InputError(f"{path} is {sentence}.")


_SIMULATE = "give its model, degrees and batch to `debubble simulate` (--pipeline, --tensor, --data, --micro-batches)"
_UNSUPPORTED_TOOLS: Mapping[str, tuple[str, ...]] = {
    "for a trainer such as LLaMA-Factory, axolotl or TRL, and read by `debubble import deepspeed` if its entry"
    " 'deepspeed' names DeepSpeed's JSON; otherwise give its model, degrees and batch to `debubble simulate` (--data,"
    " --zero, --micro-batches)": (
        "per_device_train_batch_size", "model_name_or_path", "base_model", "dist_config.name",
    ),
    f"nanotron's, which is not read: {_SIMULATE}": ("tokens.micro_batch_size", "parallelism.pp_engine"),
    f"GPT-NeoX's, which is not read: {_SIMULATE}": (
        "pipe_parallel_size", "pipe-parallel-size", "model_parallel_size", "model-parallel-size",
    ),
    "accelerate's, which `debubble import deepspeed` reads if it starts DeepSpeed": (
        "distributed_type", "compute_environment",
    ),
}  # fmt: skip
"""Description of an unsupported tool's file, with advice -> entries that identify such a file."""

imports: Registry[Importer] = Registry(
    "debubble.imports", folders=(FRAMEWORKS, "import_"), kind="framework to import from"
)
