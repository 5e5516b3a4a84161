"""Follows a shell script: its commands with their words, without running anything.

The script's statements are followed in their order.  A condition that the file does not tell is refused if something
depends on it, as is one that a command's success decides; other commands are taken to succeed.  Source: the Bash
Reference Manual, sections 3.2 to 3.5.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from debubble.files import read_file
from debubble.imports.command_line import CommandLine, how_to_give, variables_in
from debubble.imports.harmless import is_harmless
from debubble.imports.shell.conditions import holds
from debubble.imports.shell.script_run import RANKS, TRAINING_ARGUMENTS, ScriptRun, Started, named_file
from debubble.imports.shell.statements import (
    ASSIGNMENT,
    DECLARES,
    IGNORED_COMMANDS,
    asks,
    assigned_names,
    commands_of,
    condition_words,
    ends_in_failure,
    fails,
    failure_words,
    only_prints,
    place_of,
    resubmits,
    shell_text,
    written,
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
from debubble.imports.shell.words import ShellVariables, is_known
from debubble.ir import InputError

_ARITHMETIC_STEP = re.compile(r"(\w+)\s*([-+*]?)=(?!=)\s*(.+)|(\w+)(\+\+|--)|(\+\+|--)(\w+)", re.DOTALL)
"""An assignment in arithmetic, such as `i=0`, `i+=2` or `i++`."""
_OPTION_NAMES = re.compile(r"(?:^|(?<=[\s\"'=(]))--[A-Za-z][\w-]*")
_ANY_ARGUMENT = re.compile(r"\$\{?[#1@*]")
"""The script's arguments in a condition."""
_NUMBERED_ARGUMENT = re.compile(
    r"""^[ \t]*([A-Za-z_]\w*)=["']?\$\{?(\d+)(?::?-[^}\n]*)?\}?["']?[ \t]*(?:#.*)?$""", re.MULTILINE
)
"""A variable that is set to an argument of the script."""
_WORLD_SIZE = re.compile(r"^[ \t]*(?:export[ \t]+)?WORLD_SIZE=[\"']?\$\(\(", re.MULTILINE)
"""An assignment of a product to WORLD_SIZE; what is given from outside may be a number of nodes."""
_SLURM_ENTRY = re.compile(r"^#SBATCH[ \t]+--?([\w-]+)[= ][ \t]*(\d+)[ \t]*(?:#.*)?$", re.MULTILINE)
_SLURM: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("nodes", "N"), ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")),
    **dict.fromkeys(("ntasks", "n"), ("SLURM_NTASKS", "SLURM_NPROCS")),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE",),
}
"""What a script asks of Slurm -> the variables of the environment that it then has; sbatch(1)."""
_POSITIONAL = re.compile(r"""["']?\$\{?[1-9]\d*\b[^$]*""")
_MAX_STEPS = 20_000
_MAX_LETTERS = 1_000_000


def follow(text: str, path: Path, arguments: CommandLine | None = None) -> ScriptRun:
    """Follow a script.

    Args:
        text: The script.
        path: Its file; what it sources is looked for next to it.
        arguments: Its environment and its arguments; None: nobody said them.

    Raises:
        InputError: if it cannot be read, or what it runs depends on what it does not tell.
    """
    reader = _Follower(
        path, {name: number for name, number in _NUMBERED_ARGUMENT.findall(text)}, shifts="shift" in text
    )
    for name, value in _SLURM_ENTRY.findall(text):
        reader.variables.values |= dict.fromkeys(_SLURM.get(name, ()), value)
    if arguments is not None:
        reader.given = arguments.variables
        reader.variables.values |= arguments.variables
        reader.variables.arguments = list(arguments.words)
        reader.said = frozenset((*arguments.variables.values(), *arguments.words))
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
        world_size=world if isinstance(world, str) and world.isdecimal() else None,
    )


def _overwritten(arguments: CommandLine, variables: ShellVariables) -> Iterator[str]:
    """Words on each variable that the script is given and sets otherwise."""
    for name, given in arguments.variables.items():
        value = variables.values.get(name, "")
        now = value if isinstance(value, str) else " ".join(value)
        if now != given:
            yield f"{name}={given}, which the script itself sets to '{now}'"


class _ExitError(Exception):
    """The script ends here."""


