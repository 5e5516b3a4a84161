"""Help sections, abbreviated names, completion, and progress of commands."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

import debubble as db
from debubble.cli import output
from debubble.cli.app import with_all_commands
from debubble.cli.names import Names, cluster_completion, completion, model_names, optimizer_names, schedule_names
from debubble.cli.output import LONG_PAUSE, PAUSE, SearchProgress
from debubble.costs import hardware
from debubble.costs.step import MOMENTS
from debubble.exports import exports
from debubble.ir import InputError, RunOptions
from debubble.planners.auto import fastest_of
from debubble.planners.model_problem import problem_of
from debubble.planners.progress import Improvement, Progress, progress_listener

app = with_all_commands()


def output_of(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def test_commands_and_options_have_titles() -> None:
    titles = re.findall(r"^(\S.*):$", output_of("plan", "--help"), re.MULTILINE)

    assert titles == [
        "Arguments", "The run of the MODEL", "What is asked", "Costs instead of a MODEL", "The search", "Output",
        "Options",
    ]  # fmt: skip
    assert "The run of the MODEL" not in output_of("profile", "--help")
    words = output_of("--help")
    assert re.findall(r"^(Plan|Look|Take along):$", words, re.MULTILINE) == ["Plan", "Look", "Take along"]


def test_root_help_has_full_sentences_in_80_columns() -> None:
    listed = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["--help"]).output

    assert "..." not in listed.replace("[ARGS]...", "")
    assert max(map(len, listed.splitlines())) <= 80


def test_commands_options_and_names_are_called_by_a_beginning() -> None:
    assert json.loads(output_of("sim", "--sched", "dual", "--dev=2", "--js"))["schedule"] == "dualpipe-v"
    assert output_of("--vers") == f"debubble {db.__version__}\n"


def test_repeated_options_show_the_type_of_one_value(run: Any) -> None:
    assert "  --option <str> " in run("simulate", "-h")[1]
    assert "  LOG <path> " in run("calibrate", "-h")[1]


def test_empty_path_is_refused(run: Any) -> None:
    call = ("export", "plan.json", "--to", "torchtitan", "-o", "")
    assert run(*call) == (2, "", "debubble: -o is empty: give a path, or leave -o out.\n")


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ("pla llama-tiny", "'pla' may be plan or planners: write more of it."),
        ("pln llama-tiny", "There is no command 'pln'; did you mean 'plan'?"),
        ("plann llama-tiny", "'plann' is read as 'planners' (did you mean 'plan'?): Got unexpected extra argument"),
        ("simulate --micro 4", "'--micro' may be --micro-batches or --micro-batch-size: write more of it."),
        ("simulate --microbatches=4", "There is no option '--microbatches'; did you mean '--micro-batches'"),
        ("plan llama-tiny --schedule zb", "`plan` has no option '--schedule', which `simulate` has."),
        ("plan llama-tiny --qqq", "There is no option '--qqq'; `-h` lists them."),
        ("simulate --schedule zb-", "'zb-' may be zb-h1, zb-h2 or zb-v: write more of it."),
        ("plan llama-tiny --planner MEGATRON-K", "Give the devices with --cluster"),
        ("plan llama-tiny --for torchtitn", "There is no framework 'torchtitn'; did you mean 'torchtitan'"),
        ("plan llama-tiny --swap x", "There is no swap 'x'; there are: host, peer, none."),
        ("plan llama-tin-y --cluster 8xH100", "There is no model or file 'llama-tin-y'; did you mean 'llama-tiny'"),
        ("plan llama-tiny --cluster 8xH10", "'H10' may be H100-80GB, H100-PCIe-80GB or H100-NVL-94GB: write more"),
        ("import megatrn job", "There is no framework 'megatrn'; did you mean 'megatron'"),
        ("plan llama-tiny --micro-batches x", "--micro-batches takes whole numbers, not x."),
        ("plan llama-tiny --sequence-length 4.5", "--sequence-length takes whole numbers, not 4.5."),
        ("plan llama-tiny --effort x", "--effort takes numbers, not x."),
        ("fits llama-tiny --zero 7", "--zero must be at most 3, not 7."),
        ("export plan.json", "Missing option '--to'; see `debubble export -h`."),
        ("compare plan.json", "Missing argument 'TRACE'; see `debubble compare -h`."),
        ("-z", "No such option: -z; see `debubble -h`."),
    ],
)
def test_wrong_calls_get_suggestions(call: str, sentence: str) -> None:
    error = CliRunner().invoke(app, call.split()).exception

    assert isinstance(error, InputError)
    assert str(error).startswith(sentence)


@pytest.mark.parametrize("option", ["--no-post-validation", "--no-post", "--prompt=--steps", "--prompt --x"])
def test_negated_options_and_option_like_values_are_read(option: str) -> None:
    assert output_of("train", "plan.json", *option.split(), "--help").startswith("Usage")


@pytest.mark.parametrize("json_option", ["--json", "--js"])
def test_parser_errors_are_one_object_and_one_sentence(run: Any, json_option: str) -> None:
    code, out, err = run("plan", "llama-tiny", "--micro-batches", "x", json_option)

    assert code == 2
    assert err == f"debubble: {json.loads(out)['error']}\n"


@pytest.mark.parametrize(
    ("command", "members"),
    [
        ("models", [*db.models]), ("hardware", [*hardware]),
        ("schedules", sorted(db.schedules)), ("planners", sorted(db.planners)),
    ],
)  # fmt: skip
def test_lists_name_every_member_as_json_and_in_80_columns(command: str, members: list[str]) -> None:
    listed = json.loads(output_of(command, "--json"))[command]
    printed = CliRunner().invoke(app, [command], env={"COLUMNS": "80"}).output

    assert [entry["name"] for entry in listed] == members
    assert set(members) <= {line.split()[0] for line in printed.splitlines() if line.strip()}
    assert max(map(len, printed.splitlines())) <= 80
    assert "…" not in printed
    if command in ("schedules", "planners"):
        assert all(entry["paper"] and entry["summary"] for entry in listed)


def test_the_list_of_models_has_their_parameters() -> None:
    assert json.loads(output_of("models", "--json"))["models"][0]["parameters"] == 6_738_415_616


def test_the_list_of_devices_has_the_hosts_memory_assumed() -> None:
    printed = CliRunner().invoke(app, ["hardware"], env={"COLUMNS": "80"}).output
    [row] = [line.split() for line in printed.splitlines() if line.startswith("H100-80GB ")][:1]
    assert row == ["H100-80GB", "80", "989", "1979", "3350", "450", "50", "63", "230"]


def test_models_shows_the_parameters_of_a_config(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(dict(db.models["llama2-7b"].config)))
    assert [row["parameters"] for row in json.loads(output_of("models", str(config), "--json"))["models"]] == [
        6_738_415_616
    ]


def test_options_refer_to_options_of_their_own_command() -> None:
    other = {("import", "--vocab-size"), ("watch", "--checkpoint"), ("watch", "--metrics")}  # of the job, of `train`
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        known = {option for parameter in command.params for option in parameter.opts}
        words = " ".join(str(getattr(parameter, "help", "")) for parameter in command.params)
        named = {option for option in re.findall(r"(?<![\w-])--[a-z-]+", words) if (name, option) not in other}
        assert named <= known, name


@pytest.mark.parametrize(("command", "names"), [("export", list(exports)), ("plan", list(MOMENTS))])
def test_help_names_the_choices(command: str, names: list[str]) -> None:
    words = " ".join(output_of(command, "--help").split())

    assert [name for name in names if name not in words] == []


@pytest.mark.parametrize(
    ("names", "incomplete", "offered"),
    [
        (model_names, "llama2-13", ["llama2-13b"]),
        (optimizer_names, "adamw", ["adamw", "adamw-8bit"]),
        (schedule_names, "zb-h", ["zb-h1", "zb-h2"]),
    ],
)
def test_shells_offer_names(names: Names, incomplete: str, offered: list[str]) -> None:
    assert completion(names)(incomplete) == offered
    assert cluster_completion("16xL40") == ["16xL40S-48GB"]  # After their number.


def completions(line: str) -> list[str]:
    """Completions that bash is offered at the end of a line."""
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - (not line.endswith(" ")))}
    return CliRunner().invoke(app, env={"_ROOT_COMPLETE": "complete_bash", **words}, prog_name="root").output.split()


def test_bash_completes_commands_options_and_values() -> None:
    assert completions("debubble sim") == ["simulate"]
    assert completions("debubble simulate --sche") == ["--schedule"]
    assert completions("debubble simulate --schedule zb-h") == ["zb-h1", "zb-h2"]


def test_planning_reports_the_number_of_finished_planners() -> None:
    seen: list[Progress | Improvement] = []
    problem = problem_of(db.models["llama-tiny"], db.Cluster.parse("2xA100-80GB"), RunOptions(), micro_batches=2)

    with progress_listener(seen.append):
        [*fastest_of(problem, ["dapple", "adapipe", "pipedream"])]

    states = [p for p in seen if isinstance(p, Progress)]
    assert [(p.done, p.total, p.counted) for p in states] == [(n, 3, "planners") for n in (1, 2, 3)]
    times = [p.step_time for p in states if p.step_time is not None]
    assert len(times) == 3
    assert times == sorted(times, reverse=True)


def test_slow_command_reports_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: Queue[str] = Queue()
    printed: list[str] = []

    class Terminal(io.StringIO):
        def write(self, text: str) -> int:
            lines.put(text)
            return len(text)

    monkeypatch.setattr(output, "MESSAGE_DELAY", 0.0)
    monkeypatch.setattr(output, "log", lambda: Console(file=Terminal()))

    @output.with_delayed_message("Counting")
    def command() -> None:
        printed.append(lines.get())

    command()
    assert printed == ["Counting ...\n"]


def test_command_does_not_import_other_commands() -> None:
    program = "import sys; from debubble.cli.app import with_command; with_command('plan'); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "debubble.cli.plan" in loaded
    assert not {"debubble.cli.answers", "debubble.cli.train", "debubble.cli.schema"} & set(loaded)


def state(stage: str, *, best: str | None = None, step: float | None = None) -> Progress:
    return Progress(stage=stage, done=1, total=3, counted="planners", best=best, step_time=step)


def test_best_plan_remains_shown_until_a_better_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("debubble.cli.output.log", lambda: Console(force_terminal=True, quiet=True))
    shown: list[str] = []
    status: Any = Console(quiet=True).status("")
    monkeypatch.setattr(status, "update", shown.append)
    show = SearchProgress(status)

    show(state("Ranking", best="dapple", step=2.0))
    show(state("Planning"))
    show(state("Planning", best="merak", step=3.0))
    show(state("Planning", best="joint", step=1.5))

    assert shown == [
        "Ranking: 1 of 3 planners, best so far 2 s (dapple)",
        "Planning: 1 of 3 planners, best so far 2 s (dapple)",
        "Planning: 1 of 3 planners, best so far 2 s (dapple)",
        "Planning: 1 of 3 planners, best so far 1.5 s (joint)",
    ]


def test_piped_progress_is_a_line_per_stage_and_better_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = 0.0
    monkeypatch.setattr("debubble.cli.output.time.monotonic", lambda: clock)
    show = SearchProgress(Console(quiet=True).status(""))

    for _ in range(20):
        clock += LONG_PAUSE / 20
        show(state("Ranking"))
    for step in (2.0, 1.9, 1.9, 1.8):
        clock += PAUSE / 2
        show(state("Planning", best="joint", step=step))

    assert capsys.readouterr().err.splitlines() == [
        "Ranking: 1 of 3 planners",
        "Planning: 1 of 3 planners, best so far 2 s (joint)",
        "Planning: 1 of 3 planners, best so far 1.9 s (joint)",
    ]


def test_progress_names_its_search(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    status: Any = Console(quiet=True).status("")
    monkeypatch.setattr(status, "update", shown.append)
    monkeypatch.setattr(Console, "is_terminal", True)

    SearchProgress(status, subject="megatron")(state("Planning"))

    assert shown == ["megatron: Planning: 1 of 3 planners"]


def test_names_take_precedence_over_files(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plan").touch()
    monkeypatch.chdir(tmp_path)
    assert '"PlanAnswer"' in run("schema", "plan")[1]
