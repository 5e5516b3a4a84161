"""Settings of configuration files, and command-line arguments, each as one flat mapping.

YAML, JSON and TOML are read as `a.b.c` -> value.  Arguments stand in a shell script, which is read and never run, or in
the list that Megatron-LM logs.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from debubble.files import parse, read_file
from debubble.imports.command_line import CommandLine
from debubble.imports.defaults import Defaults
from debubble.imports.script_arguments import named_arguments, training_command
from debubble.imports.shell.scripts import RANKS, TRAINING_ARGUMENTS, follow, named_file
from debubble.imports.training_scripts import COMMAND, swift_command, swift_file
from debubble.ir import InputError

_READERS: Mapping[str, Callable[[str], Any]] = {
    ".json": json.loads,
    ".toml": tomllib.loads,
    ".yaml": yaml.safe_load,
    ".yml": yaml.safe_load,
}


def read_settings(path: Path) -> Mapping[str, Any]:
    """The settings of a file, by their paths; InputError as `read_tree`."""
    return dict(_flat(read_tree(path)))


def read_tree(path: Path) -> Mapping[Any, Any]:
    """The settings of a file as it nests them.

    Raises:
        InputError: if it cannot be read, or is none of the formats.
    """
    if path.suffix not in _READERS:
        raise InputError(f"{path} is no configuration that is read here; there are: {', '.join(_READERS)}.")
    refusal = f"{path} is no {path.suffix[1:].upper()}"
    text = parse(bytes.decode, read_file(path, "configuration"), refusal)
    # PyYAML lets what its constructors of dates and numbers raise pass.
    tree = parse(_READERS[path.suffix], text, refusal, yaml.YAMLError, AttributeError)
    if not isinstance(tree, dict):
        raise InputError(f"{path} has no settings by name.")
    if _VERL_SECTION in tree or str(tree.get("_target_", "")).startswith("verl."):
        raise InputError(_verl_refusal(path))
    return tree


_VERL_SECTION = "actor_rollout_ref"
"""The part of every configuration of verl."""


def _verl_refusal(path: Path) -> str:
    return (
        f"{path} is verl's, whose steps of reinforcement learning are not predicted: to predict the training of its"
        f" actor, write the degrees in {_VERL_SECTION}.actor.megatron as Megatron-LM's arguments into a script"
        " (`pretrain_gpt.py --tensor-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 256 --bf16`), and"
        " import that with --model and --sequence-length."
    )


def _flat(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def read_constants(path: Path) -> dict[str, Any]:
    """The constants of a Python file that debubble wrote, which is not run.

    Raises:
        InputError: if it cannot be read, or is no such file.
    """
    try:
        return {
            node.targets[0].id: ast.literal_eval(node.value)
            for node in ast.parse(read_file(path, "recipe")).body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{path} is no recipe of debubble's, whose settings are constants.") from error


class SettingsReader:
    """Settings that are asked for by type, and know which of them were.

    Attributes:
        settings: The file's settings.
        path: The file.
        defaults: What the framework takes for settings that the file does not have.
        harmless: Patterns of the names of entries that cost nothing, in one text.
    """

    def __init__(self, settings: Mapping[str, Any], path: Path, defaults: Defaults, harmless: str) -> None:
        self.settings, self.path, self.defaults, self.harmless = settings, path, defaults, harmless
        self._asked: set[str] = set()

    def _value(self, name: str) -> Any:
        """A setting as it stands there, or the framework's default."""
        self._asked.add(name)
        return self.settings[name] if name in self.settings else self.defaults.values.get(name)

    def get(self, name: str, default: Any = None) -> Any:
        """A setting, or the framework's default; `default` where that is missing, null or `none`."""
        value = self._value(name)
        return default if value in (None, "none", "None") else value

    def unsaid(self, **facts: Sequence[str]) -> dict[str, str]:
        """The facts of which the file has none of the settings -> whose default stands for them.

        Args:
            facts: Fact -> names of the settings that say it.
        """
        return {
            fact: self.defaults.of
            for fact, names in facts.items()
            if all(self.settings.get(name) is None for name in names)
        }

    def text(self, name: str, default: str) -> str:
        """A word; raises InputError if the setting is none."""
        value = self.get(name, default)
        if not isinstance(value, str):
            raise InputError(f"{self.path}: {name} is {value!r}, which is no word.")
        return value

    def choice(self, name: str, default: str, choices: Mapping[str, str]) -> str:
        """The value of a word such as `torch.bfloat16`; raises InputError if it is none of the choices."""
        word = self.text(name, default).removeprefix("torch.")
        if word not in choices:
            raise InputError(f"{self.path}: {name} is '{word}', and only {', '.join(choices)} are priced.")
        return choices[word]

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number (degrees and batches are a `size`); raises InputError if it is missing, or is none."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            said = (
                f"is missing: add it with --args '--{name} N'"
                if value is None
                else f"is {value!r}, which is no whole number"
            )
            if value == "auto":
                said = f"is 'auto', which your trainer fills in: give it with --args '--{name} N'"
            raise InputError(f"{self.path}: {name} {said}.")
        return value

    def __contains__(self, name: str) -> bool:
        self._asked.add(name)
        return name in self.settings or name in self.defaults.values

    def assume(self, name: str, *values: Any, default: Any = None) -> Iterator[str]:
        """A sentence if a setting has none of the values that the prediction counts on.

        Args:
            name: The setting.
            values: What the prediction counts on.
            default: The framework's own value where the setting is missing; None: one that is counted on.
        """
        value = self.get(name, values[0] if default is None else default)
        if value not in values:
            yield f"{name} is {value}, and the prediction counts on {values[0]}."

    @property
    def has_read(self) -> bool:
        """True if any of the file's settings was asked for."""
        return not self._asked.isdisjoint(self.settings)

    def skip(self, prefix: str) -> None:
        """Count all settings that begin so as asked for: something else says what they say."""
        self._asked.update(name for name in self.settings if name.startswith(prefix))

    @property
    def names(self) -> Iterable[str]:
        """Names of all settings, the defaults' too."""
        return {**self.defaults.values, **self.settings}

    @property
    def missing(self) -> list[str]:
        """Names that were asked for, and that the file does not have."""
        return sorted(self._asked - self.settings.keys())

    @property
    def left(self) -> list[str]:
        """Names of the settings that nobody asked for."""
        return [name for name in self.settings if name not in self._asked]

    def size(self, name: str, default: int | None = None, *, instead: int | None = None) -> int:
        """A positive whole number; raises InputError if it is missing without a default, or is none.

        Args:
            name: The setting.
            default: Its value where it is missing.
            instead: What the user gives in its place, whatever it is; None: nothing.
        """
        if instead is not None:
            self._asked.add(name)
            return instead
        value = self.number(name, default)
        if value < 1:
            raise InputError(f"{self.path}: {name} is {value}, which is no number of anything.")
        return value

    def numbers(self, name: str) -> list[int]:
        """A list of whole numbers, none if it is missing; raises InputError if the setting is anything else."""
        value = self.get(name, [])
        if not isinstance(value, list) or not all(type(each) is int for each in value):
            raise InputError(f"{self.path}: {name} is {value!r}, which is no list of whole numbers.")
        return value


