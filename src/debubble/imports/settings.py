"""Reads configuration files, and command-line arguments in scripts and logs, as flat mappings.

YAML, JSON and TOML are read as `a.b.c` -> value.  Arguments are read from a shell script, without running it, or from
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
from debubble.imports.shell.script_run import RANKS, SCRIPTS, TRAINING_ARGUMENTS, ScriptRun, named_file
from debubble.imports.shell.scripts import follow
from debubble.imports.training_scripts import COMMAND, swift_command, swift_file
from debubble.ir import InputError

_READERS: Mapping[str, Callable[[str], Any]] = {
    ".json": json.loads,
    ".toml": tomllib.loads,
    ".yaml": yaml.safe_load,
    ".yml": yaml.safe_load,
}


def read_settings(path: Path, *, other_suffixes: Sequence[str] = ()) -> Mapping[str, Any]:
    """The settings of a file as path -> value; see `read_tree` for arguments and errors."""
    return dict(_flatten(read_tree(path, other_suffixes=other_suffixes)))


def read_tree(path: Path, *, other_suffixes: Sequence[str] = ()) -> Mapping[Any, Any]:
    """The nested settings of a file.

    Args:
        path: The file.
        other_suffixes: Suffixes of further formats that the caller reads, for the error message.

    Raises:
        InputError: if it cannot be read or has another format.
    """
    if path.suffix in SCRIPTS:
        raise InputError(
            f"{path} is a script: give the configuration that it names, with its further arguments in --args."
        )
    if path.suffix not in _READERS:
        suffixes = ", ".join((*_READERS, *other_suffixes))
        raise InputError(f"{path} is no configuration that is read here; there are: {suffixes}.")
    refusal = f"{path} is no {path.suffix[1:].upper()}"
    text = parse(bytes.decode, read_file(path, "configuration"), refusal)
    # PyYAML does not catch the exceptions of its date and number constructors.
    tree = parse(_READERS[path.suffix], text, refusal, yaml.YAMLError, AttributeError)
    if not isinstance(tree, dict):
        raise InputError(f"{path} has no settings by name.")
    if _VERL_SECTION in tree or str(tree.get("_target_", "")).startswith("verl."):
        raise InputError(_verl_refusal(path))
    return tree


_VERL_SECTION = "actor_rollout_ref"
"""The section that every verl configuration has."""


def _verl_refusal(path: Path) -> str:
    return (
        f"{path} is verl's, whose steps of reinforcement learning are not predicted: to predict the training of its"
        f" actor, write the degrees in {_VERL_SECTION}.actor.megatron as Megatron-LM's arguments into a script"
        " (`pretrain_gpt.py --tensor-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 256 --bf16`), and"
        " import that with --model and --sequence-length."
    )


def _flatten(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def read_constants(path: Path) -> dict[str, Any]:
    """The constants of a Python file that debubble wrote, read without running it.

    Raises:
        InputError: if it cannot be read or is no such file.
    """
    try:
        return {
            node.targets[0].id: ast.literal_eval(node.value)
            for node in ast.parse(read_file(path, "recipe")).body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{path} is no recipe of debubble's, whose settings are constants.") from error


MISSING_SOURCES = "source"
"""Key for the names of sourced scripts that do not exist."""
OVERWRITTEN_VARIABLES = "overwritten"
"""Key for sentences on variables that the user gives and the script overwrites."""
DEEPSPEED_ENTRIES = "deepspeed_config."
"""Prefix of the entries of the DeepSpeed configuration that a script names or writes."""
YAML_ENTRIES = "yaml_cfg."
"""Prefix of the entries of the YAML with Megatron-LM's arguments that a script names or writes."""
DEEPSPEED_ARGUMENTS = frozenset(("--deepspeed", "--deepspeed-config", "--deepspeed-config-file"))
OPEN_LOOP = "loop"
"""Key for the line and head of a loop around the training whose number of runs is unknown."""
DETACHED_ARGUMENTS = "lost"
"""Key for arguments that start a line because the line before lacks its backslash."""
_LOGGED = re.compile(r"^(?:.*[\]:>|])?\s*(\w+) \.{2,} (.*?)\s*$", re.MULTILINE)
"""A line of Megatron-LM's list of arguments, which launchers may prefix with a rank or a time."""
RECIPE = "recipe"
"""Key for the words of a command that starts a recipe of Megatron-Bridge."""
_BRIDGE_START = re.compile(
    r"(?:\b|_)(run_recipe|run_script|setup_experiment)\.py|\bmegatron[./]bridge\b|Megatron-Bridge/\S*\.py"
)
"""Identifies a command that starts a recipe of Megatron-Bridge."""
_MIN_LOGGED_LINES = 10
"""Minimum number of argument lines by which a text is taken for a log rather than a script."""


