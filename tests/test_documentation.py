"""Links, commands, tables and limits of the documentation."""

from __future__ import annotations

import doctest
import importlib
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from docs.run_commands import commands
from tools import schedule_page

import debubble as db
import schedules
from tests.support.command_line import check_call

ROOT = Path(__file__).parents[1]
TOWNCRIER = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]
EXAMPLES = sorted(file for file in (ROOT / "src").rglob("*.py") if ">>> " in file.read_text())
NOTES = sorted((ROOT / "docs" / "notes").glob("*.md"))
READING_PATH = sorted((ROOT / "docs").glob("*.md"))
PAGES = sorted([*ROOT.glob("*.md"), *READING_PATH, *NOTES])
MAX_PAGES, MAX_WORDS, MAX_VERSION_LINES = 16, 30_000, 40


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_reading_path_is_short() -> None:
    assert len(READING_PATH) <= MAX_PAGES
    assert sum(len(page.read_text().split()) for page in READING_PATH) <= MAX_WORDS


def test_a_version_has_few_lines_in_the_changelog() -> None:
    versions = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]

    assert versions
    assert [lines[0] for version in versions if len(lines := version.splitlines()) > MAX_VERSION_LINES] == []


def test_every_version_in_the_changelog_has_a_date() -> None:
    titles = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)

    assert [title for title in titles if not re.fullmatch(r"\d+\.\d+\.\d+, \d{4}-\d{2}-\d{2}", title)] == []


def test_news_fragments_have_one_line_and_a_known_type() -> None:
    types = "|".join(fragment_type["directory"] for fragment_type in TOWNCRIER["type"])
    fragments = [file for file in (ROOT / TOWNCRIER["directory"]).iterdir() if file.name != "README.md"]

    assert [file.name for file in fragments if not re.fullmatch(rf"(\d+|\+[\w-]+)\.({types})\.md", file.name)] == []
    assert [file.name for file in fragments if len(file.read_text().splitlines()) != 1] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_exist(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors_of(file), target


def test_source_files_that_pages_name_exist() -> None:
    ours = [
        f"/{file.relative_to(ROOT)}"
        for folder in ("src", "tests", "benchmarks", "docs", "examples", "tools")
        for file in (ROOT / folder).rglob("*.py")
    ]
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]
    named = {name for page in pages for name in re.findall(r"`([\w/]+\.py)`", page.read_text())}
    exported = {name for name in named if name.startswith(("out/", "planned_", "megatron_bridge"))}
    assert [name for name in named - exported if not any(file.endswith(f"/{name}") for file in ours)] == []


@pytest.mark.parametrize("pages", [READING_PATH, NOTES], ids=["docs", "notes"])
def test_every_page_is_in_the_table_of_contents(pages: list[Path]) -> None:
    contents = (pages[0].parent / "index.md").read_text()
    names = {page.stem for page in pages} - {"index"}
    assert {name for name in names if not re.search(rf"^{name}$", contents, re.MULTILINE)} == set()


def test_every_note_has_a_date() -> None:
    index = (ROOT / "docs/notes/index.md").read_text()
    rows = [row for row in index.splitlines() if row.startswith("| [")]
    dated = {name for row in rows if re.search(r"\b20\d\d \|$", row) for name in re.findall(r"\((\w[\w-]*)\.md\)", row)}

    assert {note.stem for note in NOTES} - {"index"} - dated == set()


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: str(file.relative_to(ROOT / "src" / "debubble")))
def test_examples_in_docstrings_are_right(file: Path) -> None:
    module = importlib.import_module(".".join(file.relative_to(ROOT / "src").with_suffix("").parts))
    assert doctest.testmod(module, extraglobs={"db": db, **vars(importlib.import_module("debubble.ir"))}).failed == 0


@pytest.mark.parametrize(("page", "command"), [(p.name, c) for p in PAGES for c in commands(p)])
def test_commands_of_pages_parse(page: str, command: str) -> None:
    check_call(shlex.split(command)[1:])


def test_commands_are_extracted_from_pages() -> None:
    named = {page.name for page in PAGES if commands(page)}

    assert {"README.md", "start.md", "how-to.md", "views.md", "training.md"} <= named


def test_results_name_their_commands_without_places_of_a_machine() -> None:
    results = [*(ROOT / "benchmarks/results").glob("*.json"), ROOT / "benchmarks/golden/expected.json"]
    commands_of = {file.name: json.loads(file.read_text()).get("command", "") for file in results}

    assert {name: command for name, command in commands_of.items() if "/work" in command or " /" in command} == {}


def test_the_readmes_picture_has_the_step_of_the_golden_corpus() -> None:
    expected = json.loads((ROOT / "benchmarks/golden/expected.json").read_text())["answers"]["A"]
    step, less = re.findall(r"The step takes (\S+) s; no plan takes (\S+)% less", (ROOT / "README.md").read_text())[0]

    assert float(step) == pytest.approx(expected["step"], rel=0.005)
    assert float(less) / 100 == pytest.approx(1 - expected["bound"] / expected["step"], abs=0.005)


def test_every_word_of_the_glossary_is_explained_once() -> None:
    words = re.findall(r"^(\S.*)\n: ", (ROOT / "docs/reference.md").read_text(), re.MULTILINE)

    assert len(words) == len(set(words)) > 40
    assert words == sorted(words, key=str.lower)


def test_the_page_of_schedules_is_that_of_the_library() -> None:
    assert (ROOT / "docs/schedules.md").read_text() == schedule_page.page(), "python tools/schedule_page.py"


@pytest.mark.parametrize("name", [*db.schedules])
def test_every_argument_of_a_schedule_is_explained(name: str) -> None:
    section = schedule_page.section(name)
    introduction = schedule_page.page().partition("## The library")[0]

    for option in db.schedules[name].options:
        assert re.search(rf"\* `{option}`: \S", section) or re.search(rf"`{option}=` \(\w", introduction), option
    assert "\n\n\n" not in section


def test_schedule_comparison_page_matches_the_results() -> None:
    note = schedules.comparison(schedules.BENCHMARK.rows())
    assert (ROOT / "docs/notes/schedules.md").read_text() == note, "python benchmarks/schedules.py --docs"
