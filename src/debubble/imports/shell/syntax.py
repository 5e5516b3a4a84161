"""Tokenizer and parser of shell scripts.

Supported is the syntax of launch scripts: commands, assignments, arrays, lists with `&&` and `||`, conditions, cases,
loops and functions.  Of redirections, here-documents and files that commands write are recorded.
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
    """A token of kind `word`, `op`, `[[` (condition), `((` (sum), `<<` (here-document), `>` and `>>` (file)."""

    kind: str
    text: str
    line: int
    elements: tuple[str, ...] | None = None
    """Words of the array if the token assigns one; of a here-document, its delimiter as written."""


@dataclass(frozen=True)
class Command:
    """A simple command: its words, including assignments in front of it, its here-document and the file it writes."""

    tokens: tuple[Token, ...]
    line: int
    redirections: tuple[Token, ...] = ()


@dataclass(frozen=True)
class Either:
    """An `if` statement: pairs of condition (None: `else`) and body, of which the first that holds runs."""

    branches: tuple[tuple[Statement | None, Statement], ...]
    line: int


@dataclass(frozen=True)
class CaseStatement:
    """A `case` statement: a word, and the patterns and body of every branch."""

    word: str
    branches: tuple[tuple[tuple[str, ...], Statement], ...]
    line: int


@dataclass(frozen=True)
class Loop:
    """A `for` loop over words."""

    name: str
    words: tuple[str, ...]
    body: Statement
    line: int


@dataclass(frozen=True)
class While:
    """A `while` or `until` loop, which repeats while the condition equals `runs`."""

    condition: Statement
    runs: bool
    body: Statement
    line: int


@dataclass(frozen=True)
class Function:
    """A function definition."""

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
    """A list of statements, each with the operator in front of it: `;`, `&&`, `||` or `|`."""

    parts: tuple[tuple[str, Statement], ...] = field(default=())
    negated: bool = False


Statement = Command | Either | CaseStatement | Loop | While | Function | Test | Chain


def parse(text: str, name: str) -> Chain:
    """Parse a script into statements.

    Raises:
        InputError: if it cannot be parsed.
    """
    return _Parser(tuple(_tokens(text, name)), name).script()


def unreadable(name: str, line: int, problem: str) -> InputError:
    """The error for a script that cannot be parsed at a line."""
    return InputError(f"{name} cannot be read as a shell script: {problem} (line {line}).")


def end_of_quoted(text: str, begin: int, name: str = "The script", line: int = 0) -> int:
    """The index after the quotation or expansion that starts at `begin`; raises InputError if it is not closed."""
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
    pos, line, waiting = 0, 1, list[str]()
    begins = True  # at the start of a command
    while pos < len(text):
        if text.startswith("\\\n", pos):
            pos, line = pos + 2, line + 1
        elif text[pos] in _SPACE:
            pos += 1
        elif text[pos] == "#":
            pos = _line_end(text, pos)
        elif text.startswith(("<(", ">("), pos):
            end = end_of_quoted(text, pos, name, line)
            yield Token("word", f"${text[pos + 1 : end]}", line)
            line += text.count("\n", pos, end)
            pos = end
        elif (redirection := _REDIRECTION.match(text, pos)) is not None:
            pos = redirection.end()
            while pos < len(text) and text[pos] in _SPACE:
                pos += 1
            end = _word_end(text, pos, name, line) if pos < len(text) and text[pos] not in "\n;" else pos
            if redirection[0].lstrip("0123456789").rstrip("-") == "<<":
                waiting.append(re.sub(r"['\"\\]", "", text[pos:end]))
                yield Token("<<", _here_document(text, end, waiting[-1]), line, (text[pos:end],))
            elif redirection[0] in (">", ">>", ">|", "1>", "1>>", "&>") and end > pos:
                yield Token(">>" if ">>" in redirection[0] else ">", text[pos:end], line)
            pos = end + (text[pos : pos + 1] == "&" and end == pos)
        elif begins and re.match(r"\[\[\s", text[pos : pos + 3]):
            close = re.compile(r"\s\]\]").search(text, pos)
            if close is None:
                raise unreadable(name, line, "No closing ]]")
            yield Token("[[", text[pos + 2 : close.start()], line)
            line += text.count("\n", pos, close.end())
            pos, begins = close.end(), False
        elif begins and text.startswith("((", pos):
            end = text.find("))", pos)
            if end < 0:
                raise unreadable(name, line, "No closing ))")
            yield Token("((", text[pos + 2 : end], line)
            pos, begins = end + 2, False
        elif (operator := _OPERATOR.match(text, pos)) is not None:
            yield Token("op", operator[0], line)
            pos, begins = operator.end(), True
            if operator[0] == "\n":
                line += 1
                for word in waiting:
                    while pos < len(text):
                        end = _line_end(text, pos)
                        row, pos, line = text[pos:end].strip(), end + 1, line + 1
                        if row == word:
                            break
                waiting.clear()
        else:
            end = _word_end(text, pos, name, line)
            if end == pos:
                raise unreadable(name, line, f"'{text[pos]}' is out of place")
            word = text[pos:end]
            assigned = _ASSIGNMENT.fullmatch(word)
            if assigned is not None and text[end : end + 1] == "(":
                elements, end = _array(text, end + 1, name, line)
                yield Token("word", word, line, elements)
            else:
                yield Token("word", word.replace("\\\n", ""), line)
            line += text.count("\n", pos, end)
            begins = word in _RESERVED or (begins and _ASSIGNMENT.match(word) is not None)
            pos = end


_RESERVED = ("if", "then", "elif", "else", "for", "while", "until", "do", "{", "!", "time")
"""Words after which a command, or the brackets of an arithmetic `for` loop, may start."""


def _here_document(text: str, pos: int, delimiter: str) -> str:
    """The lines after the one at `pos`, up to the delimiter."""
    rows: list[str] = []
    pos = _line_end(text, pos) + 1
    while pos < len(text) and (row := text[pos : _line_end(text, pos)]).strip() != delimiter:
        rows.append(row)
        pos += len(row) + 1
    return "\n".join(rows)


def _line_end(text: str, pos: int) -> int:
    end = text.find("\n", pos)
    return len(text) if end < 0 else end


def _word_end(text: str, pos: int, name: str, line: int) -> int:
    """The index after the word that starts at `pos`."""
    while pos < len(text):
        if text[pos] == "\\":
            pos += 2
        elif text[pos] in "'\"`" or (text[pos] == "$" and text[pos + 1 : pos + 2] in _CLOSING):
            pos = end_of_quoted(text, pos, name, line)
        elif text[pos] in _SPACE or text[pos] in "\n;|&()<>":
            break
        else:
            pos += 1
    return min(pos, len(text))


def _array(text: str, pos: int, name: str, line: int) -> tuple[tuple[str, ...], int]:
    """The words of an array up to its closing bracket, and the index after it."""
    words = []
    while pos < len(text) and text[pos] != ")":
        if text.startswith("\\\n", pos):
            pos += 2
        elif text[pos] in _SPACE or text[pos] == "\n":
            pos += 1
        elif text[pos] == "#":
            pos = _line_end(text, pos)
        else:
            end = _word_end(text, pos, name, line)
            if end == pos:
                raise unreadable(name, line, f"An array has {text[pos]!r} in it")
            words.append(text[pos:end].replace("\\\n", ""))
            pos = end
    if pos >= len(text):
        raise unreadable(name, line, "No closing bracket of an array")
    return tuple(words), pos + 1


_REDIRECTIONS = ("<<", ">", ">>")
"""Kinds of tokens that may stand anywhere in a command."""


class _Parser:
    """A recursive-descent parser of tokens."""

    def __init__(self, tokens: Sequence[Token], name: str) -> None:
        self._tokens = tuple(token for token in tokens if token.kind not in _REDIRECTIONS)
        self._name, self._pos = name, 0
        self._redirections: dict[int, list[Token]] = {}
        """Index of the token after a redirection -> the redirections."""
        index = 0
        for token in tokens:
            if token.kind in _REDIRECTIONS:
                self._redirections.setdefault(index, []).append(token)
            else:
                index += 1

    def script(self) -> Chain:
        """All statements; raises InputError at a token that cannot start a statement."""
        statements = self._chain(())
        if self._pos < len(self._tokens):
            raise self._error(f"'{self._tokens[self._pos].text.strip()}' is out of place")
        return statements

    def _error(self, problem: str) -> InputError:
        line = self._tokens[min(self._pos, len(self._tokens) - 1)].line if self._tokens else 1
        return unreadable(self._name, line, problem)

    def _peek(self) -> Token | None:
        return self._tokens[self._pos] if self._pos < len(self._tokens) else None

    def _is(self, kind: str, *texts: str) -> bool:
        token = self._peek()
        return token is not None and token.kind == kind and token.text in texts and token.elements is None

    def _take(self, *texts: str) -> Token:
        token = self._peek()
        if token is None or token.text not in texts:
            raise self._error(f"'{texts[0]}' is missing")
        self._pos += 1
        return token

    def _skip_ends(self) -> None:
        while self._is("op", "\n", ";"):
            self._pos += 1

    def _chain(self, ends: tuple[str, ...]) -> Chain:
        """The statements up to one of the words or operators in `ends`."""
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
                self._pos += 1
                self._skip_ends()
        return Chain(tuple(parts))

    def _statement(self) -> Statement:
        token = self._peek()
        if token is None:
            raise self._error("It ends too early")
        if token.kind in ("[[", "(("):
            self._pos += 1
            return Test(token.kind, token.text, token.line)
        compound = {
            "if": self._if, "case": self._case, "for": self._for, "while": self._while, "until": self._while,
            "{": self._group, "(": self._group, "function": self._function, "!": self._not,
        }  # fmt: skip
        if token.text in compound and token.elements is None:
            return compound[token.text]()
        following = self._tokens[self._pos + 1 : self._pos + 3]
        if token.kind == "word" and [next_token.text for next_token in following] == ["(", ")"]:
            self._pos += 3
            self._skip_ends()
            return Function(token.text, self._statement())
        return self._command()

    def _command(self) -> Command:
        tokens, redirections = [], list[Token]()
        while (token := self._peek()) is not None and token.kind == "word":
            tokens.append(token)
            self._pos += 1
            redirections += self._redirections.get(self._pos, [])
        if not tokens:
            raise self._error(f"'{token.text.strip()}' is out of place" if token is not None else "It ends too early")
        return Command(tuple(tokens), tokens[0].line, tuple(redirections))

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
        self._pos += 1
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
                self._pos += 1
            self._skip_ends()
        self._take("esac")
        return CaseStatement(word, tuple(branches), line)

    def _for(self) -> Statement:
        line = self._take("for").line
        if (token := self._peek()) is not None and token.kind == "((":
            self._pos += 1
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