def read_arguments(
    path: Path, command_line: CommandLine | None = None, started_by: tuple[Path, ...] = ()
) -> Mapping[str, Any]:
    """The arguments in a file, as `--name` -> True, a word, or a tuple of words.

    Args:
        path: A shell script, which is interpreted but not run, or a log with the list of arguments.
        command_line: The command line that starts it, whose arguments also go to the training; None: unknown.
        started_by: The scripts that start it.

    Raises:
        InputError: if the file cannot be read, has no arguments, or does not determine them.
    """
    text = read_file(path, "script").decode(errors="replace")
    started: list[str] = []
    if f"{_VERL_SECTION}." in text or "-m verl." in text:
        raise InputError(_verl_refusal(path))
    logged = _LOGGED.findall(text)
    if len(logged) >= _MIN_LOGGED_LINES:
        arguments = dict(_logged_arguments(logged))
    else:
        script = follow(text, path, command_line)
        commands = [command.words for command in script.commands]
        recipes = {words for words in commands if _starts_recipe(words)}
        if not recipes:  # The command may be in a variable that the script writes to a file for every rank.
            recipes = {words[_program(words) :] for words in script.assigned if _starts_recipe(words)}
        if len(recipes) > 1:
            raise InputError(
                f"{path} starts several recipes of Megatron-Bridge: give a copy with the one that is meant."
            )
        if recipes:
            return {RECIPE: recipes.pop() + (() if command_line is None else command_line.words)}
        started = [word for words in commands for word in words if word.endswith(SCRIPTS)]
        overridden = named_arguments(() if command_line is None else command_line.words)
        if _starts_only_a_script(script) and (inner := script.scripts[0]).file.resolve() not in started_by:
            chain = (*started_by, path.resolve())
            return {**read_arguments(inner.file, inner.command_line, chain), **overridden}
        command = training_command(script, path, overridden)
        arguments = named_arguments(command.words)
        if script.missing and arguments:
            arguments[MISSING_SOURCES] = script.missing
        if script.overwritten:
            arguments[OVERWRITTEN_VARIABLES] = script.overwritten
        if detached := tuple(words[0] for words in commands if words and words[0].startswith("--")):
            arguments[DETACHED_ARGUMENTS] = detached
        for argument, prefix in (("--deepspeed-config", DEEPSPEED_ENTRIES), ("--yaml-cfg", YAML_ENTRIES)):
            config = settings_of_script({**arguments, **overridden}.get(argument), script.files, path)
            arguments |= {f"{prefix}{name}": value for name, value in config.items()}
        if command.loop:
            arguments[OPEN_LOOP] = (command.loop,)
        if script.world_size is not None:
            arguments.setdefault("--world-size", script.world_size)
        if (swift := swift_command(command.words)) is not None:
            arguments = {COMMAND: swift, **_arguments_of_file(command.words, path), **command.ranks, **arguments}
    if command_line is not None:
        arguments |= named_arguments(command_line.words)
    if not TRAINING_ARGUMENTS & arguments.keys() and COMMAND not in arguments:
        give = "give the file that has them"
        if started:
            give = f"it starts {Path(started[-1]).name}: give that, with the variables that it sets in --args"
        elif not DEEPSPEED_ARGUMENTS.isdisjoint(arguments):
            give = f"`debubble import deepspeed {path}` reads scripts of Transformers' Trainer"
        raise InputError(
            f"{path} has no arguments of a training such as --num-layers 32, nor the list of them that Megatron-LM"
            f" logs{';' if started else ':'} {give}."
        )
    return arguments


def _starts_only_a_script(script: ScriptRun) -> bool:
    """Tell whether a script trains nothing itself, and starts one script next to it."""
    trains = any(not TRAINING_ARGUMENTS.isdisjoint(named_arguments(command.words)) for command in script.commands)
    return not (trains or script.assigned) and len(set(map(str, script.scripts))) == 1


def settings_of_script(name: Any, files: Mapping[str, str], path: Path) -> Mapping[str, Any]:
    """The settings of a file that a script names; empty if it neither writes it nor has it next to it.

    Args:
        name: The file's name.
        files: Name -> text of the files that the script writes.
        path: The script.
    """
    if not isinstance(name, str):
        return {}
    file = named_file(name, path)
    text = files.get(name) or ("" if file is None else read_file(file, "configuration").decode(errors="replace"))
    try:
        tree = _READERS.get(Path(name).suffix, json.loads)(text)
    except (ValueError, yaml.YAMLError, AttributeError, RecursionError):
        return {}
    return dict(_flatten(tree)) if isinstance(tree, dict) else {}


def _starts_recipe(words: Sequence[str]) -> bool:
    """Tell whether a command starts a recipe of Megatron-Bridge, and not its copy of Megatron-LM."""
    started = any(map(_BRIDGE_START.search, words)) and not any(word.endswith("pretrain_gpt.py") for word in words)
    return started and not any("convert" in word or "infer" in word for word in words if word.endswith(".py"))


def _program(words: Sequence[str]) -> int:
    """The index of the first Python program in a command's words; 0 if there is none."""
    return next((index for index, word in enumerate(words) if word.endswith(".py")), 0)


def _arguments_of_file(words: Sequence[str], path: Path) -> dict[str, Any]:
    """The arguments in the file that an ms-swift command names; raises InputError if it does not exist."""
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


TURNED_OFF = {
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
"""Settings that Megatron-LM has on by default, by their names in a log -> the argument that turns them off."""


def _logged_arguments(lines: list[tuple[str, str]]) -> Iterator[tuple[str, Any]]:
    """Arguments of log lines `name .... value`; those that are off are omitted, or become their off-switch."""
    for name, value in lines:
        if value == "False" and name in TURNED_OFF:
            yield TURNED_OFF[name], True
        if value not in ("None", "False", "[]"):
            listed = value.startswith("[") and tuple(word.strip(" '\"") for word in value.strip("[]").split(","))
            yield f"--{name.replace('_', '-')}", True if value == "True" else listed or value
