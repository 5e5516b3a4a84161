"""The `plan` and `simulate` commands as a user calls them: output and exit codes."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import debubble as db
from debubble.formatting import days_words, read_count
from debubble.frameworks.torch.export import to_csv
from debubble.ir import Program, Schedule, StageCosts
from debubble.ir.lowering.lower import lower
from debubble.plans import Plan


def test_simulate_prints_the_closed_form_of_1f1b(json_of: Any) -> None:
    answer = json_of("simulate", "--schedule", "1f1b", "--devices", "4", "--micro-batches", "8")
    assert (answer["makespan"], answer["span"], answer["peak_memory"]) == (33, 33, [4, 3, 2, 1])
    assert (answer["devices"], answer["operations"]) == (4, 2 * 4 * 8 + 2 * 2 * 3 * 8)
    assert (answer["fullest"], answer["peak_times"]) == (0, [3, 3, 3, 3])


def test_simulate_reads_a_costs_file(json_of: Any, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text('{"stages": 2, "forward": [1, 2], "backward_input": 1, "backward_weight": 1, "memory_limit": 9}')
    call = ("simulate", "--schedule", "gpipe", "--costs", str(file), "--devices", "2", "--micro-batches", "3")
    assert json_of(*call)["makespan"] == 1 + 3 * 2 + 3 * 2 + 2


def test_simulate_steps_the_last_chunks_on_the_host(json_of: Any, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text('{"stages": 2, "gradient_offload": 1, "host_step": 5, "parameter_load": 1}')
    call = ("simulate", "--schedule", "1f1b", "--costs", str(file), "--devices", "2", "--micro-batches", "3")
    plain, hosted = (json_of(*call, *more) for more in ((), ("--host-chunks", "1")))
    # Parameters arrive before the first forward; gradients leave and the host steps after the last backward.
    assert plain["makespan"] == 12
    assert hosted["makespan"] == 1 + 12 + 1 + 5


def test_simulating_full_recomputation_needs_less_memory(run: Any) -> None:
    common = ("simulate", "--schedule", "1f1b", "llama-tiny", "--cluster", "4xA100-80GB", "--sequence-length", "128")
    plain = json.loads(run(*common, "--json")[1])
    full = json.loads(run(*common, "--recompute", "full", "--json")[1])
    assert max(full["peak_memory"]) < max(plain["peak_memory"])
    assert full["makespan"] > plain["makespan"]


def test_simulate_writes_the_plan_of_a_model_by_a_schedule(run: Any, tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.json")
    common = ("llama-tiny", "--cluster", "4xA100-80GB", "--sequence-length", "128", "--json")

    code, out, _ = run("simulate", "--schedule", "zb-h1", *common, "-o", plan)

    assert code == 0
    assert json.loads(run("simulate", plan, "--json")[1])["step_time"] == json.loads(out)["step_time"]
    assert Plan.load(Path(plan)).schedule.name == "zb-h1"


def test_custom_order_of_a_model_is_simulated_and_written(run: Any, tmp_path: Path) -> None:
    order = tmp_path / "mine.csv"
    order.write_text(to_csv(db.schedules["dualpipe-v"](devices=2, micro_batches=6)))
    call = ("simulate", "llama-tiny", "--cluster", "2xCPU", "--sequence-length", "64", "--recompute", "full")
    by_name, by_hand = tmp_path / "named.json", tmp_path / "own.json"
    assert run(*call, "--schedule", "dualpipe-v", "--micro-batches", "6", "-o", str(by_name))[0] == 0
    assert run(*call, "--csv", str(order), "-o", str(by_hand))[0] == 0
    named, ordered = Plan.load(by_name), Plan.load(by_hand)
    assert ordered.schedule == replace(named.schedule, name="mine")
    assert (ordered.partition, ordered.costs) == (named.partition, named.costs)


def test_an_order_of_other_devices_than_the_models_is_refused(run: Any, tmp_path: Path) -> None:
    order = tmp_path / "mine.csv"
    order.write_text(to_csv(db.schedules["1f1b"](devices=2, micro_batches=4)))
    code, _, error = run("simulate", "llama-tiny", "--cluster", "4xCPU", "--csv", str(order))
    assert (code, error) == (
        2,
        "debubble: The order 'mine' has 2 devices, and the pipeline has 4: give --pipeline 2, and a --cluster with as"
        " many devices as all degrees make.\n",
    )


def test_plan_writes_a_file_that_simulate_reads(run: Any, tmp_path: Path) -> None:
    costs, file = tmp_path / "costs.json", tmp_path / "plan.json"
    costs.write_text('{"stages": 4, "memory_limit": 3}')
    code, out, _ = run(
        "plan", "--costs", str(costs), "--devices", "4", "--micro-batches", "8", "--planner", "merak", "-o", str(file),
        "--json",
    )  # fmt: skip
    planned = json.loads(out)
    simulated = json.loads(run("simulate", str(file), "--json")[1])
    assert code == 0
    assert planned["makespan"] == simulated["makespan"]
    assert max(planned["peak_memory"]) <= 3
    assert planned["recompute"] == ["full", "none", "none", "none"]
    assert planned["partition"][0] == [{"type": "stage", "layer": 0, "strategy": "full"}]
    assert planned["lower_bound"] <= planned["makespan"]


def test_a_models_plan_is_simulated_under_a_limit_in_bytes(run: Any, tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.json")
    call = ("plan", "llama-tiny", "--cluster", "2xA100-80GB", "--planner", "dapple", "--micro-batches", "4")
    assert run(*call, "-o", plan)[2].endswith("plan.json: `debubble train`, `rehearse`, `show` and `export` take it.\n")
    code, _, err = run("simulate", plan, "--memory-limit", "1MiB")
    assert code == 1
    assert "above its limit of 1.00 MiB" in err


def test_plan_partitions_a_units_file(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "units.json"
    unit = {
        "type": "dense", "count": 8, "forward": 1, "backward_input": 1, "backward_weight": 1, "static": 2,
        "strategies": {"none": {"activation": 4}, "full": {"activation": 1, "recompute": 1}},
    }  # fmt: skip
    file.write_text(json.dumps({"units": [unit], "memory_limit": 30}))
    arguments = ("plan", "--units", str(file), "--devices", "4", "--micro-batches", "8", "--planner", "merak", "--json")
    code, out, _ = run(*arguments)
    answer = json.loads(out)
    assert code == 0
    assert [len(stage) for stage in answer["partition"]] == [2, 2, 2, 2]
    assert max(answer["peak_memory"]) <= 30


def test_measured_units_take_a_memory_limit_as_a_size(run: Any, tmp_path: Path) -> None:
    unit = {
        "type": "dense", "count": 4, "forward": 1, "backward_input": 1, "backward_weight": 1, "static": 0,
        "strategies": {"none": {"activation": 2**20}},
    }  # fmt: skip
    file = tmp_path / "units.json"
    file.write_text(json.dumps({"units": [unit], "seconds": True}))
    call = ("plan", "--units", str(file), "--devices", "2", "--micro-batches", "4", "--planner", "dapple", "--json")
    code, out, _ = run(*call, "--memory-limit", "1GiB")

    assert code == 0
    assert max(json.loads(out)["peak_memory"]) <= 2**30


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("plan llama2-12b --cluster 8xA100-80GB", "There is no model or file 'llama2-12b'"),
        ("plan llama2-13b", "Give the devices with --cluster"),
        ("plan llama2-13b --cluster 8xA100-80GB --micro-batches 0", "--micro-batches must be at least 1"),
        ("plan llama2-13b --cluster 8xA100-80GB --planner scoep", "did you mean 'scope'?"),
        ("plan llama2-13b --cluster 8xA100-80GB --effort nan", "must be a number of seconds"),
        ("plan llama2-13b --cluster 8xA100-80GB --seed 99999999999999999999", "from 0 to 2147483647, not 9999"),
        ("fits llama2-13b --cluster 8xA100-80GB --global-batch 99999999999999999999", "up to 1,000,000,000 sequences"),
        ("plan llama2-13b --cluster 8xA100-80GB -o /", "/ cannot be written: it is a folder."),
        ("plan llama2-13b --cluster 8xA100-80GB -o /no-folder/plan.json",
         "/no-folder/plan.json cannot be written: there is no folder /no-folder; make it first."),
        ("plan llama2-13b --cluster 8xA100-80GB --html /dev/null/plan.html",
         "/dev/null/plan.html cannot be written: /dev/null takes no new files."),
        ("plan llama2-70b --cluster 64xH100-80GB --tensor 8 --pipeline 5",
         "--tensor 8 --pipeline 5 use 40 of 64 devices: --pipeline 8 or --pipeline 4 --data 2 uses all; or"
         " give a cluster of 40."),
        ("simulate llama2-7b --schedule 1f1b --cluster 8xH100-80GB --pipeline 4",
         "--pipeline 4 uses 4 of 8 devices: --pipeline 8 or --data 2 uses all; or give a cluster of 4."),
        ("plan llama2-7b --cluster 8xH100-80GB --tensor 3 --pipeline 2",
         "--tensor 3 --pipeline 2 use 6 of 8 devices: choose degrees whose product is 8; or give a cluster of 6."),
        ("plan llama3.2-1b --cluster 64xH100-80GB --micro-batches 8",
         "34 model units cannot fill 64 stages; use fewer pipeline devices or chunks."),
        ("plan llama-tiny --cluster 8xA100-80GB --expert 2", "The model has no experts: leave out --expert"),
        ("fits llama-tiny --cluster 8xA100-80GB --expert 2", "The model has no experts: leave out --expert"),
        ("plan", "Give a MODEL with --cluster"),
        ("plan --costs c.json --devices 2 --global-batch 8", "of a MODEL on a --cluster"),
        ("plan --costs c.json --devices 2 --tensor 2", "--tensor is an option of a MODEL"),
        ("plan llama2-13b --cluster 8xA100-80GB --devices 7", "--devices is for --costs and --units"),
        ("plan llama2-13b --cluster 8xA100-80GB --global-batch 8 --data 3",
         "--data 3 cannot divide 8 devices: give degrees whose product divides 8."),
        ("plan --costs missing.json --devices 4", "missing.json cannot be read"),
        ("simulate", "Give a plan file, or a schedule"),
        ("simulate --schedule 1f1c --devices 4", "did you mean '1f1b'?"),
        ("simulate --schedule 1f1b", "--devices P"),
        ("simulate --schedule 1f1b --devices 4 -o p.json", "-o writes the plan of a MODEL by one"),
        ("plan llama-tiny --cluster 2xA100-80GB --memory-limit 400GiB", "is more than the 80 GiB that"),
        ("fits llama-tiny --cluster 2xA100-80GB --memory-limit 400GiB", "is more than the 80 GiB that"),
        ("plan llama2-7b --cluster 4xA100-80GB --tokens 0", "--tokens must be a positive number"),
        ("plan llama2-7b --cluster 4xA100-80GB --tokens nan", "--tokens must be a positive number"),
        ("plan --units units.json --devices 2 --fastest", "--fastest"),
        ("simulate --schedule dualpipe --devices 4",
         "no schedule 'dualpipe', which keeps two copies of the parameters; 'dualpipe-v' needs one"),
        ("show plan.json --png plan.jpg", "plan.jpg: that is no name of PNG; write plan.png.\n"),
        ("import pyproject.toml", "pyproject.toml is a file: give the framework before it, one of automodel, "),
        ("import axolotl config.yaml --cluster 8xA100-80GB",
         "There is no framework 'axolotl', which starts DeepSpeed or FSDP; take 'deepspeed'"),
        ("plan llama2-13b --cluster 8xA100-80GB --global-batch 32 --robust", "leave out the global batch"),
        ("plan llama2-13b --cluster 8xA100-80GB -o /dev/null", "/dev/null cannot be written: it is no"),
        ("reproduce obscura --pictures /dev/null", "--pictures: /dev/null is a file, not a folder."),
        ("rehearse plan.json --steps 0", "--steps must be at least 1, not 0."),
        ("rehearse plan.json --scale 0", "--scale must be above 0, not 0."),
        ("train plan.json --steps 0", "--steps must be at least 1, not 0."),
        ("train plan.json --lr -1", "--lr must be at least 0, not -1."),
        ("train plan.json --resume", "--resume needs --checkpoint with the folder that holds the checkpoint."),
        ("train plan.json --data nofile", "--data: nofile cannot be read: No such file or directory."),
        ("profile llama-tiny --repetitions 0", "--repetitions must be at least 1, not 0."),
        ("export plan.json --to torchtitan --output=", "--output is empty: give a path, or leave --output out."),
        ("rehearse missing.json --trace /", "/ cannot be written: it is a folder."),
        ("simulate --csv missing.csv", "missing.csv cannot be read: No such file or directory."),
        ("simulate plan.json --micro-batches 3", "Leave --micro-batches out: a plan file says all of its step"),
        ("simulate --csv missing.csv --schedule 1f1b", "The schedule file missing.csv cannot be read"),
        ("simulate --csv missing.csv --devices 4", "Leave --devices out: the CSV says the order of all operations."),
        ("simulate llama-tiny --csv missing.csv", "The schedule file missing.csv cannot be read"),
        ("simulate --schedule 1f1b --devices 4 --recompute full", "--recompute is an option of a MODEL"),
        ("simulate --schedule 1f1b --devices 2 --option magic=1", "has no option 'magic'"),
        ("simulate --schedule 1f1b --devices 2 --chunks 3", "has no option 'chunks'"),
        ("simulate --schedule chronos-recomp --devices 4 --option rho=abc",
         "The option 'rho' of 'chronos-recomp' is 'abc'; it must be a number."),
        ("simulate --schedule zb --devices 4 --option objective=makespam",
         "The option 'objective' of 'zb' is 'makespam'; it must be makespan or span."),
        ("simulate --schedule zb --devices 4 --option steps=-4",
         "The option 'steps' of 'zb' is -4; it must not be negative."),
        ("simulate --schedule 1f1b --devices 1000000000", "are more than the 65536"),
        ("simulate --schedule 1f1b --devices -2", "A pipeline needs at least one device, not -2."),
        ("simulate --schedule 1f1b --devices 4 --micro-batches 1000000000",
         "4000000000 pairs of stage and micro-batch are more than the 524288 that debubble orders"),
    ],
)  # fmt: skip
def test_wrong_calls_end_with_one_sentence_and_exit_2(run: Any, call: str, message: str) -> None:
    code, out, err = run(*call.split())
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_post_validation_chooses_the_schedule_by_its_span(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    costs = {
        "forward": [3, 2, 1, 3], "backward_input": [3, 4, 3, 3], "backward_weight": [1, 1, 4, 4], "activation": 2,
        "activation_after_input": 1, "offload": 3, "memory_limit": 5,
    }  # fmt: skip
    file.write_text(json.dumps(costs))
    call = ("simulate", "--schedule", "adaoffload", "--costs", str(file), "--devices", "4", "--micro-batches", "3")
    plain, validated = (json.loads(run(*call, "--json", *more)[1]) for more in ((), ("--post-validation",)))
    assert (plain["makespan"], plain["span"]) == (36, 36)
    assert (validated["makespan"], validated["span"], validated["step_time"]) == (39, 35, 35)


def test_a_limit_that_nothing_meets_ends_with_exit_1(run: Any) -> None:
    code, _, err = run("simulate", "--schedule", "1f1b", "--devices", "4", "--memory-limit", "2")
    assert code == 1
    assert "its peak would be 4, above its limit of 2" in err


@pytest.mark.parametrize(
    ("call", "code", "kind"),
    [
        ("simulate --schedule 1f1b --devices 4 --memory-limit 2 --json", 1, "OutOfMemoryError"),
        ("plan llama-tiny --cluster 2xCPU --json --json-stream", 2, "InputError"),
        ("plan no-such-model --cluster 2xCPU --json-stream", 2, "InputError"),
    ],
)
def test_errors_are_json_too_where_json_was_asked_for(run: Any, call: str, code: int, kind: str) -> None:
    ended, out, _ = run(*call.split())
    assert (ended, json.loads(out)["kind"]) == (code, kind)


@pytest.mark.slow
def test_report_without_a_fitting_plan_suggests_changes(run: Any, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    code, _, err = run(
        "plan", "llama3.2-1b", "--cluster", "2xL4", "--memory-limit", "3GiB", "--micro-batches", "2",
        "--sequence-length", "512", "--html", str(page),
    )  # fmt: skip

    assert code == 1
    assert "The report is in" in err
    text = page.read_text()
    questions = re.findall(r"<h2>(.*?[?])</h2>", text)
    assert questions == ["Does it fit?", "Why not?", "What would help?"]
    assert "--cluster</span> 8xL4-24GB" in text
    assert "debubble plan llama3.2-1b" in text


def test_a_global_batch_searches_the_degrees(run: Any) -> None:
    code, out, _ = run(
        "plan", "llama-tiny", "--cluster", "4xA100-80GB", "--global-batch", "8", "--sequence-length", "128",
        "--data", "2", "--planner", "dapple", "--json",
    )  # fmt: skip
    answer = json.loads(out)
    assert code == 0
    first = answer["configurations"][0]
    assert first["degrees"]["data"] == 2
    assert first["degrees"]["data"] * first["degrees"]["micro_batch_size"] * first["degrees"]["micro_batches"] == 8
    assert first["step_time"] == answer["step_time"]
    assert first["memory"].keys() == {"weights", "gradients", "optimizer", "activations", "workspace"}
    assert answer["search"]["legal"] >= len(answer["configurations"])


def test_the_next_command_names_the_file_that_was_written(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call = ("plan", "llama-tiny", "--cluster", "2xA100-80GB", "--micro-batches", "4", "--planner", "dapple")

    assert "Next         -o plan.json, then debubble train plan.json · " in run(*call)[1]
    assert "Next         debubble train mine.json · " in run(*call, "-o", "mine.json")[1]


def test_plan_for_debubble_only_suggests_for(run: Any) -> None:
    call = ("plan", "llama-tiny", "--cluster", "2xA100-80GB", "--micro-batches", "4")
    named = "--for megatron plans what it runs"

    assert named in " ".join(run(*call, "--planner", "joint", "--effort", "0.1", "--details")[1].split())
    assert named not in " ".join(run(*call, "--planner", "dapple", "--details")[1].split())


def test_export_losses_are_wrapped(run: Any, tmp_path: Path) -> None:
    file = str(tmp_path / "plan.json")
    run("plan", "llama-tiny", "--cluster", "2xA100-80GB", "--planner", "dapple", "-o", file)
    _, out, _ = run("export", file, "--to", "deepspeed", "-o", str(tmp_path / "out"))
    reported = out.split("cannot express:\n")[1].splitlines()
    assert reported[0].startswith("  - ")
    assert max(map(len, reported)) <= 80


@pytest.mark.parametrize(("text", "count"), [("300B", 3e11), ("1.5T", 1.5e12), ("2e9", 2e9), ("7m", 7e6), ("12", 12)])
def test_counts_are_read_with_their_letters(text: str, count: float) -> None:
    assert read_count(text, "--tokens") == count


@pytest.mark.parametrize("text", ["", "B", "many", "-1T", "nan", "inf"])
def test_counts_must_be_positive(text: str) -> None:
    with pytest.raises(db.InputError, match="--tokens must be a positive number, such as 300B"):
        read_count(text, "--tokens")


def test_show_keeps_costs_of_other_frameworks(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    call = ("llama-tiny", "--cluster", "2xA100-80GB", "--micro-batches", "4", "--planner", "joint", "--effort", "0.1")
    planned, shown = run("plan", *call, "-o", str(file))[1], run("show", str(file))[1]
    assert "with these degrees: " in " ".join(planned.split())
    assert shown == planned


def test_the_answer_of_a_model_is_explained(run: Any) -> None:
    arguments = (
        "plan", "llama2-7b", "--cluster", "4xA100-80GB", "--micro-batches", "8", "--planner", "dapple",
        "--tokens", "1e9",
    )  # fmt: skip
    code, out, _ = run(*arguments, "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["schema"] == 2
    assert answer["degrees"]["pipeline"] == 4
    assert answer["tokens_per_second"] == pytest.approx(8 * 4096 / answer["step_time"])
    assert answer["days"] == pytest.approx(1e9 / answer["tokens_per_second"] / 86400)

    code, out, _ = run(*arguments)
    assert len(out.splitlines()) <= 24
    words = " ".join(out.split())
    assert "tokens/s" in words
    assert f"{days_words(answer['days'])} for 1 billion tokens · {24 * 4 * answer['days']:,.0f} GPU-hours" in words
    step, interval = answer["step_time"], answer["accuracy"]["step"]
    low, high = (days_words(answer["days"] * interval[end] / step) for end in ("low", "high"))
    assert f"{low} to {high} for these tokens" in words
    match = re.search(r"GPU (\d), fullest at ([\d.]+) ms, in GiB: weights", words)
    assert match is not None
    assert int(match[1]) == answer["fullest"]
    assert float(match[2]) == pytest.approx(1e3 * answer["peak_times"][answer["fullest"]], rel=1e-3)
    assert "shorter with" in words
    assert "no plan with these degrees takes less than" in words
    assert "--details" in words
    assert "Share of the pipeline's time" not in out


@pytest.mark.parametrize(
    ("family", "remark"),
    [
        ("olmo2", "'olmo2' is priced as a Llama of its sizes"),
        ("mine", "does not know 'mine' and takes it for a Llama of its sizes, with 0.00 B"),
    ],
)
def test_unknown_family_is_planned_in_full_layers(family: str, remark: str, json_of: Any, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 96}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": family, "vocab_size": 256, **sizes}))
    call = (str(config), "--cluster", "2xA100-80GB", "--sequence-length", "64")
    planned = json_of("plan", *call, "--micro-batches", "4", "--planner", "dapple")

    units = [unit["type"] for stage in planned["partition"] for unit in stage]
    assert units == ["embedding", *["layer"] * 4, "head"]
    assert [remark in answered["remarks"][0] for answered in (planned, json_of("fits", *call))] == [True, True]


def test_plan_records_its_call_and_writes_the_report(run: Any, tmp_path: Path) -> None:
    plan, page = tmp_path / "plan.json", tmp_path / "plan.html"
    call = ("plan", "llama-tiny", "--cluster", "2xA100-80GB", "--planner", "dapple", "-o", str(plan))

    code, _, log = run(*call, "--html", str(page))

    assert code == 0
    assert f"The report is in {page}." in log.replace("\n", "")
    assert json.loads(plan.read_text())["origin"]["command"] == f"debubble {' '.join(call)} --html {page}"
    assert f"debubble {' '.join(call)} --html {page}" in page.read_text()


def test_robust_plans_report_their_degradation(run: Any, tmp_path: Path) -> None:
    file, made = tmp_path / "costs.json", tmp_path / "plan.json"
    file.write_text(json.dumps({"stages": 2, "forward": 1, "communication": 0.5}))
    call = ["plan", "--costs", str(file), "--devices", "2", "--micro-batches", "4", "--planner", "dapple", "--robust"]
    answer = json.loads(run(*call, "--json")[1])
    judged = answer["robustness"]
    assert judged == answer["candidates"][0]["robustness"]
    assert judged["worst"] > judged["expected"] > answer["step_time"] == 17
    assert "one device 10% slower" in " ".join(run(*call, "-o", str(made))[1].split())
    saved = Plan.load(made).robustness
    assert saved is not None
    assert asdict(saved) == judged


def test_plan_lowers_its_answer_once(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lowered: list[Schedule] = []

    def counted(schedule: Schedule, costs: StageCosts) -> Program:
        lowered.append(schedule)
        return lower(schedule, costs)

    monkeypatch.setattr("debubble.simulator.engine.lower", counted)
    file = tmp_path / "plan.json"
    words = ("llama-tiny", "--cluster", "2xA100-80GB", "--micro-batches", "8", "--details", "-o", str(file))
    code, _, _ = run("plan", *words, "--planner", "adapipe", "--html", str(tmp_path / "plan.html"))
    assert code == 0
    of_command = tuple(lowered)
    answer = Plan.load(file).schedule
    assert sum(lowered.orders == answer.orders and lowered.name == answer.name for lowered in of_command) == 1


def test_plan_without_an_output_file_goes_to_the_cache(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _, out, err = run(
        "plan", "llama-tiny", "--cluster", "2xCPU", "--micro-batches", "2", "--planner", "dapple", "--json"
    )
    cached = tmp_path / "debubble/plans/last.json"
    assert Plan.load(cached).simulate().makespan == pytest.approx(json.loads(out)["makespan"])
    assert f"The plan is in {cached}" in err


def test_stream_has_a_line_per_better_plan_and_the_answer(run: Any) -> None:
    words = ("plan", "llama-tiny", "--cluster", "2xCPU", "--micro-batches", "2", "--planner", "adapipe")
    _, out, _ = run(*words, "--json-stream")
    *plans, answer = map(json.loads, out.splitlines())
    assert [line["event"] for line in plans] == ["plan"]
    assert plans[0].keys() == {"schema", "event", "seconds", "planner", "schedule", "step_time", "gap"}
    assert answer["event"] == "answer"
    assert answer["step_time"] == plans[0]["step_time"]


@pytest.mark.slow
def test_several_schedules_are_compared_and_drawn(run: Any, tmp_path: Path) -> None:
    page, png = tmp_path / "all.html", tmp_path / "all.png"
    code, out, _ = run(
        "simulate", "--schedule", "gpipe,1f1b, zb-h1", "--devices", "4", "--html", str(page), "--png", str(png)
    )  # fmt: skip
    assert code == 0
    assert [line.split()[:2] for line in out.splitlines() if line.strip() and "%" in line] == [
        ["gpipe", "33"], ["1f1b", "33"], ["zb-h1", "27"],
    ]  # fmt: skip
    assert "zb-h1" in page.read_text()
    assert png.read_bytes().startswith(b"\x89PNG")


def test_fits_names_a_framework_that_gathers_less(run: Any) -> None:
    fsdp = ("--pipeline", "1", "--data", "8", "--zero", "3", "--global-batch", "64")
    code, out, _ = run("fits", "qwen2.5-14b", "--cluster", "8xA100-40GB", *fsdp)
    assert code == 1
    assert "With --for torchtitan 1 of 1 choices fits, as --data 8 --zero 3:" in " ".join(out.split())


@pytest.mark.slow
def test_screen_shows_the_gain_of_the_fastest_plan(run: Any) -> None:
    tight = ("llama3.1-8b", "--cluster", "4xH100-80GB", "--sequence-length", "4096", "--for", "megatron")
    code, out, _ = run("plan", *tight, "--global-batch", "32", "--effort", "0.2")
    assert code == 0
    assert re.search(
        r"Faster +1\.\d% less time with pipeline 2, .* offload · --fastest takes it", " ".join(out.split())
    )
    assert re.search(r"The first \(1\.\d% slower\) is taken: within 2% of the fastest", " ".join(out.split()))


def test_fastest_option_takes_the_fastest_plan(run: Any) -> None:
    """On CPUs a plan without levers is recommended at any cost, as hosts are the same cores."""
    call = ("plan", "llama-tiny", "--cluster", "2xCPU", "--micro-batches", "4", "--sequence-length", "128",
            "--dtype", "fp32", "--effort", "0.5", "--fastest")  # fmt: skip
    plain, fastest = (" ".join(run(*arguments)[1].split()) for arguments in (call[:-1], call))

    assert "slower than with recomputation, offload or steps on hosts · it wins within 1% · " in plain
    assert "--fastest takes the other" in plain
    assert "Offload" in fastest
    assert "--fastest" not in fastest


@pytest.mark.slow
def test_negligible_gain_of_the_fastest_plan_is_not_shown(run: Any) -> None:
    code, out, _ = run("plan", "llama-tiny", "--cluster", "8xA100-80GB", "--global-batch", "64", "--effort", "0.2")
    assert code == 0
    assert "Faster" not in out


@pytest.mark.parametrize(
    ("cluster", "fits"),
    [
        ("8xA100-40GB", "on 8 x A100-40GB likely fits:"),
        pytest.param("8xH100-80GB", "on 8 x H100-80GB fits:", marks=pytest.mark.slow),
    ],
)
def test_a_plan_likely_fits_where_runs_like_it_took_more(run: Any, cluster: str, fits: str) -> None:
    _, out, _ = run("plan", "llama2-13b", "--cluster", cluster, "--micro-batches", "16", "--planner", "adapipe")

    assert fits in out
    assert ("--memory-limit " in out) == ("likely" in fits)


def test_cpus_are_called_devices(run: Any) -> None:
    _, out, _ = run(
        "plan", "llama-tiny", "--cluster", "2xCPU", "--micro-batches", "4", "--sequence-length", "128", "--dtype",
        "fp32", "--planner", "dapple",
    )  # fmt: skip

    assert " per device)\n" in out
    assert "Device 0, fullest at" in out
    assert "GPU" not in out


def test_unrunnable_plan_gets_no_run_commands(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("debubble.views.plan_screen.plan_runs_in", lambda _: ())
    monkeypatch.setattr("debubble.planners.analysis.nearest_plans.plan_runs_in", lambda _: ())
    _, out, err = run("plan", "llama-tiny", "--cluster", "2xL4", "--planner", "dapple")

    assert "--for debubble plans what it runs" in out
    assert "debubble show plan.json" in out
    assert err.endswith(": `show` and `compare` take it.\n")


@pytest.mark.parametrize(("framework", "title"), [("megatron-lm", "Megatron-LM"), ("deepspeed", "DeepSpeed")])
def test_answer_names_the_framework_of_the_kernels(run: Any, framework: str, title: str) -> None:
    _, out, _ = run("plan", "llama-tiny", "--cluster", "2xL4", "--planner", "dapple", "--framework", framework)

    assert f", {title}'s kernels" in " ".join(out.split())


def test_the_answer_fits_a_screen_of_24_lines(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    call = ("plan", "llama2-13b", "--cluster", "8xA100-40GB", "--micro-batches", "16", "--effort", "0.2")
    lines, detailed = run(*call)[1].splitlines(), run(*call, "--details")[1]

    assert len(lines) <= 24
    assert "narrows it" in " ".join(detailed.split())
    assert "narrows it" not in " ".join(lines)


def test_plan_shows_its_host_memory(run: Any, json_of: Any) -> None:
    call = ("plan", "llama3-8b", "--cluster", "4xL40S-48GB", "--planner", "chronos", "--effort", "0.1")
    words = " ".join(run(*call, "--details")[1].split())
    [largest] = re.findall(r"([0-9.]+) GiB of host memory per GPU, of [0-9.]+ GiB assumed", words)

    assert re.search(r"[0-9.]+ GiB in all", words)
    assert float(largest) == pytest.approx(max(json_of(*call)["host_memory"]) / 2**30, abs=0.01)


def test_model_that_does_not_fit_suggests_recomputation(run: Any) -> None:
    code, _, error = run(
        "simulate", "qwen2.5-7b", "--schedule", "1f1b", "--cluster", "8xA100-40GB", "--micro-batches", "32"
    )
    assert code == 1
    assert error.endswith("above its limit of 36.00 GiB; --recompute selective fits.\n")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--deadline", "-3"), "The deadline must be a number of seconds above 0, not -3."),
        (
            ("--memory-limit", "0.4"),
            "of 0.4 bytes holds nothing; give a unit, such as 72GiB, or of a device a share, such",
        ),
    ],
)
def test_zero_limit_is_refused(run: Any, options: tuple[str, str], sentence: str) -> None:
    code, _, error = run("plan", "llama-tiny", "--cluster", "2xL40S-48GB", *options)

    assert code == 2
    assert sentence in error
