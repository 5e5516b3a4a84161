"""Sets the variables of an interpreted shell script.  Source: Bash Reference Manual, sections 3.4 and 6.5."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from debubble.imports.command_line import CommandLine, args_hint
from debubble.imports.shell.script_run import RANKS, SCRIPTS, StartedScript, named_file
from debubble.imports.shell.statements import ASSIGNMENT
from debubble.imports.shell.syntax import Token
from debubble.imports.shell.words import ShellVariables, is_known
from debubble.ir import InputError

_ARITHMETIC_STEP = re.compile(r"(\w+)\s*([-+*]?)=(?!=)\s*(.+)|(\w+)(\+\+|--)|(\+\+|--)(\w+)", re.DOTALL)
"""An assignment in arithmetic, such as `i=0`, `i+=2` or `i++`."""
_POSITIONAL = re.compile(r"""["']?\$\{?[1-9]\d*\b[^$]*""")
_MAX_LETTERS = 1_000_000


@dataclass
class Assignments:
    """The variables of a script, as its assignments set them."""

    path: Path
    numbered: Mapping[str, str] = field(default_factory=dict)
    """Variable -> position of the script argument that it is set to."""
    shifts: bool = False
    """True if the script uses `shift`, and so parses its arguments by name."""
    variables: ShellVariables = field(default_factory=ShellVariables)
    assigned: list[tuple[str, ...]] = field(default_factory=list)
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the user, used where conditions leave a variable unknown."""
    files: dict[str, str] = field(default_factory=dict)
    """Name -> text of the files that commands write."""
    scripts: list[StartedScript] = field(default_factory=list)
    """The scripts next to this one that it starts."""
    exported: set[str] = field(default_factory=set)
    """The variables that started scripts have."""
    depth: int = 0

    def write(self, words: Sequence[str], redirections: Sequence[Token]) -> None:
        """Record the file that a command writes, if its text is known.

        Args:
            words: The command's words.
            redirections: Its here-document, and the file.
        """
        texts = [
            token.text if re.search("['\"\\\\]", "".join(token.elements or ())) else self.variables.document(token.text)
            for token in redirections
            if token.kind == "<<"
        ]
        if words[0] in ("cat", "tee") and texts:
            text = "\n".join(texts)
        elif words[0] in ("echo", "printf"):
            text = " ".join(word for word in words[1:] if word not in ("-e", "-n"))
        else:
            return
        named = {self.variables.text_of(token.text): token.kind == ">>" for token in redirections if token.kind != "<<"}
        if words[0] == "tee":
            named |= {word: "-a" in words for word in words[1:] if not word.startswith("-")}
        for name, adds in named.items():
            self._check_length(len(text) + len(self.files.get(name, "")))
            self.files[name] = f"{self.files.get(name, '')}{text}\n" if adds else f"{text}\n"

    def assign(self, token: Token) -> None:
        """Set a variable, or append to it."""
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
            self._record_options(new)
            return
        value = self.variables.text_of(text)
        if name in self.environment and not is_known(value):
            value = self.environment[name]
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
        self._record_options(value.split())

    @property
    def _by_place(self) -> str:
        """Advice on arguments for a script that takes them by position."""
        hint = args_hint(f"${next(iter(self.numbered), '1')}", self.numbered)
        return f"{hint}, and the training's own after them; or put those into a copy"

    def record_script(self, words: Sequence[str], assignments: Sequence[Token]) -> None:
        """Record the script that a command starts, if it is next to the interpreted one."""
        place = next((place for place, word in enumerate(words) if word.endswith(SCRIPTS)), None)
        file = None if place is None else named_file(words[place], self.path)
        if place is None or file is None or file.samefile(self.path):
            return
        exported = {name: self.variables.values.get(name) for name in (*self.environment, *self.exported)}
        matched = [match for token in assignments if (match := ASSIGNMENT.fullmatch(token.text)) is not None]
        values = {**exported, **{match[1]: self.variables.text_of(match[4]) for match in matched}}
        known = {name: value for name, value in values.items() if isinstance(value, str) and is_known(value)}
        self.scripts.append(StartedScript(file, CommandLine(known, tuple(words[place + 1 :]))))

    def ranks(self, assignments: Sequence[Token]) -> Mapping[str, str]:
        """The numeric variables of RANKS, as set by the script or by assignments in front of the command."""
        matched = [match for token in assignments if (match := ASSIGNMENT.fullmatch(token.text)) and match[1] in RANKS]
        values = self.variables.values | {match[1]: self.variables.text_of(match[4]) for match in matched}
        return {name: value for name in RANKS if isinstance(value := values.get(name), str) and value.isdecimal()}

    def _check_length(self, length: int) -> None:
        if length > _MAX_LETTERS:
            raise InputError(
                f"{self.path} sets a variable of more than {_MAX_LETTERS:,} letters: give a copy without it."
            )

    def _record_options(self, words: Sequence[str]) -> None:
        if any(word.startswith("--") for word in words):
            self.assigned.append(tuple(words))

    def arithmetic(self, text: str) -> bool | None:
        """Set the variable of a step in arithmetic; return whether its value is not 0, None: unknown."""
        step = _ARITHMETIC_STEP.fullmatch(text.strip())
        if step is None:
            total = None if re.search(r"(?<![=!<>])=(?!=)|\+\+|--", text) else self.variables.sum_of(text)
            return None if total is None else total != 0
        name, sign = step[1] or step[4] or step[7], step[2] or (step[5] or step[6] or "")[:1]
        value = step[3] or "1"
        total = self.variables.sum_of(f"({name}) {sign} ({value})" if sign else value)
        self.variables.values[name] = f"$(({text}))" if total is None else str(total)
        return True
