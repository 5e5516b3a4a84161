"""Interprets a shell script and collects the commands that it would start, without running anything.

Statements are interpreted in order.  If arguments depend on an unknown condition, such as the success of a command, the
script is rejected; other commands are assumed to succeed.  Source: Bash Reference Manual, sections 3.2 to 3.5.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from debubble.files import read_file
from debubble.imports.command_line import CommandLine, args_hint, variables_in
from debubble.imports.harmless import is_harmless
from debubble.imports.shell.assignments import Assignments
from debubble.imports.shell.conditions import holds
from debubble.imports.shell.script_run import (
    TRAINING_ARGUMENTS,
    ScriptRun,
    StartedCommand,
    named_file,
)
from debubble.imports.shell.statements import (
    ASSIGNMENT,
    DECLARES,
    IGNORED_COMMANDS,
    assigned_names,
    commands_of,
    condition_words,
    ends_in_failure,
    fails,
    failure_words,
    is_unknown_program,
    line_and_text,
    only_prints,
    option_names,
    resubmits,
    shell_text,
    starts_program,
    token_text,
)
from debubble.imports.shell.syntax import (
    CaseStatement,
    Chain,
    Command,
    Either,
    Function,
    Loop,
    Statement,
    Test,
    Token,
    While,
    parse,
)
from debubble.imports.shell.words import ShellVariables, Value, is_known
from debubble.ir import InputError

_ANY_ARGUMENT = re.compile(r"\$\{?[#1@*]")
"""A reference to the script's arguments."""
_NUMBERED_ARGUMENT = re.compile(
    r"""^[ \t]*([A-Za-z_]\w*)=["']?\$\{?(\d+)(?::?-[^}\n]*)?\}?["']?[ \t]*(?:#.*)?$""", re.MULTILINE
)
"""An assignment of a positional argument to a variable."""
_WORLD_SIZE = re.compile(r"^[ \t]*(?:export[ \t]+)?WORLD_SIZE=[\"']?\$\(\(", re.MULTILINE)
"""An assignment of a product to WORLD_SIZE; a value from the environment may be a number of nodes instead."""
_SLURM_ENTRY = re.compile(r"^#SBATCH[ \t]+--?([\w-]+)[= ][ \t]*(\d+)[ \t]*(?:#.*)?$", re.MULTILINE)
_SLURM: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("nodes", "N"), ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")),
    **dict.fromkeys(("ntasks", "n"), ("SLURM_NTASKS", "SLURM_NPROCS")),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE",),
}
"""Option of sbatch -> the environment variables that Slurm sets accordingly; sbatch(1)."""
_MAX_STEPS = 20_000


def follow(text: str, path: Path, arguments: CommandLine | None = None) -> ScriptRun:
    """Interpret a script.

    Args:
        text: The script.
        path: Its file; sourced scripts are searched next to it.
        arguments: Its environment and arguments; None: unknown.

    Raises:
        InputError: if it cannot be parsed, or its commands depend on unknown values.
    """
    reader = _Follower(
        path, {name: number for name, number in _NUMBERED_ARGUMENT.findall(text)}, shifts="shift" in text
    )
    for name, value in _SLURM_ENTRY.findall(text):
        reader.variables.values |= dict.fromkeys(_SLURM.get(name, ()), value)
    if arguments is not None:
        reader.environment = arguments.variables
        reader.variables.values |= arguments.variables
        reader.variables.arguments = list(arguments.words)
        reader.user_values = frozenset((*arguments.variables.values(), *arguments.words))
    try:
        with suppress(_ExitError):
            reader.run(parse(text, str(path)))
    except RecursionError as error:
        raise InputError(f"{path} cannot be read as a shell script: it is nested too deeply.") from error
    world = reader.variables.values.get("WORLD_SIZE") if _WORLD_SIZE.search(text) else None
    return ScriptRun(
        commands=tuple(reader.commands),
        assigned=tuple(reader.assigned),
        missing=tuple(reader.missing),
        overwritten=() if arguments is None else tuple(_overwritten(arguments, reader.variables)),
        files=reader.files,
        scripts=tuple(reader.scripts),
        world_size=world if isinstance(world, str) and world.isdecimal() else None,
    )


def _overwritten(arguments: CommandLine, variables: ShellVariables) -> Iterator[str]:
    """Clauses on variables that the user gives and the script sets to another value."""
    for name, value in arguments.variables.items():
        current = variables.values.get(name, "")
        text = current if isinstance(current, str) else " ".join(current)
        if text != value:
            yield f"{name}={value}, which the script itself sets to '{text}'"


class _ExitError(Exception):
    """Raised when the script or function ends by `exit` or `return`."""


class _BreakError(Exception):
    """Raised when a loop ends by `break`, or its body by `continue`."""

    def __init__(self, *, continues: bool) -> None:
        super().__init__()
        self.continues = continues


