"""Plain words for errors of msgspec and of the parsers of JSON, TOML and YAML, with the line where they know it."""

from __future__ import annotations

import re
from json import JSONDecodeError

TYPES = {
    "object": "fields by name", "array": "a list", "str": "a text", "int": "a whole number", "float": "a number",
    "bool": "true or false",
}  # fmt: skip
"""msgspec's name of a type -> words for it; `null` is its own word."""


def reason_of(error: Exception) -> str:
    """Why a parser of JSON, TOML or YAML refuses a content."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "it is not a text file"
    if isinstance(error, JSONDecodeError):
        return _at(error.lineno, error.colno, error.msg) if error.doc.strip() else "it is empty"
    # PyYAML's errors are not imported here, as few commands read YAML.
    if (mark := getattr(error, "problem_mark", None)) is not None:
        begin, context = getattr(error, "context_mark", None), str(getattr(error, "context", ""))
        context = re.sub(r"^while \w+ ", "", context)
        within = f" ({context} begins in line {begin.line + 1})" if begin and begin.line < mark.line else ""
        problem = str(getattr(error, "problem", "")).replace("'<stream end>'", "the end of the file")
        return f"{_at(mark.line + 1, mark.column + 1, problem)}{within}"
    sentence = str(error).splitlines()[0].rstrip(".")
    toml = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", sentence)
    if toml is None:
        return sentence
    return f"at its end: {_lower(toml[1])}" if toml[2] is None else _at(int(toml[2]), int(toml[3]), toml[1])


def validation_words(message: str, content: bytes = b"") -> str:
    """Plain words for a message of msgspec on entries, or on this JSON."""
    text, _, place = message.partition(" - at `")
    of_keys, _, path = place.rpartition("$")
    path = path.strip(".`")
    name = f"`{path}`" if path else "it"
    name = f"a key of {name}" if of_keys else name
    if (wrong := re.fullmatch(r"Expected `([^`]+)`(.*?)(?:, got (.*))?", text)) is not None:
        got = "" if wrong[3] is None else f", not {_type_words(wrong[3].strip('`'))}"
        return f"{name} must be {_type_words(wrong[1])}{wrong[2]}{got}"
    if (field := re.fullmatch(r"Object (missing required|contains unknown) field (`.*`)", text)) is not None:
        return f"{name} has {'no' if field[1] == 'missing required' else 'an unknown'} field {field[2]}"
    if (value := re.fullmatch(r"Invalid (?:enum )?value (.*)", text)) is not None:
        return f"{name} cannot be {value[1]}"
    if text == "Input data was truncated":
        line = content.count(b"\n") + 1
        return f"it breaks off in line {line}" if content.strip() else "it is empty"
    if (malformed := re.fullmatch(r"JSON is malformed: (.*) \(byte (\d+)\)", text)) is not None:
        before = content[: int(malformed[2])]
        return _at(before.count(b"\n") + 1, len(before) - before.rfind(b"\n"), malformed[1])
    return f"{_lower(text)} (at {name})" if path else _lower(text)


def _type_words(types: str) -> str:
    """Words for a type or several, such as `int | null`."""
    names = types.split(" | ")
    return " or ".join(TYPES.get(name, name) for name in names if name != "int" or "float" not in names)


def _at(line: int, column: int, problem: str) -> str:
    return f"line {line}, column {column}: {_lower(problem)}"


def _lower(words: str) -> str:
    return words[:1].lower() + words[1:]
