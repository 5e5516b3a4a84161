"""`debubble train --online` end to end: four processes and a search, which all end."""

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import debubble as db
from debubble.ir import RunOptions, StageCosts
from debubble.plans import Plan
from debubble.training.options import TrainOptions, plan_of
from tests.support.model_cases import on_cpus
from tests.support.online_cases import ordered
from tests.support.processes import wait_for_end
from tests.support.runtime_cases import LLAMA
from tests.support.runtime_cases import plan_of as plan_for

STEPS = 200


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """GPipe over four ranks, with wrong costs."""
    (tmp_path / "text.txt").write_text("".join(f"{i} bottles of beer on the wall.\n" for i in range(400)))
    costs = StageCosts.of(stages=4, forward=[1, 1, 5, 1], activation=2, memory_limit=10**9)
    made = plan_for(db.schedules["gpipe"](devices=4, micro_batches=8), {**LLAMA, "vocab_size": 256}, costs=costs)
    replace(made, options=RunOptions(sequence_length=32, dtype="fp32")).save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def command(plan: Path, *more: str) -> list[str]:
    program = "import sys; from debubble.cli import main; sys.exit(main())"
    return [sys.executable, "-c", program, "train", str(plan), "--data", str(plan.parent / "text.txt"), *more]


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--post-validation",)], ids=["synchronous", "post-validated"])
def test_four_ranks_adopt_a_better_order_and_no_loss_changes(plan: Any, more: Any) -> None:
    def run(*more: Any) -> Any:
        arguments = command(plan, "--steps", str(STEPS), "--json", *more)
        return json.loads(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout)

    online, plain = run("--online", *more), run()
    assert len(online["losses"]) == STEPS
    assert online["losses"] == plain["losses"]
    events = [entry["event"] for entry in online["switches"]]
    assert events[0] == "search"
    assert "adopted" in events
    logged = [json.loads(line) for line in (plan.parent / "plan.online.jsonl").read_text().splitlines()]
    assert logged == online["switches"]
    running = Plan.load(plan.parent / "plan.online.json")
    assert running.reorders(Plan.load(plan))
    shown = subprocess.run(
        [*command(plan)[:3], "show", str(plan.parent / "plan.online.json")], capture_output=True, text=True, check=True
    )
    assert "searched by optpipe" in shown.stdout


@pytest.mark.slow
def test_two_ranks_start_from_only_a_model(run: Any, forked_processes: None, tmp_path: Path) -> None:
    model = tmp_path / "config.json"
    model.write_text(json.dumps({**LLAMA, "vocab_size": 256}))
    shape = ("--cluster", "2xCPU", "--micro-batches", "2", "--sequence-length", "16", "--dtype", "fp32")
    code, out, err = run(
        "train", str(model), *shape, "--online", "--steps", "3", "--checkpoint", str(tmp_path / "run"), "--json"
    )
    assert code == 0, err
    assert len(json.loads(out)["losses"]) == 3
    [first] = (tmp_path / "run").glob("first-*.json")
    assert Plan.load(first).schedule.fused_recompute == frozenset({0, 1})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--cluster", "2xCPU"), "A MODEL without a plan is planned while it trains: add --online"),
        (("--micro-batches", "4", "--online"), "--micro-batches is for a MODEL on a --cluster; a plan has its own."),
    ],
)
def test_a_model_needs_a_cluster_and_online(run: Any, more: tuple[str, ...], message: str) -> None:
    code, _, err = run("train", "llama-tiny", *more)
    assert (code, message in " ".join(err.split())) == (2, True)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_ends_the_search_too(plan: Any) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        pytest.skip("Ctrl-C is ignored here, as of nohup, and so by what is started.")
    arguments = command(plan, "--steps", "1000000", "--online")
    with subprocess.Popen(arguments, stderr=subprocess.DEVNULL, start_new_session=True) as run:
        try:
            while not (searches := searching(run.pid)):
                assert run.poll() is None
            run.send_signal(signal.SIGINT)
            assert run.wait(30) == 130
        finally:
            run.terminate()
    wait_for_end(searches)


def searching(pid: int) -> list[int]:
    """Search processes among the descendants of a process."""
    searches: list[int] = []
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for child in map(int, children):
            if b"debubble.training.online.scheduler" in Path(f"/proc/{child}/cmdline").read_bytes():
                searches.append(child)
            searches += searching(child)
    except FileNotFoundError:
        return searches
    return searches


def test_resumed_run_continues_with_the_adopted_order(plan: Any, tmp_path: Path) -> None:
    planned = Plan.load(plan)
    ordered(planned, "1f1b").save(tmp_path / "plan.online.json")
    options = TrainOptions(plan=plan, online=True)
    assert plan_of(options, resuming=True).schedule.name == "1f1b"
    assert plan_of(options, resuming=False).schedule.name == "gpipe"
    assert plan_of(replace(options, online=False), resuming=True).schedule.name == "gpipe"
    replace(ordered(planned, "1f1b"), model_on_cluster=on_cpus(LLAMA)).save(tmp_path / "plan.online.json")
    assert plan_of(options, resuming=True).schedule.name == "gpipe"  # The order that a run of another plan had adopted.
