"""Expansion of shell words as in bash: variables, arrays, arithmetic and quotes.

Unknown variables and commands, such as `$WORLD_SIZE` or `$(nproc)`, stay as written; defaults such as `${TP:-4}` apply
to variables that the script does not set.
"""

from __future__ import annotations

import ast
import operator
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import translate

from debubble.imports.shell.sequences import counted, expanded_braces
from debubble.imports.shell.syntax import end_of_quoted

Value = str | list[str]
"""A variable's value: a text, or the elements of an array."""

_PARAMETER = re.compile(r"(?P<length>#)?(?P<name>\w+|[@*#?$!-])(?:\[(?P<index>[^]]*)\])?(?P<rest>.*)", re.DOTALL)
_SIMPLE_VARIABLE = re.compile(r"\$(\w+|[@*#?$!-])")
_FIELD = re.compile(r"(?:\$\([^()]*\)|\$\{[^{}]*\}|`[^`]*`|\S)+")
"""A field between blanks; blanks within unexpanded `$(...)`, `${...}` and backticks do not split it."""
_BASENAME = re.compile(r"basename\s+(\"[^\"]*\"|[^\s\"]+)(?:\s+([^\s\"]+))?")
_ECHO = re.compile(r"(?:IFS=['\"]?([^'\";]*)['\"]?\s*;\s*)?echo\s+(\"?\$\{\w+\[\*\]\}\"?|[\w.,:/${}\" -]+)")
"""An `echo` of plain words or of an array."""
_UNKNOWN = re.compile(r"\$[\w({@*#?!]|`")


def is_known(text: str) -> bool:
    """Tell whether a text contains no unexpanded variable or command."""
    return _UNKNOWN.search(text) is None


def matches(pattern: str, text: str) -> bool | None:
    """Tell whether a regular expression without groups matches in a text; None: unsupported pattern, or too long."""
    if re.fullmatch(r"[\w^$.*+\- \[\]]{1,60}", pattern) is None or "[[" in pattern or len(text) > 200:
        return None
    try:
        return re.search(pattern, text) is not None
    except re.error:
        return None