@dataclass
class _Follower(Assignments):
    """The interpreter of a script, with its variables, functions and started commands."""

    functions: dict[str, Statement] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """Function -> ` of FILE` if a sourced file defines it; else empty."""
    commands: list[StartedCommand] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    undecided: dict[str, str] = field(default_factory=dict)
    """Placeholder for options that a variable may or may not contain -> the error to raise if a command uses it; empty
    if the options are harmless."""
    user_values: frozenset[str] = frozenset()
    """The values of these, and the script's arguments."""
    in_condition: bool = False
    """True inside a condition, where the success of a command is unknown."""
    steps: int = 0
    failures: int = 0
    loops: int = 0
    """The number of loops around the statement."""
    sourced: str = ""
    """` of FILE` while a sourced file is interpreted."""
    loop: str = ""
    """The line and the head of the loop around the statement whose number of runs is unknown."""

    def run(self, statement: Statement) -> bool | None:
        """Interpret a statement; return whether it succeeds, None if that is unknown."""
        self.steps += 1
        if self.steps > _MAX_STEPS or self.depth > 50:
            raise InputError(f"{self.path} has loops or calls that are too long to follow: give a copy without them.")
        succeeded = self._follow(statement)
        self.variables.status = None if succeeded is None else str(int(not succeeded))
        return succeeded

    def _run_condition(self, condition: Statement, *, in_condition: bool = True) -> bool | None:
        """Interpret a condition, or a function body (not in_condition); None: its result is unknown."""
        outer, self.in_condition = self.in_condition, in_condition
        try:
            return self.run(condition)
        finally:
            self.in_condition = outer

    def _follow(self, statement: Statement) -> bool | None:
        match statement:
            case Chain():
                return self._chain(statement)
            case Command():
                return self._command(statement)
            case Test(kind, text, _):
                return (
                    self.arithmetic(text)
                    if kind == "(("
                    else holds(condition_words(text), self.variables, patterns=True)
                )
            case Either():
                return self._either(statement)
            case CaseStatement():
                return self._case(statement)
            case Loop():
                return self._loop(statement)
            case While():
                return self._while(statement)
            case Function(name, body):
                self.functions[name] = body
                self.origins[name] = self.sourced
                return True

    def _chain(self, chain: Chain) -> bool | None:
        succeeded: bool | None = True
        previous: Statement | None = None
        for joint, statement in chain.parts:
            if (joint == "&&" and succeeded is False) or (joint == "||" and succeeded is True):
                continue
            assigns = isinstance(statement, Command) and assigned_names(statement) is not None
            if joint == "&&" and is_unknown_program(previous) and assigns:
                succeeded = None
            if joint in ("&&", "||") and succeeded is None:
                self._skip_undecided(statement, previous)
                continue
            succeeded, previous = self.run(statement), statement
        return succeeded if not chain.negated or succeeded is None else not succeeded

    def _either(self, statement: Either) -> bool | None:
        for index, (condition, body) in enumerate(statement.branches):
            succeeded = True if condition is None else self._run_condition(condition)
            if succeeded and condition is not None and resubmits(body):
                continue
            if succeeded:
                return self.run(body)
            if succeeded is None:
                for _, branch in statement.branches[index:]:
                    self._skip_undecided(branch, condition)
                return True
        return True

    def _case(self, statement: CaseStatement) -> bool | None:
        word = self.variables.text_of(statement.word)
        for patterns, body in statement.branches:
            if any(fnmatchcase(word, self.variables.text_of(pattern)) for pattern in patterns):
                if not is_known(word) and not all(pattern == "*" for pattern in patterns):
                    break
                if is_known(word) or len(statement.branches) == 1:
                    if word in self.user_values and ends_in_failure(body):
                        raise InputError(f"{self.path} {failure_words(statement, word)}")
                    return self.run(body)
        if not is_known(word):
            for _, body in statement.branches:
                self._skip_undecided(body, statement)
        return True

    def _loop(self, statement: Loop) -> bool | None:
        over_arguments = any(map(_ANY_ARGUMENT.search, statement.words))
        if over_arguments:
            self._record_option_variables(statement.body)
        if over_arguments and self.variables.arguments is None:
            return True
        for word in statement.words:
            for value in self.variables.fields_of(word):
                if not is_known(value):
                    self._run_once(statement.body, statement, name=statement.name)
                    return True
                self.variables.values[statement.name] = value
                if not self._runs_on(statement.body):
                    return True
        return True

    def _while(self, statement: While) -> bool | None:
        """Interpret a loop while its condition holds; a loop over unknown arguments is skipped."""
        head = line_and_text(statement.condition)[1]
        over_arguments = _ANY_ARGUMENT.search(head) or head.startswith("getopts ")
        if over_arguments:
            self._record_option_variables(statement.body)
        while (succeeded := self._run_condition(statement.condition)) is not None:
            if succeeded != statement.runs:
                return True
            failures, before = self.failures, self._state
            if not self._runs_on(statement.body) or self.failures > failures:
                return True
            if self._state == before and self._starts_program(
                statement.body
            ):  # An endless restart of the same program.
                return True
        if not (over_arguments and self.variables.arguments is None):
            self._run_once(statement.body, statement.condition)
        return True

    def _runs_on(self, body: Statement) -> bool:
        """Interpret the body of a loop; return whether the loop continues."""
        self.loops += 1
        try:
            self.run(body)
        except _BreakError as end:
            return end.continues
        finally:
            self.loops -= 1
        return True

    def _run_once(self, body: Statement, condition: Statement, name: str = "") -> None:
        """Interpret the body of a loop whose number of runs is unknown once if it starts a program; else skip it."""
        if not self._starts_program(body):
            self._skip_undecided(body, condition)
            return
        self.variables.values.pop(name, None)
        if name in self.environment:
            self.variables.values[name] = self.environment[name]
        outer = self.loop
        line, text = line_and_text(condition)
        self.loop = outer or f"line {line}: {text}"
        self._runs_on(body)
        self.loop = outer

    def _starts_program(self, body: Statement) -> bool:
        """Tell whether a statement starts a program, itself or by a function."""
        words = [command.tokens[0].text for command in commands_of(body)]
        functions = (self.functions[word] for word in words if word in self.functions)
        return any(map(starts_program, (body, *functions)))

    @property
    def _state(self) -> tuple[Mapping[str, Value], list[str] | None]:
        """The state on which the next run of a loop depends."""
        return dict(self.variables.values), self.variables.arguments

    def _record_option_variables(self, body: Statement) -> None:
        """Record the variables that a loop over the script's arguments sets."""
        self.variables.options |= {name for command in commands_of(body) for name in assigned_names(command) or []}

    def _skip_undecided(self, body: Statement, condition: Statement | None) -> None:
        """Set the variables of statements that may or may not run to placeholders; InputError if arguments change."""
        commands = list(commands_of(body))
        if commands and self._fails(commands[-1]):
            return
        line, words = line_and_text(condition)
        unknown = self._unknown_in(words)
        how, by = (f"{args_hint(unknown, self.numbered)}; or ", f" by {unknown}") if unknown else ("", "")
        refusal = (
            f"{self.path}: what line {line}{self.sourced} decides ({words}) is not told by the file, and arguments"
            f" depend on it: {how}give a copy with the branch that runs."
        )
        for command in commands:
            names = assigned_names(command)
            if names is None:
                if self._affects_arguments(command) and not self._sources_missing_script(command):
                    raise InputError(refusal)
                continue
            text = " ".join(token_text(token) for token in command.tokens)
            options = option_names(text)
            free = options and all(is_harmless(option, True, "") for option in options)
            if free and "+=" in text:
                continue
            placeholders = {name: self.environment.get(name, f"$({name}: line {line} decides{by})") for name in names}
            self.variables.values |= placeholders
            if "--" in text:
                unknown_texts = (text for name, text in placeholders.items() if name not in self.environment)
                self.undecided |= dict.fromkeys(unknown_texts, "" if free else refusal)

    def _fails(self, command: Command) -> bool:
        """Tell whether a command ends the script with an error, directly or as the last command of a function."""
        body = self.functions.get(command.tokens[0].text)
        of_function = () if body is None else tuple(commands_of(body))
        return any(map(fails, (command, *of_function[-1:])))

    def _sources_missing_script(self, command: Command) -> bool:
        """Tell whether a command sources a script that does not exist, and record that."""
        if command.tokens[0].text not in ("source", ".") or len(command.tokens) < 2:
            return False
        name = self.variables.text_of(command.tokens[1].text)
        if named_file(name, self.path) is not None:
            return False
        self.missing.append(name)
        return True

    def _unknown_in(self, condition: str) -> str:
        """The unknown variables that a condition depends on, directly or through variables that the script sets."""
        unknown: list[str] = []
        for name in variables_in(condition):
            value = self.variables.values.get(name, f"${name}")
            text = value if isinstance(value, str) else " ".join(value)
            # A command's output is told by the variable that it is assigned to.
            unknown += variables_in(text) or ([] if is_known(text) else [name])
        return " ".join(f"${name}" for name in dict.fromkeys(unknown))

    def _affects_arguments(self, command: Command) -> bool:
        """Tell whether a command starts a training, or may change the arguments of later commands."""
        first = command.tokens[0].text
        if first in IGNORED_COMMANDS and first not in ("set", "let"):
            return False
        texts = map(token_text, command.tokens)
        names = {name for text in texts for name in option_names(text)}
        assigns = command.tokens[0].elements is not None or ASSIGNMENT.fullmatch(first) is not None
        named = bool(names) and (assigns or not names.isdisjoint(TRAINING_ARGUMENTS))
        calls = first in self.functions and not only_prints(self.functions[first])
        return first in ("source", ".", "eval", "set", "shift") or calls or named

    def _command(self, command: Command) -> bool | None:
        tokens = list(command.tokens)
        first = tokens[0].text
        if first in ("[", "test"):
            words = [token.text for token in tokens[1:]]
            return holds(words[:-1] if first == "[" else words, self.variables, patterns=False)
        if first in DECLARES:
            if first == "export":
                self.exported |= {token.text.partition("=")[0] for token in tokens[1:]}
            tokens = [token for token in tokens[1:] if not token.text.startswith("-")]
            for token in tokens:
                self.assign(token)
            return True
        assignments = []
        while tokens and (tokens[0].elements is not None or ASSIGNMENT.fullmatch(tokens[0].text)):
            assignments.append(tokens.pop(0))
        if not tokens:
            for token in assignments:
                self.assign(token)
            return True
        words = [word for token in tokens for word in self.variables.fields_of(token.text)]
        if words and command.redirections:
            self.write(words, command.redirections)
        return self._start(words, command.line, assignments) if words else True

    def _start(self, words: list[str], line: int, assignments: Sequence[Token]) -> bool | None:
        """Interpret a command by its words: a builtin, a function, a shell, or a program to start."""
        name, rest = words[0].rpartition("/")[2], words[1:]
        if name == "return" or (name == "exit" and rest[:1] in ([], ["0"])):
            raise _ExitError
        if name == "exit":  # An exit with an error, which a successful run does not reach.
            self.failures += 1
            return False
        if name in ("break", "continue") and self.loops:
            raise _BreakError(continues=name == "continue")
        if name == "getopts" and len(rest) > 1:
            return self.variables.next_option(rest[0], rest[1])
        if name in ("true", "false", ":"):
            return name != "false"
        if name in self.functions:
            return self._call(name, rest)
        if name in ("source", "."):
            self._source(rest)
        elif name == "eval":
            self._run_text(" ".join(rest))
        elif (text := shell_text(words)) is not None:
            self._run_text(text)
        elif name == "set" and "--" in rest:
            self.variables.arguments = rest[rest.index("--") + 1 :]
        elif name == "shift":
            count = int(rest[0]) if rest and rest[0].isdecimal() else 1
            self.variables.arguments = (self.variables.arguments or [])[count:]
        elif name in ("unset", "read", "mapfile"):
            for variable in rest:
                self.variables.values.pop(variable, None)
                if name != "unset" and variable in self.environment:
                    self.variables.values[variable] = self.environment[variable]
        elif name == "printf" and rest[:1] == ["-v"] and len(rest) > 2:
            self.variables.values[rest[1]] = re.sub("%[sd]", lambda _: " ".join(rest[3:]), rest[2])
        elif name in IGNORED_COMMANDS:
            if name in ("grep", "which", "command", "type", "let"):
                return None
        else:
            self.record_script(words, assignments)
            self.commands.append(StartedCommand(tuple(self._decided(words)), line, self.ranks(assignments), self.loop))
        return None if self.in_condition and name not in ("echo", "printf", "shift", "set") else True

    def _decided(self, words: Sequence[str]) -> list[str]:
        """A command's words without undecided launcher options; raises InputError if the program's are undecided."""
        begin = next((place for place, word in enumerate(words) if word.endswith(".py")), 0)
        for word in words[begin:]:
            for text, refusal in self.undecided.items():
                if refusal and text in word:
                    raise InputError(refusal)
        return [word for word in words if word not in self.undecided]

    def _call(self, name: str, arguments: Sequence[str]) -> bool | None:
        outer, self.variables.arguments = self.variables.arguments, list(arguments)
        outer_file, self.sourced = self.sourced, self.origins[name]
        self.depth += 1
        try:
            return self._run_condition(self.functions[name], in_condition=False)
        except _ExitError:
            return True
        finally:
            self.depth -= 1
            self.variables.arguments, self.sourced = outer, outer_file

    def _run_text(self, text: str) -> None:
        self.depth += 1
        try:
            self.run(parse(text, str(self.path)))
        finally:
            self.depth -= 1

    def _source(self, words: Sequence[str]) -> None:
        """Interpret a sourced script, or record that it is missing."""
        if not words:
            return
        file = named_file(words[0], self.path)
        if file is None:
            self.missing.append(words[0])
        else:
            outer, self.sourced = self.sourced, f" of {file.name}"
            self._run_text(read_file(file, "sourced script").decode(errors="replace"))
            self.sourced = outer
