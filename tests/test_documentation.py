"""The documentation holds together: what it links to exists."""

from __future__ import annotations

import doctest
import importlib
import re
import shlex
from pathlib import Path

import long_run_docs
import pytest
from docs.run_commands import commands

import debubble as db
from tests.support.command_line import check_call

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(file for file in (ROOT / "src").rglob("*.py") if ">>> " in file.read_text())
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_of_a_page_leads_somewhere(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors_of(file), target


def test_every_source_file_that_a_page_names_is_there() -> None:
    ours = [
        f"/{file.relative_to(ROOT)}"
        for room in ("src", "tests", "benchmarks", "docs", "examples")
        for file in (ROOT / room).rglob("*.py")
    ]
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]
    named = {name for page in pages for name in re.findall(r"`([\w/]+\.py)`", page.read_text())}
    exported = {name for name in named if name.startswith(("out/", "planned_"))}
    assert [name for name in named - exported if not any(file.endswith(f"/{name}") for file in ours)] == []


def test_every_page_stands_in_the_contents_of_the_site() -> None:
    contents = (ROOT / "docs/index.md").read_text()
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index"}
    assert {page for page in pages if not re.search(rf"^{page}$", contents, re.MULTILINE)} == set()


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: str(file.relative_to(ROOT / "src" / "debubble")))
def test_every_example_of_a_docstring_gives_what_it_says(file: Path) -> None:
    module = importlib.import_module(".".join(file.relative_to(ROOT / "src").with_suffix("").parts))
    assert doctest.testmod(module, extraglobs={"db": db, **vars(importlib.import_module("debubble.ir"))}).failed == 0


@pytest.mark.parametrize(("page", "command"), [(p.name, c) for p in PAGES for c in commands(p)])
def test_every_command_of_a_page_is_called_correctly(page: str, command: str) -> None:
    check_call(shlex.split(command)[1:])


def test_every_page_of_commands_names_some() -> None:
    named = {page.name for page in PAGES if commands(page)}

    assert {"README.md", "start.md", "how-to.md", "views.md", "training.md"} <= named


def test_every_word_of_the_glossary_is_explained_once() -> None:
    words = re.findall(r"^(\S.*)\n: ", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)

    assert len(words) == len(set(words)) > 40
    assert words == sorted(words, key=str.lower)


def test_the_tables_of_long_runs_are_those_of_the_figures() -> None:
    assert long_run_docs.table() in (ROOT / "docs/runtime.md").read_text()
