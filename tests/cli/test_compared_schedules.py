"""`debubble simulate --schedule A,B`: the rows, their costs, and schedules that cannot run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import debubble as db
from debubble.frameworks.torch.export import to_csv


def test_schedules_of_more_stages_are_compared_at_equal_work(run: Any) -> None:
    """4 devices and 8 micro-batches take 33 under 1F1B; two chunks take 57 times half of a stage."""
    _, out, _ = run("simulate", "--schedule", "1f1b,interleaved", "--devices", "4", "--micro-batches", "8")

    rows = [line.split() for line in out.splitlines() if line.strip().startswith(("1f1b", "interleaved"))]
    assert [row[:2] for row in rows] == [["1f1b", "33"], ["interleaved", "28.5"]]
    assert "Of equal work per device" in out


def test_a_schedule_is_compared_with_several_chunks(run: Any) -> None:
    """With 8 devices and 16 micro-batches the bubble is 7 forwards and backwards, divided by the chunks."""
    _, out, _ = run(
        "simulate", "--schedule", "1f1b,interleaved:2,interleaved:4", "--devices", "8", "--micro-batches", "16"
    )

    rows = [line.split()[:2] for line in out.splitlines() if line.strip().startswith(("1f1b", "interleaved"))]
    labels = ("1f1b", "interleaved:2", "interleaved:4")
    assert rows == [[label, f"{48 + 21 / v:g}"] for label, v in zip(labels, (1, 2, 4), strict=True)]


def test_chunks_of_a_compared_schedule_are_a_number(run: Any) -> None:
    code, _, error = run("simulate", "--schedule", "1f1b,interleaved:x", "--devices", "8")

    assert (code, error) == (2, "debubble: --schedule interleaved:x: write NAME:CHUNKS, such as interleaved:4.\n")


def test_messages_of_compared_schedules_take_equal_time(run: Any, tmp_path: Path) -> None:
    full, halves = ({"forward": f, "backward_input": f, "backward_weight": f, "communication": 0.1} for f in (1, 0.5))
    (tmp_path / "whole.json").write_text(json.dumps(full))
    (tmp_path / "halves.json").write_text(json.dumps(halves))
    common = ("--devices", "8", "--micro-batches", "32", "--json", "--costs")

    compared = json.loads(run("simulate", "--schedule", "1f1b,interleaved", *common, str(tmp_path / "whole.json"))[1])
    alone = json.loads(run("simulate", "--schedule", "interleaved", *common, str(tmp_path / "halves.json"))[1])

    assert compared["schedules"][1]["step_time"] == pytest.approx(alone["step_time"])


def test_schedules_are_compared_with_costs_of_one_model(json_of: Any, tmp_path: Path) -> None:
    """The 8 costs are of a V's chunks, and 4 stages have the sums of two neighbors each."""
    eight = {"forward": list(range(1, 9)), "communication": [0, 0.5] * 4, "activation": 2, "static": 3, "stages": 8}
    four = {"forward": [3, 7, 11, 15], "backward_input": 2, "backward_weight": 2, "communication": 0.5, "activation": 4}
    (tmp_path / "eight.json").write_text(json.dumps(eight))
    (tmp_path / "four.json").write_text(json.dumps({**four, "static": 3}))

    def answer(schedules: str, costs: str) -> Any:
        return json_of("simulate", "--schedule", schedules, "--devices", "4", "--costs", str(tmp_path / costs))

    compared = answer("zb-h1,dualpipe-v", "eight.json")["schedules"]
    alone = answer("zb-h1", "four.json"), answer("dualpipe-v", "eight.json")
    figures = "step_time", "peak_memory"
    assert [[row[name] for name in figures] for row in compared] == [[a[name] for name in figures] for a in alone]
    assert compared[0]["remarks"][-1] == "A stage of zb-h1 is 2 stages of the costs file."


def test_csv_order_is_compared_with_schedules(run: Any, json_of: Any, tmp_path: Path) -> None:
    """The CSV sets the devices and micro-batches of all schedules."""
    (path := tmp_path / "own.csv").write_text(to_csv(db.schedules["interleaved"](devices=2, micro_batches=4, chunks=2)))
    call = ("simulate", "--csv", str(path), "--schedule", "interleaved,1f1b")

    answer = json_of(*call, "--svg", str(tmp_path / "all.svg"))
    first, second, third = answer["schedules"]
    assert [first["schedule"], first["devices"], first["micro_batches"]] == ["own", 2, 4]
    assert first["step_time"] == second["step_time"] < third["step_time"]
    assert (tmp_path / "all.svg").read_bytes().startswith(b"<?xml")
    assert "Leave --micro-batches out: the CSV says" in run(*call, "--micro-batches", "8")[2]


