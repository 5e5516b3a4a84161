"""The syntax of shell scripts: tokens, and the statements that they make.

It has what scripts that start training have: commands, assignments, arrays, lists with `&&` and `||`, conditions,
cases, loops and functions.  Here-documents and redirections are left out, as they change no argument.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from debubble.ir import InputError

_OPERATOR = re.compile(r"&&|\|\||;;&|;;|;&|\|&|[;|&()\n]")
_REDIRECTION = re.compile(r"(?:\d+|\{\w+\})?(?:<<<|<<-?|>>|>\||<>|<&|>&|<|>)|&>>?")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_SPACE = " \t\r"
_CLOSING = {"(": ")", "{": "}"}


@dataclass(frozen=True)
class Token:
    """One token: `word`, `op`, `[[` (a condition) or `((` (arithmetic), as written, and its line."""

    kind: str
    text: str
    line: int
    elements: tuple[str, ...] | None = None
    """Words of an array, where one is assigned."""


@dataclass(frozen=True)
class Command:
    """A simple command: its words as written, assignments before it among them."""

    tokens: tuple[Token, ...]
    line: int


@dataclass(frozen=True)
class Either:
    """Branches, the first of which whose condition holds is run; None: always."""

    branches: tuple[tuple[Statement | None, Statement], ...]
    line: int


@dataclass(frozen=True)
class CaseStatement:
    """A word, and the statements for its patterns."""

    word: str
    branches: tuple[tuple[tuple[str, ...], Statement], ...]
    line: int


@dataclass(frozen=True)
class Loop:
    """A loop over words."""

    name: str
    words: tuple[str, ...]
    body: Statement
    line: int


@dataclass(frozen=True)
class While:
    """A loop that ends when a condition has another value than `runs`."""

    condition: Statement
    runs: bool
    body: Statement
    line: int


@dataclass(frozen=True)
class Function:
    """The definition of a function."""

    name: str
    body: Statement


@dataclass(frozen=True)
class Test:
    """A condition in brackets `[[ ]]` or `(( ))`."""

    kind: str
    text: str
    line: int


@dataclass(frozen=True)
class Chain:
    """Statements one after the other; each with what joins it to the one before: `;`, `&&`, `||` or `|`."""

    parts: tuple[tuple[str, Statement], ...] = field(default=())
    negated: bool = False


Statement = Command | Either | CaseStatement | Loop | While | Function | Test | Chain


def parse(text: str, name: str) -> Chain:
    """The statements of a script.

    Raises:
        InputError: if it is no shell script that can be read.
    """
    return _Parser(tuple(_tokens(text, name)), name).script()


def unreadable(name: str, line: int, what: str) -> InputError:
    """The error for a script that cannot be read at a line."""
    return InputError(f"{name} cannot be read as a shell script: {what} (line {line}).")


def end_of_quoted(text: str, begin: int, name: str = "The script", line: int = 0) -> int:
    """The index after a quotation or an expansion that begins at `begin`; raises InputError if it does not end."""
    opening = text[begin]
    if opening == "'":
        end = text.find("'", begin + 1)
    elif opening in '"`':
        end = begin + 1
        while end < len(text) and text[end] != opening:
            if text[end] == "\\":
                end += 2
            elif opening == '"' and (text[end] == "`" or (text[end] == "$" and text[end + 1 : end + 2] in _CLOSING)):
                end = end_of_quoted(text, end, name, line)
            else:
                end += 1
    else:  # $( or ${
        bracket = text[begin + 1]
        depth, end = 1, begin + 2
        while end < len(text):
            if text[end] == "\\":
                end += 2
                continue
            if text[end] in "'\"`" and not (bracket == "{" and text[end] == "'"):
                end = end_of_quoted(text, end, name, line)
                continue
            depth += (text[end] == bracket) - (text[end] == _CLOSING[bracket])
            if not depth:
                break
            end += 1
    if end < 0 or end >= len(text):
        raise unreadable(name, line, f"No closing {opening if opening in chr(34) + chr(39) + '`' else 'bracket'}")
    return end + 1


def _tokens(text: str, name: str) -> Iterator[Token]:
    """The tokens of a script, without comments, redirections and here-documents."""
    at, line, waiting = 0, 1, list[str]()
    begins = True  # a command
    while at < len(text):
        if text.startswith("\\\n", at):
            at, line = at + 2, line + 1
        elif text[at] in _SPACE:
            at += 1
        elif text[at] == "#":
            at = _line_end(text, at)
        elif text.startswith(("<(", ">("), at):
            end = end_of_quoted(text, at, name, line)
            yield Token("word", f"${text[at + 1 : end]}", line)
            line += text.count("\n", at, end)
            at = end
        elif (redirection := _REDIRECTION.match(text, at)) is not None:
            at = redirection.end()
            while at < len(text) and text[at] in _SPACE:
                at += 1
            end = _word_end(text, at, name, line) if at < len(text) and text[at] not in "\n;" else at
            if redirection[0].lstrip("0123456789").rstrip("-") == "<<":
                waiting.append(re.sub(r"['\"\\]", "", text[at:end]))
            at = end + (text[at : at + 1] == "&" and end == at)
        elif begins and re.match(r"\[\[\s", text[at : at + 3]):
            close = re.compile(r"\s\]\]").search(text, at)
            if close is None:
                raise unreadable(name, line, "No closing ]]")
            yield Token("[[", text[at + 2 : close.start()], line)
            line += text.count("\n", at, close.end())
            at, begins = close.end(), False
        elif begins and text.startswith("((", at):
            end = text.find("))", at)
            if end < 0:
                raise unreadable(name, line, "No closing ))")
            yield Token("((", text[at + 2 : end], line)
            at, begins = end + 2, False
        elif (operator := _OPERATOR.match(text, at)) is not None:
            yield Token("op", operator[0], line)
            at, begins = operator.end(), True
            if operator[0] == "\n":
                line += 1
                for word in waiting:
                    while at < len(text):
                        end = _line_end(text, at)
                        row, at, line = text[at:end].strip(), end + 1, line + 1
                        if row == word:
                            break
                waiting.clear()
        else:
            end = _word_end(text, at, name, line)
            if end == at:
                raise unreadable(name, line, f"'{text[at]}' is out of place")
            word = text[at:end]
            assigned = _ASSIGNMENT.fullmatch(word)
            if assigned is not None and text[end : end + 1] == "(":
                elements, end = _array(text, end + 1, name, line)
                yield Token("word", word, line, elements)
            else:
                yield Token("word", word.replace("\\\n", ""), line)
            line += text.count("\n", at, end)
            begins = word in _RESERVED or (begins and _ASSIGNMENT.match(word) is not None)
            at = end


_RESERVED = ("if", "then", "elif", "else", "for", "while", "until", "do", "{", "!", "time")
"""Words after which a command begins, or the brackets of a counting loop."""


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _word_end(text: str, at: int, name: str, line: int) -> int:
    """The index after the word that begins here."""
    while at < len(text):
        if text[at] == "\\":
            at += 2
        elif text[at] in "'\"`" or (text[at] == "$" and text[at + 1 : at + 2] in _CLOSING):
            at = end_of_quoted(text, at, name, line)
        elif text[at] in _SPACE or text[at] in "\n;|&()<>":
            break
        else:
            at += 1
    return min(at, len(text))


def _array(text: str, at: int, name: str, line: int) -> tuple[tuple[str, ...], int]:
    """The words of an array until its bracket closes, and the index after it."""
    words = []
    while at < len(text) and text[at] != ")":
        if text.startswith("\\\n", at):
            at += 2
        elif text[at] in _SPACE or text[at] == "\n":
            at += 1
        elif text[at] == "#":
            at = _line_end(text, at)
        else:
            end = _word_end(text, at, name, line)
            if end == at:
                raise unreadable(name, line, f"An array has {text[at]!r} in it")
            words.append(text[at:end].replace("\\\n", ""))
            at = end
    if at >= len(text):
        raise unreadable(name, line, "No closing bracket of an array")
    return tuple(words), at + 1


class _Parser:
    """Statements of tokens, by recursive descent."""

    def __init__(self, tokens: Sequence[Token], name: str) -> None:
        self._left, self._name, self._at = tokens, name, 0

    def script(self) -> Chain:
        """All statements; raises InputError at a token that begins none."""
        whole = self._chain(())
        if self._at < len(self._left):
            raise self._error(f"'{self._left[self._at].text.strip()}' is out of place")
        return whole

    def _error(self, what: str) -> InputError:
        line = self._left[min(self._at, len(self._left) - 1)].line if self._left else 1
        return unreadable(self._name, line, what)

    def _peek(self) -> Token | None:
        return self._left[self._at] if self._at < len(self._left) else None

    def _is(self, kind: str, *texts: str) -> bool:
        token = self._peek()
        return token is not None and token.kind == kind and token.text in texts and token.elements is None

    def _take(self, *texts: str) -> Token:
        token = self._peek()
        if token is None or token.text not in texts:
            raise self._error(f"'{texts[0]}' is missing")
        self._at += 1
        return token

    def _skip_ends(self) -> None:
        while self._is("op", "\n", ";"):
            self._at += 1

    def _chain(self, ends: tuple[str, ...]) -> Chain:
        """Statements until one of these words or operators."""
        parts: list[tuple[str, Statement]] = []
        joint = ";"
        self._skip_ends()
        while (token := self._peek()) is not None and not (token.text in ends and token.elements is None):
            if token.kind == "op" and token.text not in ("(",):
                break
            parts.append((joint, self._statement()))
            joint = ";"
            after = self._peek()
            if after is not None and after.kind == "op" and after.text in ("&&", "||", "|", "|&", "&", ";", "\n"):
                joint = after.text[:1] if after.text in ("|", "|&") else after.text if len(after.text) > 1 else ";"
                self._at += 1
                self._skip_ends()
        return Chain(tuple(parts))

    def _statement(self) -> Statement:
        token = self._peek()
        if token is None:
            raise self._error("It ends too early")
        if token.kind in ("[[", "(("):
            self._at += 1
            return Test(token.kind, token.text, token.line)
        compound = {
            "if": self._if, "case": self._case, "for": self._for, "while": self._while, "until": self._while,
            "{": self._group, "(": self._group, "function": self._function, "!": self._not,
        }  # fmt: skip
        if token.text in compound and token.elements is None:
            return compound[token.text]()
        following = self._left[self._at + 1 : self._at + 3]
        if token.kind == "word" and [each.text for each in following] == ["(", ")"]:
            self._at += 3
            self._skip_ends()
            return Function(token.text, self._statement())
        return self._command()

    def _command(self) -> Command:
        tokens = []
        while (token := self._peek()) is not None and token.kind == "word":
            tokens.append(token)
            self._at += 1
        if not tokens:
            raise self._error(f"'{token.text.strip()}' is out of place" if token is not None else "It ends too early")
        return Command(tuple(tokens), tokens[0].line)

    def _not(self) -> Statement:
        self._take("!")
        return Chain(((";", self._statement()),), negated=True)

    def _group(self) -> Statement:
        end = "}" if self._take("{", "(").text == "{" else ")"
        body = self._chain((end,))
        self._take(end)
        return body

    def _function(self) -> Statement:
        self._take("function")
        name = self._command_word()
        if self._is("op", "("):
            self._take("(")
            self._take(")")
        self._skip_ends()
        return Function(name, self._statement())

    def _command_word(self) -> str:
        token = self._peek()
        if token is None or token.kind != "word":
            raise self._error("A name is missing")
        self._at += 1
        return token.text

    def _if(self) -> Statement:
        line = self._take("if").line
        branches: list[tuple[Statement | None, Statement]] = []
        condition = self._chain(("then",))
        self._take("then")
        branches.append((condition, self._chain(("elif", "else", "fi"))))
        while self._is("word", "elif"):
            self._take("elif")
            condition = self._chain(("then",))
            self._take("then")
            branches.append((condition, self._chain(("elif", "else", "fi"))))
        if self._is("word", "else"):
            self._take("else")
            branches.append((None, self._chain(("fi",))))
        self._take("fi")
        return Either(tuple(branches), line)

    def _case(self) -> Statement:
        line = self._take("case").line
        word = self._command_word()
        self._skip_ends()
        self._take("in")
        branches: list[tuple[tuple[str, ...], Statement]] = []
        self._skip_ends()
        while not self._is("word", "esac"):
            if self._is("op", "("):
                self._take("(")
            patterns = [self._command_word()]
            while self._is("op", "|"):
                self._take("|")
                patterns.append(self._command_word())
            self._take(")")
            branches.append((tuple(patterns), self._chain((";;", ";&", ";;&", "esac"))))
            if self._is("op", ";;", ";&", ";;&"):
                self._at += 1
            self._skip_ends()
        self._take("esac")
        return CaseStatement(word, tuple(branches), line)

    def _for(self) -> Statement:
        line = self._take("for").line
        if (token := self._peek()) is not None and token.kind == "((":
            self._at += 1
            first, condition, step = ([*token.text.split(";"), "", ""])[:3]
            body = Chain(((";", self._body()), (";", Test("((", step, line))))
            counts = While(Test("((", condition, line), True, body, line)
            return Chain(((";", Test("((", first, line)), (";", counts)))
        name, words = self._command_word(), list[str]()
        self._skip_ends()
        if self._is("word", "in"):
            self._take("in")
            while (token := self._peek()) is not None and token.kind == "word":
                words.append(self._command_word())
        else:
            words = ['"$@"']
        return Loop(name, tuple(words), self._body(), line)

    def _while(self) -> Statement:
        first = self._take("while", "until")
        condition = self._chain(("do",))
        return While(condition, first.text == "while", self._body(), first.line)

    def _body(self) -> Statement:
        self._skip_ends()
        self._take("do")
        body = self._chain(("done",))
        self._take("done")
        return body
