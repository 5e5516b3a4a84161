"""The GPU benchmark as a dry run on a CPU with tiny sizes, and the pages that are made from its figures."""

import json
import re
import subprocess
import sys
from math import inf
from pathlib import Path
from typing import Any

import gpu
import pytest
from on_gpu import large, plans, report, rivals, slices
from on_gpu.figures import Figures
from on_gpu.settings import settings

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, str(ROOT / "benchmarks/gpu.py")]


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a dry run, and its figures; most sections run in this process, as starting one takes seconds."""
    folder, section_folder = (tmp_path_factory.mktemp(name) for name in ("gpu", "sections"))
    options = ["--dry-run", "--sections", "machine", "--commit", "abc", "--output", str(folder)]
    subprocess.run([*COMMAND, *options], check=True, stdout=subprocess.PIPE)
    result = json.loads((folder / "gpu.json").read_text())
    for name, section in {"rivals": rivals, "large": large, "slices": slices}.items():
        figures = Figures(section_folder / f"{name}.json", until=inf)
        section.run(settings(dry=True), figures, {})
        result["sections"][name] = {**result["sections"]["machine"], "figures": figures.tree}
    return folder, result


@pytest.mark.slow
def test_every_section_has_a_status_and_figures(dry: Any) -> None:
    folder, result = dry
    assert (result["dry_run"], result["commit"]) == (True, "abc")
    assert result["sections"]["machine"]["status"] == "ran"
    assert result["sections"]["machine"]["figures"]["launch"]["seconds"]["measured"] > 0
    assert sorted(path.name for path in folder.iterdir()) == ["gpu.json", "gpu.log"]


@pytest.mark.slow
def test_a_model_that_does_not_fit_trains_with_other_ways(dry: Any) -> None:
    figures = dry[1]["sections"]["large"]["figures"]
    assert {way: figures[way]["fits"] for way in ("kept", "recomputed", "offloaded")} == {
        "kept": False, "recomputed": True, "offloaded": True,
    }  # fmt: skip
    for way in ("recomputed", "offloaded"):
        assert figures[way]["losses"][-1] < figures[way]["losses"][0]
    assert figures["offloaded"]["losses"] == pytest.approx(figures["recomputed"]["losses"], rel=1e-5)
    assert figures["offloaded"]["offloaded"] > 0


@pytest.mark.slow
def test_every_rival_trains_the_same_layers(dry: Any) -> None:
    [ways] = dry[1]["sections"]["rivals"]["figures"].values()
    paces = {way: one["tokens_per_second"] for way, one in ways.items() if way != "model"}
    assert list(paces) == ["transformers, eager", "debubble, eager"]
    assert all(pace > 0 for pace in paces.values())
    assert all(one["losses"][-1] < one["losses"][0] for way, one in ways.items() if way != "model")


@pytest.mark.slow
def test_a_sequence_has_the_same_losses_in_slices(dry: Any) -> None:
    figures = dry[1]["sections"]["slices"]["figures"]
    assert figures["8 slices"]["losses"] == pytest.approx(figures["1 slices"]["losses"], rel=1e-5)


def test_plans_without_a_profile_are_omitted_with_a_reason(tmp_path: Path) -> None:
    figures = Figures(tmp_path / "plans.json", until=inf)
    plans.run(settings(dry=True), figures, {})
    assert "there is no profile" in figures.tree["4-devices"]["left_out"]


def test_an_unknown_section_is_refused(tmp_path: Path) -> None:
    ended = subprocess.run([*COMMAND, "--sections", "magic"], capture_output=True, text=True)
    assert ended.returncode == 2
    assert "There is no section magic: there are tests, machine" in ended.stderr


@pytest.mark.slow
def test_the_page_says_that_a_run_was_dry(dry: Any) -> None:
    page = report.page(dry[1])
    assert "they say nothing about a GPU" in page
    assert "| Tests that need a GPU |" in page
    assert page.count("**has not run**") == 4
    assert "kept: does not fit" in report.note(dry[1])


def test_the_page_has_a_row_for_every_program_of_a_device() -> None:
    def pair(ratio: Any) -> Any:
        return {"predicted": 1.0, "measured": ratio, "ratio": ratio}

    memory = {"activations": pair(1.0), "offloaded": 5, "allocated_in_step": 2e9, "reserved": 3e9}
    kinds = {"F": pair(0.9), "I": pair(1.2), "W": pair(1.1)}
    program = {"operations": kinds, "span": pair(1.05), "hidden_transfers": pair(0.5), "memory": memory}
    plans = {"status": "ran", "commit": "abc", "figures": {"4-devices": {"device-1": {"zb-h1": program}}}}
    row = "| 4-devices, device-1 | zb-h1 | 0.900 | 1.200 | 1.100 | 1.050 | 1.000 | 100% | 50% | 2.0 GB | 3.0 GB |"
    assert row in report.note({"sections": {"plans": plans}})


@pytest.mark.parametrize(
    ("name", "status", "figures", "words"),
    [
        ("machine", "ran", {"copies": {}}, "in full"),
        ("profile", "ran", {"a": {"operators": {}}, "b": {"left_out": "no time"}}, "in part, without b"),
        ("plans", "ran", {"4": {"auto": {"failed": "Error"}}}, "in part, without 4 auto"),
        ("plans", "ran", {"4": {"auto": {"memory": {"left_out": "why"}}}}, "in full"),
        ("large", "out of time", {"kept": {}, "recomputed": {}}, "in part: out of time, without offloaded"),
        ("large", "out of time", {way: {} for way in report.WAYS}, "in full, out of time after the last case"),
        ("slices", "failed", {}, "in part: failed"),
    ],
)
def test_the_status_names_cases_that_have_not_run(name: str, status: str, figures: Any, words: str) -> None:
    page = report.page({"sections": {name: {"status": status, "commit": "abc", "figures": figures}}})
    assert f" | {words} |  | abc |" in page


def test_the_page_of_no_figures_says_that_nothing_has_run() -> None:
    assert "**No CUDA path of debubble has run yet.**" in report.page({"sections": {}})


@pytest.mark.slow
def test_a_merged_section_keeps_its_time_and_commit(dry: Any) -> None:
    before = {"dry_run": True, "sections": {"large": {"commit": "old"}, "tests": {"commit": "old"}}}
    merged = gpu.with_sections(before, dry[1], ["machine", "large"], note="Why.")
    assert list(merged["sections"]) == ["tests", "machine", "large"]
    assert [section["commit"] for section in merged["sections"].values()] == ["old", "abc", "abc"]
    assert merged["sections"]["large"] == {**dry[1]["sections"]["large"], "note": "Why."}
    assert merged["sections"]["machine"]["at"] == dry[1]["at"]


def test_the_readme_has_the_figures_of_the_results() -> None:
    figures = report.read(ROOT / "benchmarks/results/gpu.json")
    readme = " ".join((ROOT / "README.md").read_text().split())
    headlines = "\n".join(report.headlines(figures))
    forward, backward = re.findall(r"forward (\d\.\d+), backward (\d\.\d+)", headlines)[0]
    assert f"a layer takes {forward} (forward) and {backward} (backward)" in readme
    passed = figures["sections"]["tests"]["figures"]["passed"]
    assert f"the {passed} tests of CUDA paths pass" in readme
    near, count = re.findall(r"(\d+) of (\d+) computed figures are within 2%", headlines)[0]
    assert f"{near} of {count} computed figures of the bytes that units keep are within 2%" in readme
    assert "recomputed trains, offloaded trains" in headlines


def test_the_pages_are_generated_from_the_figures() -> None:
    figures = report.read(ROOT / "benchmarks/results/gpu.json")
    assert (ROOT / "docs/gpu.md").read_text() == report.page(figures)
    assert (ROOT / "docs/notes/gpu.md").read_text() == report.note(figures)
