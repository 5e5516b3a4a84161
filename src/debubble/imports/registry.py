"""The importers' registry: each reads a framework's configuration as an ImportedJob."""

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
    """The facts that a configuration may leave to its user.

    Attributes:
        cluster: The devices of the job.
        model: The model; None: as the configuration describes it.
        pipeline: Pipeline devices; None: as the configuration says.
        sequence_length: Tokens per sequence; None: as the configuration says.
        micro_batches: Micro-batches per step; None: as the configuration says.
        dtype: Of computing; None: as the configuration says.
        lora: Rank of adapters; None: as the configuration says.
        quantize: Format of frozen weights; None: as the configuration says.
        framework: What is priced, as `NAME@VERSION[,TRAIT=VALUE ...]`; None: as the configuration says.
        recompute: What every layer recomputes, none or full; None: as the configuration says.
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
        """The options of the run that are given, whatever the configuration says."""
        given = {
            "dtype": self.dtype, "lora": self.lora, "quantize": self.quantize, "framework": self.framework
        }  # fmt: skip
        return {name: value for name, value in given.items() if value is not None}

    def check_followed(self, job: ImportedJob, path: Path) -> None:
        """Raise InputError if the job is not of what was given, because its configuration decides that."""
        for (name, given), of_job in zip(
            self._numbers.items(), (job.pipeline, job.options.sequence_length, job.micro_batches), strict=True
        ):
            if given not in (None, of_job):
                raise InputError(f"{path} has {of_job} where --{name} says {given}: leave --{name} out.")


Settings = Mapping[str, Any]
"""A configuration's settings, by the names that its framework has for them."""

ReadJob = Callable[[SettingsReader, UserFacts], ImportedJob]
"""Reads a job from the settings of a file, with what its user adds."""

Environment = Callable[[Settings], Mapping[str, str]]
"""The environment variables that the framework asks for with these settings."""

TurnedOff = Callable[[Settings], Mapping[str, str]]
"""The values that turn off what the framework of these settings has on by default."""

Conflicts = Callable[[Settings, Settings], Iterable[str]]
"""Names the job's settings, the first, that cannot stand next to the changed ones, the second."""

Required = Callable[[Settings, Settings], Settings]
"""The settings that the framework asks for next to the job's, the first, with the changes of the second (None: leaves
out), where the job has others."""

Notes = Callable[[Settings, Settings], Iterable[str]]
"""Sentences on what the changes of the second settings bring about in a job of the first."""

Switches = Callable[[Settings, RunOptions], Iterable[Settings]]
"""Settings that may help a job with these settings and options, as they then are (None: left out)."""


@dataclass(frozen=True, kw_only=True)
class Importer:
    """Reads the jobs of one framework.

    Attributes:
        name: The target that the framework is.
        settings: Reads a file's settings, flat; raises InputError with a sentence if it is none.
        read_job: Reads what they say of the job.
        file: Which of the files that an export writes has the settings.
        defaults: What the framework takes for settings that a file does not have.
        conflicts: The job's settings that cannot stand next to those that a plan changes (None: leaves out).
        environment: The environment variables that settings ask for.
        harmless: Patterns of the names of entries that cost nothing, besides those of all frameworks, in one text.
        with_arguments: Reads them with the command line that starts the job; None: its names are the settings'.
        turned_off: The values that turn settings off where leaving them out does not.
        required: What the framework asks for next to the job's and the changed settings.
        of_pass: Settings for one pass of the pipeline, of which a job's step may have several and a plan's has one.
        notes: Sentences on what changed settings bring about.
        switches: Settings that may help a job.
        marks: Patterns of names that its files have and those of others have not, in one text.
        converts: Patterns of names of entries whose words the framework's parser converts to numbers, true and false,
            in one text.
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
    of_pass: tuple[str, ...] = ()
    notes: Notes = lambda job, changed: ()
    switches: Switches = lambda job, options: ()
    marks: str = ""
    converts: str = ""

    def read(self, path: Path, arguments: str | None) -> Settings:
        """A file's settings, with the command line that starts the job; None: nobody said it."""
        given = CommandLine.of(arguments)
        if self.with_arguments is not None:
            return self.with_arguments(path, None if arguments is None else given)
        return given.changed(self.settings(path))

    def job(self, settings: Settings, path: Path, given: UserFacts) -> ImportedJob:
        """The job of a file's settings; raises InputError if they are wrong, or decide what the user gave otherwise."""
        self._check_marks(settings, path)
        reader = SettingsReader(settings, path, self.defaults, self.harmless, self.converts)
        known = known_entries(self.name)
        try:
            read = self.read_job(reader, given)
        except InputError as error:
            raise with_misspelt_first(error, reader, known) from None
        if known:
            read = replace(read, rest=read.rest.with_misspelt(known, self.defaults.of))
        if self.marks and settings and not (self._marked(settings) or reader.has_read):
            raise InputError(f"{path} has no entry that {self.name} reads: give the file that has its configuration.")
        given.check_followed(read, path)
        if not read.model.known:
            raise InputError(
                f"debubble does not know the family '{read.model.family}', and a job of it is not predicted from"
                " another's: plan it with its units (--units)."
            )
        return read.with_given(given.options).recomputing(given.recompute).with_whole_layers()

    def _check_marks(self, settings: Settings, path: Path) -> None:
        """Refuse a trainer's file, and one that has another framework's marks and none of this one's."""
        for sentence, names in _OTHERS.items():
            if any(name in settings for name in names):
                raise InputError(f"{path} is {sentence}.")
        if not self.marks or self._marked(settings):
            return
        other = next((each.name for each in imports.values() if each._marked(settings)), None)
        if other is not None:
            raise InputError(f"{path} is no configuration of {self.name}: `debubble import {other} {path}` reads it.")

    def _marked(self, settings: Settings) -> bool:
        return any(fnmatch(name, mark) for mark in self.marks.split() for name in settings)


_SIMULATED = "give its model, degrees and batch to `debubble simulate` (--pipeline, --tensor, --data, --micro-batches)"
_OTHERS: Mapping[str, tuple[str, ...]] = {
    "for a trainer such as LLaMA-Factory, axolotl or TRL, whose files are not read: import the DeepSpeed JSON that it"
    " names, with --model, --sequence-length and its arguments, as in --args '--per_device_train_batch_size 1 --bf16"
    " True'": ("per_device_train_batch_size", "model_name_or_path", "base_model"),
    f"nanotron's, which is not read: {_SIMULATED}": ("tokens.micro_batch_size", "parallelism.pp_engine"),
    f"GPT-NeoX's, which is not read: {_SIMULATED}": (
        "pipe_parallel_size", "pipe-parallel-size", "model_parallel_size", "model-parallel-size",
    ),
    "accelerate's, which is not read: import the DeepSpeed JSON that it names (deepspeed_config_file) with `debubble"
    f" import deepspeed`, or {_SIMULATED}": ("distributed_type", "compute_environment"),
}  # fmt: skip
"""What a file of another tool is, and what to do instead -> entries by which it is known."""

imports: Registry[Importer] = Registry(
    "debubble.imports", folders=(FRAMEWORKS, "import_"), kind="framework to import from"
)