@dataclass
class ShellVariables:
    """The variables and arguments of a script."""

    values: dict[str, Value] = field(default_factory=dict)
    arguments: list[str] | None = None
    """The script's arguments; None: unknown."""
    options: set[str] = field(default_factory=set)
    """The variables that the script sets when it parses its arguments."""
    status: str | None = "0"
    """The exit status of the last statement; None: unknown."""
    clustered: str = ""
    """The letters that follow in the word of the last option of `getopts`, as in `-ab`."""
    separator: str = " "
    """The separator of elements in `"${A[*]}"`."""

    @property
    def not_given(self) -> set[str]:
        """The variables of options that are not among the script's arguments."""
        return self.options - self.values.keys()

    def next_option(self, letters: str, name: str) -> bool | None:
        """Set a variable to the next option's letter as `getopts` does; return whether there is one, None: unknown.

        Args:
            letters: The letters of options, with a colon after those that take a value.
            name: The variable.
        """
        if self.arguments is None:
            return None
        number = str(self.values.get("OPTIND", "1"))
        index = int(number) - 1 if number.isdecimal() else 0
        word, *following = [*self.arguments[index:], ""]
        letters_left = self.clustered or (word[1:] if re.fullmatch("-[^-].*", word) else "")
        if not letters_left:
            return False
        letter, value = letters_left[0], letters_left[1:]
        takes = f"{letter}:" in letters
        self.values[name] = letter if letter in letters else "?"
        self.values["OPTARG"] = (value or "".join(following[:1])) if takes else ""
        self.clustered = "" if takes else value
        self.values["OPTIND"] = str(index + 1 + (not self.clustered) + (takes and not value))
        return True

    def fields_of(self, word: str) -> list[str]:
        """Expand a word: quotes are removed, braces expanded, and unquoted values split at blanks."""
        return [field for expanded in expanded_braces(word) for field in self._fields(expanded)]

    def _fields(self, word: str) -> list[str]:
        fields: list[str] = []
        current: str | None = None
        for text, divided in self._pieces(word):
            if not divided:
                current = (current or "") + text
                continue
            words = _FIELD.findall(text)
            if text[:1].isspace() and current is not None:
                fields.append(current)
                current = None
            for index, piece in enumerate(words):
                current = (current or "") + piece if index == 0 else piece
                if index < len(words) - 1 or text[-1:].isspace():
                    fields.append(current)
                    current = None
        return fields if current is None else [*fields, current]

    def text_of(self, word: str) -> str:
        """Expand a word to one text without splitting, as after `=`."""
        return "".join(text for text, _ in self._pieces(word))

    def document(self, text: str) -> str:
        """Expand a here-document, in which quotes are plain letters."""
        return "".join(expanded for expanded, _ in self._quoted(text))

    def _pieces(self, word: str) -> list[tuple[str, bool]]:
        """The expanded pieces of a word, and whether each may be split at blanks."""
        pieces: list[tuple[str, bool]] = []
        pos = 0
        while pos < len(word):
            letter = word[pos]
            if letter == "\\":
                pieces.append((word[pos + 1 : pos + 2], False))
                pos += 2
            elif letter == "'":
                end = end_of_quoted(word, pos)
                pieces.append((word[pos + 1 : end - 1], False))
                pos = end
            elif letter == '"':
                end = end_of_quoted(word, pos)
                pieces += self._quoted(word[pos + 1 : end - 1])
                pos = end
            elif letter in "$`":
                text, end = self._expansion(word, pos)
                value = "" if text == _EMPTY_ARRAY else text.replace(_ELEMENT_BREAK, " ")
                pieces.append((value, text != word[pos:end]))
                pos = end
            else:
                end = pos + 1
                while end < len(word) and word[end] not in "\\'\"$`":
                    end += 1
                pieces.append((word[pos:end], False))
                pos = end
        return pieces

    def _quoted(self, text: str) -> list[tuple[str, bool]]:
        """The expanded pieces of a text in double quotes; only elements of arrays are separate words."""
        pieces: list[tuple[str, bool]] = [("", False)]
        pos = 0
        while pos < len(text):
            if text[pos] == "\\" and text[pos + 1 : pos + 2] in ('"', "\\", "$", "`", "\n"):
                pieces.append((text[pos + 1 : pos + 2].strip("\n"), False))
                pos += 2
            elif text[pos] in "$`":
                value, pos = self._expansion(text, pos)
                elements = value.split(_ELEMENT_BREAK)
                if value == _EMPTY_ARRAY:
                    pieces = [piece for piece in pieces if piece != ("", False)]
                    continue
                for number, element in enumerate(elements):
                    pieces += [(" ", True), (element, False)] if number else [(element, False)]
            else:
                pieces.append((text[pos], False))
                pos += 1
        return pieces

    def _expansion(self, text: str, pos: int) -> tuple[str, int]:
        """The value of the expansion that starts at `pos` with `$` or a backtick, and the index after it."""
        if text[pos] == "`":
            end = end_of_quoted(text, pos)
            numbers = self._sequence(text[pos + 1 : end - 1].strip())
            return (text[pos:end] if numbers is None else numbers), end
        if text.startswith("$((", pos):
            end = end_of_quoted(text, pos)
            inner = text[pos + 3 : end - 2]
            total = self.sum_of(inner)
            return (f"$(({self._filled(inner)}))" if total is None else str(total)), end
        if text.startswith("${", pos):
            end = end_of_quoted(text, pos)
            return self._parameter(text[pos + 2 : end - 1], text[pos:end]), end
        if text.startswith("$(", pos):
            end = end_of_quoted(text, pos)
            command = text[pos + 2 : end - 1].strip()
            echoed = _ECHO.fullmatch(command)
            output = self._echo(echoed) if echoed is not None else self._basename(command) or self._sequence(command)
            return (text[pos:end] if output is None else output), end
        if text.startswith("$'", pos):
            end = end_of_quoted(text, pos + 1)
            return text[pos + 2 : end - 1], end
        match = _SIMPLE_VARIABLE.match(text, pos)
        if match is None:
            return "$", pos + 1
        return self._parameter(match[1], match[0]), match.end()

    def _echo(self, echoed: re.Match[str]) -> str:
        """The output of `echo`, with the array separator that the command sets."""
        outer, self.separator = self.separator, (echoed[1] or self.separator)[:1]
        try:
            return " ".join(self.fields_of(echoed[2]))
        finally:
            self.separator = outer

    def _sequence(self, command: str) -> str | None:
        """The output of `seq`; None: another command, or unknown numbers."""
        words = command.split()
        numbers = counted([self.text_of(word) for word in words[1:]]) if words[:1] == ["seq"] else None
        return None if numbers is None else " ".join(numbers)

    def _basename(self, command: str) -> str | None:
        """The output of `basename FILE [SUFFIX]`; None: another command, or an unknown file."""
        match = _BASENAME.fullmatch(command)
        path, suffix = ("$", "") if match is None else (self.text_of(word or "") for word in match.groups())
        if "$" in path + suffix or "`" in path + suffix:
            return None
        name = path.rstrip("/").rpartition("/")[2]
        return name if name == suffix else name.removesuffix(suffix)

    def _parameter(self, inner: str, raw: str) -> str:
        """The value of a parameter such as `X`, `X:-4` or `A[@]`; `raw` if it is unknown."""
        match = _PARAMETER.fullmatch(inner)
        if match is None:
            return raw
        value = self._lookup(match["name"], match["index"])
        if match["length"] and not match["rest"]:
            many = match["index"] in ("@", "*")
            array = self.values.get(match["name"])
            return raw if value is None else str(len(array) if many and isinstance(array, list) else len(value))
        return self._with_operator(match["name"], value, match["rest"], raw)

    def _lookup(self, name: str, index: str | None) -> str | None:
        """A variable's text, or the elements of an array with separators; None: not set."""
        if name in ("@", "*"):
            arguments = self.arguments or []
            return (_ELEMENT_BREAK if name == "@" else " ").join(arguments) if arguments else _EMPTY_ARRAY
        if name == "#":
            return None if self.arguments is None else str(len(self.arguments))
        if name.isdigit():
            position = int(name) - 1
            return self.arguments[position] if self.arguments and 0 <= position < len(self.arguments) else None
        if name == "?":
            return self.status
        value = self.values.get(name)
        if isinstance(value, list):
            if index in ("@", "*"):
                return (_ELEMENT_BREAK if index == "@" else self.separator).join(value) if value else _EMPTY_ARRAY
            element = self.sum_of(index) if index else 0
            return value[element] if element is not None and -len(value) <= element < len(value) else None
        return value

    def _with_operator(self, name: str, value: str | None, rest: str, raw: str) -> str:
        """The value after an operator such as `:-default` or `%suffix`."""
        if not rest:
            return raw if value is None else value
        colon, rest_of = rest.startswith(":"), rest.removeprefix(":")
        missing = value is None or (colon and value == "")
        sign, word = rest_of[:1], rest_of[1:]
        if sign in ("-", "="):
            taken = self.text_of(word) if missing else value or ""
            if sign == "=" and missing:
                self.values[name] = taken
            return taken
        if sign == "+":
            return "" if missing else self.text_of(word)
        if sign == "?":
            return raw if missing else value or ""
        if value is None or colon:
            return raw
        if rest in _CHANGES:
            return _CHANGES[rest](value)
        cut = self._cut(value, rest)
        return raw if cut is None else cut

    def _cut(self, value: str, rest: str) -> str | None:
        """The value after removal of a prefix or suffix, or after replacement of a text; None: another operator."""
        if rest[0] in "#%":
            longest = rest[:2] in ("##", "%%")
            pattern = re.compile(translate(self.text_of(rest[2 if longest else 1 :])))
            cuts = range(len(value) + 1) if (rest[0] == "#") != longest else range(len(value), -1, -1)
            for cut in cuts:
                removed, remaining = (value[:cut], value[cut:]) if rest[0] == "#" else (value[cut:], value[:cut])
                if pattern.fullmatch(removed):
                    return remaining
            return value
        if rest[0] == "/":
            all_matches = rest.startswith("//")
            old, _, new = rest[1 + all_matches :].partition("/")
            return value.replace(self.text_of(old), self.text_of(new), -1 if all_matches else 1)
        return None

    def sum_of(self, text: str) -> int | None:
        """The value of an arithmetic expression; None if a variable in it is unknown."""
        plain = _NAME.sub(lambda m: self._number(m[1] or m[2], m[0]), text)
        plain = plain.replace("&&", " and ").replace("||", " or ")
        plain = re.sub(r"!(?!=)", " not ", plain)
        plain = re.sub(r"^([^?:]*)\?([^?:]*):([^?:]*)$", r"(\2) if (\1) else (\3)", plain.strip(), flags=re.DOTALL)
        try:
            with warnings.catch_warnings(action="ignore"):
                return _number(ast.parse(plain.strip(), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError, MemoryError):
            return None

    def _filled(self, sum_: str) -> str:
        """An arithmetic expression with known numbers filled in, and `$` in front of unknown variables."""
        if re.search(r"\$\(|`|\[", sum_):
            return sum_
        return re.sub(r"\s", "", _NAME.sub(lambda match: self._known_number(match[1] or match[2]), sum_))

    def _known_number(self, name: str) -> str:
        value = self._lookup(name, None)
        return value if value is not None and value.isdecimal() else f"${name}"

    def _number(self, name: str, raw: str) -> str:
        value = self._lookup(name, None)
        return raw if value is None else f"({value})" if value else "0"


_NAME = re.compile(r"\$\{?(\w+)\}?|\b([A-Za-z_]\w*)\b")
"""A variable in arithmetic."""
_ELEMENT_BREAK = "\0"
"""The internal separator of elements in `"${A[@]}"`, which become separate words."""
_EMPTY_ARRAY = "\0\0"
"""The internal value of an array without elements, which becomes no word."""

_CHANGES: Mapping[str, Callable[[str], str]] = {
    ",,": str.lower, "^^": str.upper, ",": lambda text: text[:1].lower() + text[1:],
    "^": lambda text: text[:1].upper() + text[1:],
}  # fmt: skip
_MAX_DIGITS = 30


def _number(expression: ast.expr) -> int:
    """The value of an integer expression; raises ValueError if it is unsupported."""
    match expression:
        case ast.Constant(value=int(number)) if number < 10**_MAX_DIGITS:
            return int(number)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
            return _OPERATIONS[type(operation)](_number(left), _number(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return int(not _number(operand))
        case ast.IfExp(test=test, body=body, orelse=other):
            return _number(body if _number(test) else other)
        case ast.BoolOp(op=joint, values=values):
            truths = [_number(value) for value in values]
            return int(all(truths) if isinstance(joint, ast.And) else any(truths))
        case ast.Compare(left=left, ops=[comparison], comparators=[right]) if type(comparison) in _COMPARISONS:
            return int(_COMPARISONS[type(comparison)](_number(left), _number(right)))
        case _:
            raise ValueError


_OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
