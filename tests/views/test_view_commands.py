from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import debubble as db
import debubble.cli.compare
import debubble.cli.export
import debubble.cli.show
from debubble.cli.app import app
from debubble.ir import DebubbleError, InputError
from tests.views.scenes import small_plan, trace_of


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, DebubbleError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    small_plan().save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    trace_of(small_plan(), slower=2).save(tmp_path / "trace.json")
    return tmp_path / "trace.json"


def model_plan(*, micro_batches: int) -> db.Plan:
    cluster = db.Cluster.parse("2xA100-80GB")
    return db.plan(db.models["llama-tiny"], cluster, micro_batches=micro_batches, planner="dapple")


def test_show_prints_the_answer_of_plan_and_tables_on_demand(tmp_path: Path) -> None:
    plan = model_plan(micro_batches=4)
    plan.save(tmp_path / "plan.json")
    printed, details = (run("show", tmp_path / "plan.json", *more).stdout for more in ((), ("--details",)))
    words = " ".join(details.split())

    largest = max(map(float, plan.simulate().peak_memory)) / 2**20
    table = words.split("MiB at the peak, per device")[1]
    assert largest < 1024
    assert f" {largest:.1f} " in table or f" {largest:.0f} " in table
    assert printed.startswith("llama-tiny on 2 x A100-80GB fits: 1f1b by dapple\n")
    for text in ("tokens/s", "MFU", "GPU 0, fullest at", "in MiB: weights", "reserve 8192.0", "compute"):
        assert text in printed
    assert details.startswith(printed.removesuffix("\n"))
    assert "-0.0%" not in words
    tables = ("Where the step goes", "Stages", "Planners")
    assert [[table in text for table in tables] for text in (details, printed)] == [[True] * 3, [False] * 3]


def test_show_names_the_file_in_the_next_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model_plan(micro_batches=4).save("kept.json")
    printed = run("show", "kept.json").stdout

    assert "Next         debubble train kept.json" in printed


def test_show_compares_two_plans_with_different_batches(tmp_path: Path) -> None:
    for micro_batches in (4, 8):
        model_plan(micro_batches=micro_batches).save(tmp_path / f"{micro_batches}.json")
    words = " ".join(run("show", tmp_path / "4.json", tmp_path / "8.json").stdout.split())

    assert "Side by side" in words
    assert re.search(r"tokens per step \S+ \S+ 2\.000 ", words)
    assert "Their batches differ: compare tokens per second" in words
    assert "differ" not in run("show", tmp_path / "4.json", tmp_path / "4.json").stdout


def test_two_plans_are_compared_by_where_their_steps_go(tmp_path: Path) -> None:
    for micro_batches in (4, 8):
        model_plan(micro_batches=micro_batches).save(tmp_path / f"{micro_batches}.json")
    out = run("show", tmp_path / "4.json", tmp_path / "8.json").stdout
    rows = [line.split() for line in out.partition("\nA")[0].splitlines()]

    # The optimizer takes the same time after twice the micro-batches, and compute twice the time.
    assert [row[-1] for row in rows if row[:1] == ["optimizer"]] == ["1.000"]
    assert [row[-1] for row in rows if row[:1] == ["compute"]] == ["2.000"]


def test_a_plan_that_does_not_fit_is_shown_all_the_same(tmp_path: Path) -> None:
    tight = model_plan(micro_batches=4)
    replace(tight, costs=tight.costs.with_limit(1e6)).save(tmp_path / "tight.json")
    first, *rest = run("show", tmp_path / "tight.json").stdout.splitlines()
    answer = json.loads(run("show", tmp_path / "tight.json", "--json").stdout)
    words = " ".join(" ".join([first, *rest]).split())

    assert " does not fit: " in first
    assert "It does not fit: Device 0 runs out of memory at" in words
    assert "MFU" in words
    assert "leaves room for that" not in words
    assert answer["remarks"][0].startswith("It does not fit: ")
    assert answer["per_device"][0]["memory_limit"] == 1e6


@pytest.mark.slow
def test_show_writes_every_picture_that_is_asked_for(plan: Path, trace: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / "pictures" / f"step.{name}" for name in ("html", "png", "svg", "pdf", "perfetto")}
    options = [word for name, path in files.items() for word in (f"--{name}", path)]
    (tmp_path / "pictures").mkdir()

    result = run("show", plan, "--trace", trace, *options, "--json")

    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == sorted(p.name for p in files.values())
    summary = json.loads(result.stdout)
    assert summary["makespan"] == 19
    assert summary["measured"]["makespan"] == 38


def test_show_puts_two_plans_side_by_side(plan: Path, tmp_path: Path) -> None:
    small_plan(forward=2).save(tmp_path / "slow.json")

    summary = json.loads(run("show", plan, tmp_path / "slow.json", "--html", tmp_path / "two.html", "--json").stdout)

    assert (summary["makespan"], summary["other"]["makespan"]) == (19, 24)
    assert "Side by side" in (tmp_path / "two.html").read_text()


def test_show_refuses_three_plans_and_two_with_a_trace(plan: Path, trace: Path) -> None:
    for arguments in ([plan, plan, plan], [plan, plan, "--trace", trace]):
        with pytest.raises(InputError, match="Show one plan, with --trace if it was measured, or two plans"):
            run("show", *arguments)


def test_show_writes_any_view_of_the_registry_by_its_name(plan: Path, tmp_path: Path) -> None:
    run("show", plan, "--view", f"perfetto={tmp_path / 'named.json'}", "--perfetto", tmp_path / "own.json")
    assert (tmp_path / "named.json").read_bytes() == (tmp_path / "own.json").read_bytes()
    with pytest.raises(InputError, match="There is no view 'gif'"):
        run("show", plan, "--view", "gif=step.gif")
    with pytest.raises(InputError, match="--view html: write NAME=FILE"):
        run("show", plan, "--view", "html")


def test_compare_prints_the_drift(plan: Path, trace: Path) -> None:
    assert json.loads(run("compare", plan, trace, "--json").stdout)["makespan"]["ratio"] == 2
    assert "The pipeline took 2.00 times as long as predicted" in run("compare", plan, trace).stdout


def test_export_writes_files_and_reports_losses(plan: Path, tmp_path: Path) -> None:
    result = run("export", plan, "--to", "torch", "-o", tmp_path / "out", "--json")

    report = json.loads(result.stdout)
    assert report["files"] == [str(tmp_path / "out" / "schedule.csv")]
    assert (tmp_path / "out" / "schedule.csv").read_text().startswith("0F0,0F1,0B0,")
    assert len(report["losses"]) == 1