@dataclass
class _Follower:
    """The state of a script: its variables and functions, and what it has started."""

    path: Path
    numbered: Mapping[str, str] = field(default_factory=dict)
    """Variable -> the number of the script's argument that it is set to."""
    shifts: bool = False
    """True if the script takes its arguments by name."""
    variables: ShellVariables = field(default_factory=ShellVariables)
    functions: dict[str, Statement] = field(default_factory=dict)
    commands: list[Started] = field(default_factory=list)
    assigned: list[tuple[str, ...]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    undecided: dict[str, str] = field(default_factory=dict)
    """What stands for options that a variable may or may not have -> the sentence that asks which; none if they cost
    nothing."""
    given: Mapping[str, str] = field(default_factory=dict)
    """The environment's variables, which tell what conditions leave open."""
    said: frozenset[str] = frozenset()
    """The values of these, and the script's arguments."""
    deciding: bool = False
    """True in a condition, which the success of a command does not tell."""
    steps: int = 0
    failures: int = 0
    depth: int = 0

    def run(self, statement: Statement) -> bool | None:
        """Follow a statement; whether it succeeds, None: that is not told."""
        self.steps += 1
        if self.steps > _MAX_STEPS or self.depth > 50:
            raise InputError(f"{self.path} has loops or calls that are too long to follow: give a copy without them.")
        held = self._follow(statement)
        self.variables.status = None if held is None else str(int(not held))
        return held

    def _decide(self, condition: Statement, *, deciding: bool = True) -> bool | None:
        """Follow a condition; None: what it decides is not told."""
        outer, self.deciding = self.deciding, deciding
        try:
            return self.run(condition)
        finally:
            self.deciding = outer

    def _follow(self, statement: Statement) -> bool | None:
        match statement:
            case Chain():
                return self._chain(statement)
            case Command():
                return self._command(statement)
            case Test(kind, text, _):
                return (
                    self._arithmetic(text)
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
                return True

    def _chain(self, chain: Chain) -> bool | None:
        held: bool | None = True
        before: Statement | None = None
        for joint, part in chain.parts:
            if (joint == "&&" and held is False) or (joint == "||" and held is True):
                continue
            if joint == "&&" and asks(before) and isinstance(part, Command) and assigned_names(part) is not None:
                held = None
            if joint in ("&&", "||") and held is None:
                self._refuse_if_it_matters(part, before)
                continue
            held, before = self.run(part), part
        return held if not chain.negated or held is None else not held

    def _either(self, statement: Either) -> bool | None:
        for place, (condition, body) in enumerate(statement.branches):
            held = True if condition is None else self._decide(condition)
            if held and condition is not None and resubmits(body):
                continue
            if held:
                return self.run(body)
            if held is None:
                for _, each in statement.branches[place:]:
                    self._refuse_if_it_matters(each, condition)
                return True
        return True

    def _case(self, statement: CaseStatement) -> bool | None:
        word = self.variables.text_of(statement.word)
        for patterns, body in statement.branches:
            if any(fnmatchcase(word, self.variables.text_of(pattern)) for pattern in patterns):
                if not is_known(word) and not all(pattern == "*" for pattern in patterns):
                    break
                if is_known(word) or len(statement.branches) == 1:
                    if word in self.said and ends_in_failure(body):
                        raise InputError(f"{self.path} {failure_words(statement, word)}")
                    return self.run(body)
        if not is_known(word):
            for _, body in statement.branches:
                self._refuse_if_it_matters(body, statement)
        return True

    def _loop(self, statement: Loop) -> bool | None:
        over_arguments = any(map(_ANY_ARGUMENT.search, statement.words))
        if over_arguments:
            self._note_options(statement.body)
        if over_arguments and self.variables.arguments is None:
            return True
        for word in statement.words:
            for value in self.variables.fields_of(word):
                if not is_known(value):
                    self._refuse_if_it_matters(statement.body, statement)
                    return True
                self.variables.values[statement.name] = value
                self.run(statement.body)
        return True

    def _while(self, statement: While) -> bool | None:
        """Follow a loop as long as its condition holds; one over arguments that nobody said does not run."""
        over_arguments = _ANY_ARGUMENT.search(place_of(statement.condition)[1])
        if over_arguments:
            self._note_options(statement.body)
        while (held := self._decide(statement.condition)) is not None:
            if held != statement.runs:
                return True
            failures = self.failures
            self.run(statement.body)
            if self.failures > failures:
                return True
        if not (over_arguments and self.variables.arguments is None):
            self._refuse_if_it_matters(statement.body, statement.condition)
        return True

    def _note_options(self, body: Statement) -> None:
        """Note the variables that a loop over the script's arguments sets."""
        names = (assigned_names(command) or [] for command in commands_of(body))
        self.variables.options |= {name for each in names for name in each}

    def _refuse_if_it_matters(self, body: Statement, condition: Statement | None) -> None:
        """Leave open what statements that may or may not run set; InputError if they change what the script starts."""
        commands = list(commands_of(body))
        if commands and self._fails(commands[-1]):
            return
        line, words = place_of(condition)
        unknown = self._unknown_in(words)
        how, by = (f"{how_to_give(unknown, self.numbered)}; or ", f" by {unknown}") if unknown else ("", "")
        refusal = (
            f"{self.path}: what line {line} decides ({words}) is not told by the file, and arguments depend on it:"
            f" {how}give a copy with the branch that runs."
        )
        for command in commands:
            names = assigned_names(command)
            if names is None:
                if self._starts(command) and not self._misses(command):
                    raise InputError(refusal)
                continue
            text = " ".join(written(token) for token in command.tokens)
            options = _OPTION_NAMES.findall(text)
            free = options and all(is_harmless(option, True, "") for option in options)
            if free and "+=" in text:
                continue
            left_open = {name: self.given.get(name, f"$({name}: line {line} decides{by})") for name in names}
            self.variables.values |= left_open
            if "--" in text:
                open_texts = (text for name, text in left_open.items() if name not in self.given)
                self.undecided |= dict.fromkeys(open_texts, "" if free else refusal)

    def _fails(self, command: Command) -> bool:
        """Tell whether a command ends the script with an error, by itself or as the last of a function."""
        body = self.functions.get(command.tokens[0].text)
        of_function = () if body is None else tuple(commands_of(body))
        return any(map(fails, (command, *of_function[-1:])))

    def _misses(self, command: Command) -> bool:
        """Tell whether a command sources a script that is not there, which is then missing."""
        if command.tokens[0].text not in ("source", ".") or len(command.tokens) < 2:
            return False
        name = self.variables.text_of(command.tokens[1].text)
        if named_file(name, self.path) is not None:
            return False
        self.missing.append(name)
        return True

    def _unknown_in(self, condition: str) -> str:
        """The variables that decide a condition, which the script may set from others."""
        values = (self.variables.values.get(name, f"${name}") for name in variables_in(condition))
        unknown = " ".join(value if isinstance(value, str) else " ".join(value) for value in values)
        return " ".join(f"${name}" for name in dict.fromkeys(variables_in(unknown)))

    def _starts(self, command: Command) -> bool:
        """Tell whether a command starts something with arguments, or changes what later ones are."""
        first = command.tokens[0].text
        if first in IGNORED_COMMANDS and first not in ("set", "let"):
            return False
        names = {name.replace("_", "-") for token in command.tokens for name in _OPTION_NAMES.findall(written(token))}
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
            tokens = [token for token in tokens[1:] if not token.text.startswith("-")]
            for token in tokens:
                self._assign(token)
            return True
        before = []
        while tokens and (tokens[0].elements is not None or ASSIGNMENT.fullmatch(tokens[0].text)):
            before.append(tokens.pop(0))
        if not tokens:
            for token in before:
                self._assign(token)
            return True
        words = [word for token in tokens for word in self.variables.fields_of(token.text)]
        return self._start(words, command.line, before) if words else True

    def _start(self, words: list[str], line: int, before: Sequence[Token]) -> bool | None:
        """Follow a command of these words: a builtin, a function, a shell, or one that starts something."""
        name, rest = words[0].rpartition("/")[2], words[1:]
        if name == "return" or (name == "exit" and rest[:1] in ([], ["0"])):
            raise _ExitError
        if name == "exit":  # It fails, where a run does not come.
            self.failures += 1
            return False
        if name in ("true", "false", ":"):
            return name != "false"
        if name in self.functions:
            return self._call(self.functions[name], rest)
        if name in ("source", "."):
            self._source(rest)
        elif name == "eval":
            self._text(" ".join(rest))
        elif (text := shell_text(words)) is not None:
            self._text(text)
        elif name == "set" and "--" in rest:
            self.variables.arguments = rest[rest.index("--") + 1 :]
        elif name == "shift":
            self.variables.arguments = (self.variables.arguments or [])[1:]
        elif name in ("unset", "read", "mapfile"):
            for each in rest:
                self.variables.values.pop(each, None)
                if name != "unset" and each in self.given:
                    self.variables.values[each] = self.given[each]
        elif name == "printf" and rest[:1] == ["-v"] and len(rest) > 2:
            self.variables.values[rest[1]] = re.sub("%[sd]", lambda _: " ".join(rest[3:]), rest[2])
        elif name in IGNORED_COMMANDS:
            if name in ("grep", "which", "command", "type", "let"):
                return None
        else:
            self.commands.append(Started(tuple(self._decided(words)), line, self._ranks(before)))
        return None if self.deciding and name not in ("echo", "printf", "shift", "set") else True

    def _decided(self, words: Sequence[str]) -> list[str]:
        """A command's words, but for open options of a launcher, before the script; InputError if others are open."""
        begin = next((place for place, word in enumerate(words) if word.endswith(".py")), 0)
        for word in words[begin:]:
            for text, refusal in self.undecided.items():
                if refusal and text in word:
                    raise InputError(refusal)
        return [word for word in words if word not in self.undecided]

    def _ranks(self, before: Sequence[Token]) -> Mapping[str, str]:
        """The numeric entries of RANKS, as the script or the assignments before a command set them."""
        matched = [match for token in before if (match := ASSIGNMENT.fullmatch(token.text)) and match[1] in RANKS]
        values = self.variables.values | {match[1]: self.variables.text_of(match[4]) for match in matched}
        return {name: value for name in RANKS if isinstance(value := values.get(name), str) and value.isdecimal()}

    def _call(self, body: Statement, arguments: Sequence[str]) -> bool | None:
        outer, self.variables.arguments = self.variables.arguments, list(arguments)
        self.depth += 1
        try:
            return self._decide(body, deciding=False)
        except _ExitError:
            return True
        finally:
            self.depth -= 1
            self.variables.arguments = outer

    def _text(self, text: str) -> None:
        self.depth += 1
        self.run(parse(text, str(self.path)))
        self.depth -= 1

    def _source(self, words: Sequence[str]) -> None:
        """Follow a script that is sourced; one that is not there is missing."""
        if not words:
            return
        found = named_file(words[0], self.path)
        if found is None:
            self.missing.append(words[0])
        else:
            self._text(read_file(found, "sourced script").decode(errors="replace"))

    def _assign(self, token: Token) -> None:
        """Set a variable, or add to it."""
        values = self.variables.values
        matched = ASSIGNMENT.fullmatch(token.text)
        if matched is None:
            return
        name, index, adds, text = matched[1], matched[2], bool(matched[3]), matched[4]
        before = values.get(name)
        if token.elements is not None:
            new = [word for element in token.elements for word in self.variables.fields_of(element)]
            self._check_length(sum(map(len, new)) + (sum(map(len, before)) if isinstance(before, list) else 0))
            old = before if isinstance(before, list) else [] if before is None else [before]
            values[name] = [*old, *new] if adds else new
            self._note(new)
            return
        value = self.variables.text_of(text)
        if name in self.given and not is_known(value):
            value = self.given[name]
        if value.startswith("--") and _POSITIONAL.fullmatch(text) and not (self.depth or self.shifts):
            raise InputError(
                f"{self.path} takes its arguments by place, and {value} of --args would be {name}: {self._by_place}."
            )
        self._check_length(len(value) + (len(before) if isinstance(before, str) else 0))
        if index is not None:
            place = self.variables.sum_of(index[1:-1])
            array = list(before) if isinstance(before, list) else []
            if place is not None and 0 <= place <= len(array):
                values[name] = [*array[:place], value, *array[place + 1 :]]
            return
        if isinstance(before, list) and adds:
            values[name] = [before[0] + value, *before[1:]] if before else [value]
        else:
            values[name] = f"{before}{value}" if adds and before is not None else value
        self._note(value.split())

    @property
    def _by_place(self) -> str:
        """Say what to do with an argument that the script takes for another."""
        how = how_to_give(f"${next(iter(self.numbered), '1')}", self.numbered)
        return f"{how}, and the training's own after them; or put those into a copy"

    def _check_length(self, length: int) -> None:
        if length > _MAX_LETTERS:
            raise InputError(
                f"{self.path} sets a variable of more than {_MAX_LETTERS:,} letters: give a copy without it."
            )

    def _note(self, words: Sequence[str]) -> None:
        if any(word.startswith("--") for word in words):
            self.assigned.append(tuple(words))

    def _arithmetic(self, text: str) -> bool | None:
        step = _ARITHMETIC_STEP.fullmatch(text.strip())
        if step is None:
            total = None if re.search(r"(?<![=!<>])=(?!=)|\+\+|--", text) else self.variables.sum_of(text)
            return None if total is None else total != 0
        name, sign = step[1] or step[4] or step[7], step[2] or (step[5] or step[6] or "")[:1]
        value = step[3] or "1"
        total = self.variables.sum_of(f"({name}) {sign} ({value})" if sign else value)
        self.variables.values[name] = f"$(({text}))" if total is None else str(total)
        return True
