"""What parsers say of a wrong file is a plain sentence with the line."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
import yaml

import debubble as db
from debubble.files import convert, decode_json
from debubble.parse_errors import reason_of


class Entries(msgspec.Struct, forbid_unknown_fields=True):
    """Entries of a file."""

    devices: Annotated[int, msgspec.Meta(ge=1)]
    share: float | None = None
    link: Literal["half", "full"] = "full"
    limits: list[float] = []
    names: dict[int, str] = {}


@pytest.mark.parametrize(("content", "words"), [
    (b"", "it is empty"),
    (b"null", "it must be fields by name, not null"),
    (b"[]", "it must be fields by name, not a list"),
    (b'{"devices": "two"}', "`devices` must be a whole number, not a text"),
    (b'{"devices": 0}', "`devices` must be a whole number >= 1"),
    (b'{"devices": 1, "share": "x"}', "`share` must be a number or null, not a text"),
    (b'{"devices": 1, "limits": [1, []]}', "`limits[1]` must be a number, not a list"),
    (b'{"devices": 1, "names": {"a": "b"}}', "a key of `names` must be a whole number, not a text"),
    (b'{"devices": 1, "link": "none"}', "`link` cannot be 'none'"),
    (b"{}", "it has no field `devices`"),
    (b'{"device": 1}', "it has an unknown field `device`"),
    (b'{"devices": 1,\n "share"; 2}', "line 2, column 9: expected ':'"),
    (b'{"devices": 1,\n "share": ', "it breaks off in line 2"),
    (b"\xff", "it is not a text file"),
])  # fmt: skip
def test_wrong_entries_are_named_in_plain_words(content: bytes, words: str) -> None:
    with pytest.raises(msgspec.DecodeError) as refused:
        decode_json(content, Entries)
    assert str(refused.value) == words


def test_wrong_values_are_named_in_plain_words() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"^`devices` must be a whole number, not a list$"):
        convert({"devices": []}, Entries)


@pytest.mark.parametrize(("read", "content", "words"), [
    (yaml.safe_load, "a: 1\nb: [1,\n  2\n",
     "line 4, column 1: expected ',' or ']', but got the end of the file (a flow sequence begins in line 2)"),
    (yaml.safe_load, "a: b: c", "line 1, column 5: mapping values are not allowed here"),
    (yaml.safe_load, "a:\n\t- b", "line 2, column 1: found character '\\t' that cannot start any token"),
    (tomllib.loads, "a = 1\nb 2", "line 2, column 3: expected '=' after a key in a key/value pair"),
    (tomllib.loads, "a = ", "at its end: invalid value"),
])  # fmt: skip
def test_the_line_of_a_wrong_text_is_named(read: Callable[[str], Any], content: str, words: str) -> None:
    with pytest.raises((ValueError, yaml.YAMLError)) as refused:
        read(content)
    assert reason_of(refused.value) == words


@pytest.mark.parametrize("content", ["", "# devices: 8xA100-80GB\n"])
def test_an_empty_cluster_file_says_what_to_write(content: str, tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(content)
    with pytest.raises(db.InputError, match=r"cluster.yaml is empty: write at least its devices"):
        db.Cluster.parse(tmp_path / "cluster.yaml")