def test_devices_are_those_of_the_costs_stages(json_of: Any, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"stages": 4}')
    assert json_of("simulate", "--schedule", "1f1b", "--costs", str(tmp_path / "c.json"))["devices"] == 4


def test_stages_are_joined_only_where_the_sum_is_exact(run: Any, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"stages": 8, "recompute_workspace": 1}')
    call = ("simulate", "--schedule", "1f1b", "--costs", str(tmp_path / "c.json"), "--devices")
    assert run(*call, "4")[0::2] == (
        2,
        f"debubble: {tmp_path}/c.json: 'recompute_workspace' of 8 stages is not known of 4: leave it out, or give the"
        " costs of 4 stages.\n",
    )
    assert "The costs are for 8 stages, but 3 are asked for" in run(*call, "3")[2]


@pytest.mark.parametrize(
    ("options", "rest"),
    [
        (("4",), "--devices 4 makes 4: give --chunks 2.\n"),
        (("3", "--chunks", "2"), "--devices 3 --chunks 2 makes 6: give --devices that divide 8.\n"),
    ],
)
def test_plan_with_too_few_stages_suggests_chunks(
    run: Any, tmp_path: Path, options: tuple[str, ...], rest: str
) -> None:
    (tmp_path / "c.json").write_text('{"stages": 8}')
    _, _, error = run("plan", "--costs", str(tmp_path / "c.json"), "--devices", *options)
    assert error == f"debubble: {tmp_path}/c.json has the costs of 8 stages, and {rest}"


@pytest.mark.parametrize(
    ("schedule", "options", "reason", "code"),
    [
        ("gpipe", ("--memory-limit", "4"), "above its limit of 4", 0),
        ("bpipe", (), "The schedule 'bpipe' offloads, but the costs have no 'offload' time.", 2),
    ],
)
def test_infeasible_schedule_does_not_stop_the_comparison(
    run: Any, tmp_path: Path, schedule: str, options: tuple[str, ...], reason: str, code: int
) -> None:
    (tmp_path / "costs.json").write_text('{"forward": 1, "activation": 1}')
    call = ("simulate", "--schedule", f"1f1b,{schedule},zb-h1", "--costs", str(tmp_path / "costs.json"))
    ended, out, _ = run(*call, "--devices", "4", *options, "--json")
    answer = json.loads(out)
    assert [row["schedule"] for row in answer["schedules"]] == ["1f1b", "zb-h1"]
    assert reason in answer["do_not_fit"][schedule]
    assert ended == code


def test_every_schedule_that_does_not_fit_is_named(run: Any) -> None:
    call = ("simulate", "--devices", "4", "--memory-limit", "2", "--schedule")
    code, out, err = run(*call, "1f1b,gpipe")
    assert (code, out) == (1, "")
    assert [f"{name}: Device 0 runs out of memory" in err for name in ("1f1b", "gpipe")] == [True, True]
    assert run(*call, "1f1b,no-such")[0] == 2


def test_abstract_costs_out_of_memory_suggest_a_remedy(run: Any, tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text('{"activation": 1}')
    call = ("simulate", "--schedule", "1f1b", "--costs", str(tmp_path / "costs.json"), "--devices", "4")
    code, _, error = run(*call, "--memory-limit", "2")
    assert (code, error.endswith("; raise the memory limit, or take another schedule.\n")) == (1, True)


def test_binary_file_is_reported(run: Any, tmp_path: Path) -> None:
    picture = tmp_path / "t.png"
    picture.write_bytes(b"\x89PNG\xff")
    refused = {
        ("plan", str(picture), "--cluster", "2xL4"): f"{picture} is not a text file: a model config is JSON.",
        ("simulate", "--csv", str(picture)): f"The schedule file {picture} is not a text file: it must be CSV.",
        ("simulate", "--costs", str(picture), "--schedule", "1f1b", "--devices", "2"): (
            f"The costs file {picture} is not JSON: it is not a text file."
        ),
    }
    for call, sentence in refused.items():
        assert run(*call) == (2, "", f"debubble: {sentence}\n")


def test_an_option_is_for_those_schedules_that_take_it(json_of: Any) -> None:
    call = ("--devices", "4", "--micro-batches", "8", "--option", "group=4", "--json")
    rows = json_of("simulate", "--schedule", "1f1b,group-interleaved", *call)["schedules"]

    alone = json_of("simulate", "--schedule", "group-interleaved", *call)
    # Compared schedules have the same work per device.
    assert [row["step_time"] for row in rows] == [33, alone["step_time"] / 2]


def test_an_option_that_no_schedule_takes_is_refused(run: Any) -> None:
    code, _, error = run("simulate", "--schedule", "1f1b,gpipe", "--devices", "4", "--option", "group=4")

    assert code == 2
    assert "has no option 'group'" in error