SOURCED = "source"
"""The entry of a script with the names of those that it sources and that are not there."""
OVERWRITTEN = "overwritten"
"""The entry of a script with the variables that it is given and sets otherwise, in words."""
_LOGGED = re.compile(r"^(?:.*[\]:>|])?\s*(\w+) \.{2,} (.*?)\s*$", re.MULTILINE)
"""A line of the list, which launchers and schedulers may have put a rank or a time before."""
_BRIDGE = re.compile(r"\brun_recipe\.py|\bmegatron[./]bridge\b|Megatron-Bridge/\S*\.py")
"""What a script has that starts a recipe of Megatron-Bridge."""
_DUMP = 10
"""Lines of a log that make it the list of a run's arguments."""


def read_arguments(path: Path, given: CommandLine | None = None) -> Mapping[str, Any]:
    """The arguments in a file, `--name` -> True, a word, or a tuple of words.

    Args:
        path: A shell script, which is followed and never run, or a log with the list of arguments.
        given: The command line that starts it; None: nobody said it.  Its arguments are the training's too.

    Raises:
        InputError: if the file cannot be read, has no arguments, or what they are is not told.
    """
    text = read_file(path, "script").decode(errors="replace")
    if f"{_VERL_SECTION}." in text or "-m verl." in text:
        raise InputError(_verl_refusal(path))
    logged = _LOGGED.findall(text)
    if len(logged) >= _DUMP:
        arguments = dict(_logged_arguments(logged))
    else:
        script = follow(text, path, given)
        command = training_command(script, path)
        arguments = named_arguments(command.words)
        if script.missing and arguments:
            arguments[SOURCED] = script.missing
        if script.overwritten:
            arguments[OVERWRITTEN] = script.overwritten
        if script.world_size is not None:
            arguments.setdefault("--world-size", script.world_size)
        if (swift := swift_command(command.words)) is not None:
            arguments = {COMMAND: swift, **_arguments_of_file(command.words, path), **command.ranks, **arguments}
    if given is not None:
        arguments |= named_arguments(given.words)
    if not TRAINING_ARGUMENTS & arguments.keys() and COMMAND not in arguments:
        if _BRIDGE.search(text):
            raise InputError(
                f"{path} starts a recipe of Megatron-Bridge: give the configuration that its run saves"
                " (run_config.yaml), or a YAML of what the script overrides (`model: {tensor_model_parallel_size: 2}`)"
                " with --model."
            )
        raise InputError(
            f"{path} has no arguments of a training such as --num-layers 32, nor the list of them that Megatron-LM"
            " logs: give the file that has them."
        )
    return arguments


def _arguments_of_file(words: Sequence[str], path: Path) -> dict[str, Any]:
    """The arguments in the file that a command of ms-swift names; InputError if it is not there."""
    name = swift_file(words)
    if name is None:
        return {}
    file = named_file(name, path)
    if file is None:
        raise InputError(f"{path} has its arguments in {name}, which is not next to it: put it there.")
    tree = dict(read_tree(file))
    environment = tree.pop("ENV", None) or {}
    named = {f"--{key.replace('_', '-')}": value for key, value in tree.items() if value is not None}
    words_of = {key: tuple(map(str, value)) if isinstance(value, list) else str(value) for key, value in named.items()}
    return {**{key: str(environment[key]) for key in RANKS if key in environment}, **words_of}


def _logged_arguments(lines: list[tuple[str, str]]) -> Iterator[tuple[str, Any]]:
    """Arguments as `name .... value`; those that are off are left out."""
    for name, value in lines:
        if value not in ("None", "False", "[]"):
            listed = value.startswith("[") and tuple(word.strip(" '\"") for word in value.strip("[]").split(","))
            yield f"--{name.replace('_', '-')}", True if value == "True" else listed or value
