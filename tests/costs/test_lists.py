"""`debubble models` and `debubble hardware`."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import debubble.cli.hardware
import debubble.cli.models  # noqa: F401 - registers the command
from debubble.cli.app import app
from debubble.costs import hardware
from debubble.models import models


@pytest.mark.parametrize(("command", "names"), [("models", list(models)), ("hardware", list(hardware))])
def test_lists_name_every_member_as_json_and_in_80_columns(command: str, names: list[str]) -> None:
    listed = json.loads(CliRunner().invoke(app, [command, "--json"]).stdout)
    lines = CliRunner().invoke(app, [command], env={"COLUMNS": "80"}).stdout.splitlines()

    assert [entry["name"] for entry in listed[command]] == names
    assert set(names) <= {line.split()[0] for line in lines if line.strip()}
    assert max(map(len, lines)) <= 80


def test_the_list_of_models_has_their_parameters() -> None:
    listed = json.loads(CliRunner().invoke(app, ["models", "--json"]).stdout)

    assert listed["models"][0]["parameters"] == 6_738_415_616
