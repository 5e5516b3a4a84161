"""Members are found by importing a package's modules, also after a failed import and from several threads."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import debubble as db
from debubble.planners import planners
from debubble.registry import Registry
from debubble.schedules import schedules

FAILS_ONCE = """
from pathlib import Path
from library import registry
registry.add("broken", "b")
mark = Path(__file__).with_name("mark")
if not mark.exists():
    mark.touch()
    raise ImportError("not yet")
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with a registry and the members a and c; tests add more modules."""
    folder = tmp_path / "library"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from debubble.registry import Registry\nregistry = Registry('library', kind='thing')\n"
    )
    for name in ("a", "c"):
        (folder / f"{name}.py").write_text(f"from library import registry\nregistry.add('{name}', '{name}')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "library"]:
        del sys.modules[name]


def registry() -> Registry[str]:
    import library  # type: ignore[import-not-found]

    return library.registry  # type: ignore[no-any-return]


def test_failed_import_is_retried(library: Path) -> None:
    (library / "b.py").write_text(FAILS_ONCE)
    with pytest.raises(ImportError, match="not yet"):
        len(registry())
    assert sorted(registry()) == ["a", "broken", "c"]


def test_failing_entry_point_is_named_with_its_distribution(library: Path) -> None:
    metadata = library.parent / "shelf-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[library]\nmine = no_such_module\n")

    members = registry()
    assert "a" in members
    with pytest.raises(db.InputError) as refused:
        members["mine"]

    assert str(refused.value) == (
        "The entry point 'mine' that shelf adds to library cannot be loaded (ModuleNotFoundError: No module named"
        " 'no_such_module'); mend it, or uninstall shelf."
    )


def test_a_module_may_ask_the_registry_that_imports_it(library: Path) -> None:
    (library / "b.py").write_text("from library import registry\nseen = list(registry)\n")
    assert list(registry()) == ["a", "c"]
    assert sys.modules["library.b"].seen == ["a"]


@pytest.mark.parametrize("name", sorted({*planners} - {*schedules}))
def test_planner_in_place_of_a_schedule_is_named(name: str) -> None:
    with pytest.raises(db.InputError) as refused:
        schedules.full_name(name)
    assert str(refused.value) == f"There is no schedule '{name}', which is a planner: `debubble plan --planner {name}`."


@pytest.mark.parametrize("name", ["zb-h1", "hanayo", "V-Half"])
def test_schedule_in_place_of_a_planner_is_named(name: str) -> None:
    with pytest.raises(db.InputError, match=f"'{name}', which is a schedule: `debubble simulate --schedule"):
        planners[name]


def test_second_thread_waits_for_all_members(library: Path) -> None:
    (library / "b.py").write_text(
        "import threading\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from library import registry\n"
        "started = threading.Event()\n"
        "def ask():\n    started.set()\n    return len(registry)\n"
        "answer = ThreadPoolExecutor(1).submit(ask)\n"
        "started.wait()\n"
    )
    assert len(registry()) == 2
    assert sys.modules["library.b"].answer.result() == 2


def test_members_of_subpackages_are_registered(library: Path) -> None:
    (library / "deep").mkdir()
    (library / "deep" / "__init__.py").write_text("from library.deep import d\n")
    (library / "deep" / "d.py").write_text("from library import registry\nregistry.add('d', 'd')\n")
    (library / "deep" / "later.py").write_text("raise ImportError('nobody needs it yet')\n")
    assert list(registry()) == ["a", "c", "d"]


def test_other_distributions_add_members_by_entry_points(library: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from library import registry\nregistry.add('mine', 'm')\n")
    info = tmp_path / "mine-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[library]\nmine = mine\n")
    assert registry()["mine"] == "m"


def test_folder_reports_missing_names() -> None:
    assert "llama3-8b" in db.models
    assert "llama3-9b" not in db.models
