"""Queries on parsed statements: their commands, assigned variables, line numbers and texts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from debubble.imports.shell.script_run import TRAINING_ARGUMENTS
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
)

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\])?(\+?)=(.*)", re.DOTALL)
DECLARES = ("export", "local", "declare", "typeset", "readonly")
IGNORED_COMMANDS = frozenset(
    (
        "echo", "printf", "cat", "ls", "cd", "mkdir", "rm", "cp", "mv", "pwd", "tee", "date", "sleep", "wait", "kill",
        "pkill", "ulimit", "module", "conda", "pip", "chmod", "touch", "ln", "break", "continue", "trap", "grep", "sed",
        "awk", "which", "hostname", "nvidia-smi", "df", "pushd", "popd", "head", "tail", "sort", "wc", "nvcc", "git",
        "apt-get", "tar", "wget", "curl", "ibdev2netdev", "scontrol", "umask", "set", "command", "type", "let",
    )
)  # fmt: skip
"""Commands whose arguments are not those of a training."""


def shell_text(words: Sequence[str]) -> str | None:
    """The script text after `bash -c`, also if a launcher precedes it; None if there is none."""
    shells = (index for index, word in enumerate(words[:-2]) if word.rpartition("/")[2] in ("bash", "sh"))
    return next((words[index + 2] for index in shells if words[index + 1] == "-c"), None)


def condition_words(text: str) -> list[str]:
    """Split the text of a condition in double brackets into words, without expansion."""
    return re.findall(r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|\$\([^)]*\)|\$\{[^}]*\}|[^\s"'()]|\((?=\S))+|[()]""", text)


def token_text(token: Token) -> str:
    """A token as written, including the elements of an array."""
    return " ".join([token.text, *(token.elements or ())])


def assigned_names(command: Command) -> list[str] | None:
    """The variables that a command sets; None if it does anything else."""
    tokens = list(command.tokens)
    if tokens[0].text in DECLARES:
        tokens = [token for token in tokens[1:] if not token.text.startswith("-")]
    matched = [ASSIGNMENT.fullmatch(token.text) for token in tokens]
    if not all(matched):
        return None
    return [match[1] for match in matched if match is not None]


def fails(command: Command) -> bool:
    """Tell whether a command ends the script with an error."""
    words = [token.text for token in command.tokens]
    return words[0] == "exit" and words[1:] not in ([], ["0"])


def ends_in_failure(body: Statement) -> bool:
    """Tell whether the last command of a statement ends the script with an error."""
    *_, last = (None, *commands_of(body))
    return last is not None and fails(last)


def failure_words(statement: CaseStatement, word: str) -> str:
    """A sentence without subject on a script that rejects a word of the user."""
    accepted = [pattern for patterns, _ in statement.branches for pattern in patterns if pattern != "*"]
    hint = f": {' or '.join(accepted)}" if accepted else ""
    return f"ends with an error in line {line_and_text(statement)[0]} for '{word}': give --args with another{hint}."


def is_unknown_program(statement: Statement | None) -> bool:
    """Tell whether a statement runs an external program, whose success is unknown."""
    if not isinstance(statement, Command) or assigned_names(statement) is not None:
        return False
    return statement.tokens[0].text not in (*IGNORED_COMMANDS, *_BUILTINS)


_BUILTINS = ("source", ".", "eval", "shift", "unset", "read", "mapfile", "true", "false", ":", "[", "test")


def starts_program(body: Statement) -> bool:
    """Tell whether a statement starts a Python program or a command with arguments of a training."""
    commands = (command for command in commands_of(body) if assigned_names(command) is None)
    texts = (token_text(token) for command in commands for token in command.tokens)
    return any(_PROGRAM.search(text) or not TRAINING_ARGUMENTS.isdisjoint(option_names(text)) for text in texts)


_PROGRAM = re.compile(r"\w\.py(?![\w.])")
_OPTION_NAMES = re.compile(r"(?:^|(?<=[\s\"'=(]))--[A-Za-z][\w-]*")


def option_names(text: str) -> list[str]:
    """The names of options in a text, as Megatron-LM writes them."""
    return [name.replace("_", "-") for name in _OPTION_NAMES.findall(text)]


def only_prints(body: Statement) -> bool:
    """Tell whether a function neither sets variables nor starts programs."""
    return all(command.tokens[0].text in IGNORED_COMMANDS for command in commands_of(body))


def resubmits(body: Statement) -> bool:
    """Tell whether a branch submits the script itself to a scheduler and exits; the submitted job skips it."""
    written_words = [[token.text.strip("\"'") for token in command.tokens] for command in commands_of(body)]
    submitted = any(words[0] in _SUBMIT_COMMANDS and _SCRIPT_NAMES & {*words} for words in written_words)
    return submitted and written_words[-1][0] == "exit"


_SUBMIT_COMMANDS = ("sbatch", "qsub", "bsub")
_SCRIPT_NAMES = {"$0", "${0}", "$BASH_SOURCE", "${BASH_SOURCE[0]}"}


def commands_of(statement: Statement) -> Iterator[Command]:
    """All simple commands in a statement."""
    match statement:
        case Command():
            yield statement
        case Chain(parts, _):
            for _, branch in parts:
                yield from commands_of(branch)
        case Either(branches, _):
            for condition, body in branches:
                if condition is not None:
                    yield from commands_of(condition)
                yield from commands_of(body)
        case CaseStatement(_, cases, _):
            for _, body in cases:
                yield from commands_of(body)
        case Loop(body=body) | While(body=body):
            yield from commands_of(body)
        case Function() | Test():
            return


def line_and_text(statement: Statement | None) -> tuple[int, str]:
    """The line number and the text of a condition."""
    match statement:
        case Test(_, text, line):
            return line, text.strip()
        case CaseStatement(word, _, line):
            return line, word
        case Loop(name, words, _, line):
            return line, f"for {name} in {' '.join(words)}"
        case While(condition=condition):
            return line_and_text(condition)
        case Chain(parts, _) if parts:
            line, first = line_and_text(parts[0][1])
            return line, first + "".join(f" {operator} {line_and_text(branch)[1]}" for operator, branch in parts[1:])
        case Command(tokens, line):
            return line, " ".join(token.text for token in tokens)
        case Either(_, line):
            return line, "if"
        case _:
            return 1, "a condition"
