"""Settings of configuration files, and command-line arguments, each as one flat mapping.

YAML, JSON and TOML are read as `a.b.c` -> value.  Arguments stand in a shell script, which is read and never run, or in
the list that Megatron-LM logs.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from debubble.files import parse, read_file
from debubble.imports.command_line import CommandLine
from debubble.imports.script_arguments import named_arguments, training_command
from debubble.imports.shell.script_run import RANKS, TRAINING_ARGUMENTS, named_file
from debubble.imports.shell.scripts import follow
from debubble.imports.training_scripts import COMMAND, swift_command, swift_file
from debubble.ir import InputError

_READERS: Mapping[str, Callable[[str], Any]] = {
    ".json": json.loads,
    ".toml": tomllib.loads,
    ".yaml": yaml.safe_load,
    ".yml": yaml.safe_load,
}


def read_settings(path: Path, *, others: Sequence[str] = ()) -> Mapping[str, Any]:
    """The settings of a file, by their paths; arguments and InputError as of `read_tree`."""
    return dict(_flat(read_tree(path, others=others)))


SCRIPTS = (".sh", ".slurm", ".sbatch", ".pbs")
"""The endings of scripts that start a job."""


def read_tree(path: Path, *, others: Sequence[str] = ()) -> Mapping[Any, Any]:
    """The settings of a file as it nests them.

    Args:
        path: The file.
        others: Endings of other files that the caller reads itself.

    Raises:
        InputError: if it cannot be read, or is none of the formats.
    """
    if path.suffix in SCRIPTS:
        raise InputError(
            f"{path} is a script: give the configuration that it names, with its further arguments in --args."
        )
    if path.suffix not in _READERS:
        there_are = ", ".join((*_READERS, *others))
        raise InputError(f"{path} is no configuration that is read here; there are: {there_are}.")
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


SOURCED = "source"
"""The entry of a script with the names of those that it sources and that are not there."""
OVERWRITTEN = "overwritten"
"""The entry of a script with the variables that it is given and sets otherwise, in words."""
LOST = "lost"
"""The entry of a script with the arguments that begin a command, as the line before does not end with a backslash."""
_LOGGED = re.compile(r"^(?:.*[\]:>|])?\s*(\w+) \.{2,} (.*?)\s*$", re.MULTILINE)
"""A line of the list, which launchers and schedulers may have put a rank or a time before."""
RECIPE = "recipe"
"""The entry of a script that starts a recipe of Megatron-Bridge: the words of its command."""
_BRIDGE = re.compile(
    r"(?:\b|_)(run_recipe|run_script|setup_experiment)\.py|\bmegatron[./]bridge\b|Megatron-Bridge/\S*\.py"
)
"""What a command has that starts a recipe of Megatron-Bridge."""
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
    started: list[str] = []
    if f"{_VERL_SECTION}." in text or "-m verl." in text:
        raise InputError(_verl_refusal(path))
    logged = _LOGGED.findall(text)
    if len(logged) >= _DUMP:
        arguments = dict(_logged_arguments(logged))
    else:
        script = follow(text, path, given)
        recipes = {each.words for each in script.commands if _starts_recipe(each.words)}
        if not recipes:  # A command may stand in a variable that is written to a file, which each rank runs.
            recipes = {words[_program(words) :] for words in script.assigned if _starts_recipe(words)}
        if len(recipes) > 1:
            raise InputError(
                f"{path} starts several recipes of Megatron-Bridge: give a copy with the one that is meant."
            )
        if recipes:
            return {RECIPE: recipes.pop() + (() if given is None else given.words)}
        started = [word for each in script.commands for word in each.words if word.endswith(SCRIPTS)]
        command = training_command(script, path)
        arguments = named_arguments(command.words)
        if script.missing and arguments:
            arguments[SOURCED] = script.missing
        if script.overwritten:
            arguments[OVERWRITTEN] = script.overwritten
        if lost := tuple(each.words[0] for each in script.commands if each.words[:1] and each.words[0][:2] == "--"):
            arguments[LOST] = lost
        if script.world_size is not None:
            arguments.setdefault("--world-size", script.world_size)
        if (swift := swift_command(command.words)) is not None:
            arguments = {COMMAND: swift, **_arguments_of_file(command.words, path), **command.ranks, **arguments}
    if given is not None:
        arguments |= named_arguments(given.words)
    if not TRAINING_ARGUMENTS & arguments.keys() and COMMAND not in arguments:
        starts = (
            f"; it starts {Path(started[-1]).name}: give that, with the variables that it sets in --args"
            if started
            else ""
        )
        raise InputError(
            f"{path} has no arguments of a training such as --num-layers 32, nor the list of them that Megatron-LM"
            f" logs{starts or ': give the file that has them'}."
        )
    return arguments


def _starts_recipe(words: Sequence[str]) -> bool:
    """Tell whether a command starts a recipe of Megatron-Bridge, and no script of the Megatron-LM in its folder."""
    started = any(map(_BRIDGE.search, words)) and not any(word.endswith("pretrain_gpt.py") for word in words)
    return started and not any("convert" in word or "infer" in word for word in words if word.endswith(".py"))


def _program(words: Sequence[str]) -> int:
    """The place of the first Python program among the words of commands."""
    return next((place for place, word in enumerate(words) if word.endswith(".py")), 0)


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


_TURNED_OFF = {
    "add_bias_linear": "--disable-bias-linear",
    "add_position_embedding": "--no-position-embedding",
    "gradient_accumulation_fusion": "--no-gradient-accumulation-fusion",
    "overlap_p2p_comm": "--no-overlap-p2p-communication",
    "bias_gelu_fusion": "--no-bias-gelu-fusion",
    "bias_swiglu_fusion": "--no-bias-swiglu-fusion",
    "bias_dropout_fusion": "--no-bias-dropout-fusion",
    "masked_softmax_fusion": "--no-masked-softmax-fusion",
    "apply_rope_fusion": "--no-rope-fusion",
}
"""What Megatron-LM has on, by its name in a log -> the argument that turns it off."""


def _logged_arguments(lines: list[tuple[str, str]]) -> Iterator[tuple[str, Any]]:
    """Arguments as `name .... value`; those that are off are left out, or named by the switch that turns them off."""
    for name, value in lines:
        if value == "False" and name in _TURNED_OFF:
            yield _TURNED_OFF[name], True
        if value not in ("None", "False", "[]"):
            listed = value.startswith("[") and tuple(word.strip(" '\"") for word in value.strip("[]").split(","))
            yield f"--{name.replace('_', '-')}", True if value == "True" else listed or value
