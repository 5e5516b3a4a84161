import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import debubble as db
from debubble.cli.answers import ANSWERS
from debubble.ir import InputError, Trace
from debubble.plans import Plan
from debubble.runtime.launch.failures import RunError
from debubble.runtime.launch.launcher import encode_options, launch
from debubble.runtime.launch.rank_reports import RankFailedError
from debubble.training.checkpoint import folder as checkpoint_folder
from debubble.training.checks import check
from debubble.training.memory_check import check_host_memory
from debubble.training.options import (
    TrainOptions,
    batch_remark,
    data_remark,
    frozen_remark,
    rate_remark,
    schedule_remark,
    with_settings,
)
from debubble.training.trainer import train
from tests.support.model_cases import on_cpus
from tests.support.training_cases import train_alone

pytestmark = pytest.mark.usefixtures("process_group")


def test_the_loss_falls_and_the_outcome_has_it(options: Any) -> None:
    outcome = train_alone(replace(options, steps=30))
    losses = [report.loss for report in outcome.reports]
    assert len(losses) == 30
    assert losses[0] == pytest.approx(5.55, abs=0.1)  # ln 256: the loss of an untrained model
    assert losses[-1] < 3.5
    assert outcome.as_dict()["losses"] == losses


def test_the_trace_and_the_page_of_both_timelines_are_written(options: Any, tmp_path: Path) -> None:
    train_alone(replace(options, trace=tmp_path / "trace.json", html=tmp_path / "timeline.html"))
    trace = Trace.load(tmp_path / "trace.json")
    planned = {i.op.name for i in Plan.load(options.plan).simulate().program.instructions}
    assert [step.step for step in trace.steps] == list(range(6))
    assert {event.name for event in trace.typical.events} == planned
    page = (tmp_path / "timeline.html").read_text()
    assert "Predicted" in page
    assert "Measured" in page


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_saved_model_and_adapters_are_trained_further(options: Any, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    model, adapters, more = tmp_path / "whole", tmp_path / "adapters", tmp_path / "more"
    plan = Plan.load(options.plan)
    replace(plan, options=replace(plan.options, lora=4)).save(tmp_path / "lora.json")
    lora = replace(options, plan=tmp_path / "lora.json", load=(model,), save=adapters)

    first = train_alone(replace(options, save=model)).reports
    second = train_alone(lora).reports
    third = train_alone(replace(lora, load=(model, adapters), save=more)).reports

    assert first[0].loss > second[0].loss > third[0].loss
    assert json.loads((more / "adapter_config.json").read_text())["r"] == 4


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"load": (Path("nowhere"),)}, "--load: there is no folder nowhere"),
        ({"load": (Path(__file__).parent,)}, "has no checkpoint: neither model.safetensors.index.json nor"),
        ({"steps": 0}, "--steps must be at least 1"),
        ({"learning_rate": float("nan")}, "--lr must be a number, 0 or more, not nan"),
        ({"clip": -1.0}, "--clip must be a number, 0 or more, not -1.0"),
        ({"checkpoint": Path(__file__)}, "--checkpoint: .* is a file, not a folder"),
        ({"save": Path(__file__)}, "--save: .* is a file, not a folder"),
        ({"save": Path(__file__) / "model"}, "--save: .* takes no new files"),
        ({"seed": -1}, "--seed must be 0 or more, not -1"),
        ({"dataset": "magic:data"}, "--dataset takes the place of --data and --tokenizer"),
        ({"dataset": "magic:data", "data": None}, "--dataset magic:data cannot be loaded"),
        ({"data": Path("nowhere.txt")}, "no data file or directory nowhere.txt"),
        ({"resume": True}, "--resume needs --checkpoint"),
        ({"resume": True, "checkpoint": Path("nowhere")}, "no checkpoint in nowhere"),
        ({"plan": Path("nowhere.json")}, "nowhere.json cannot be read"),
    ],
)
def test_invalid_options_are_one_sentence(options: Any, entries: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check(replace(options, **entries))


def test_unwritable_trace_is_refused_before_the_run(run: Any, options: Any) -> None:
    code, _, err = run("train", str(options.plan), "--trace", "/")
    assert code == 2
    assert "/ cannot be written: it is a folder." in err


def test_a_plan_for_larger_devices_than_here_is_refused() -> None:
    plan = db.plan(db.models["llama2-70b"], db.Cluster.parse("64xB200-192GB"), planner="merak", zero=0)
    with pytest.raises(InputError, match=r"The plan's 64 ranks need .* in all, but this machine has"):
        check_host_memory(plan)


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="two ranks have GPUs here")
@pytest.mark.parametrize(("cluster", "message"), [("2xA100-80GB", "planned for 2xA100-80GB"), ("2xCPU", None)])
def test_gpu_plan_on_a_cpu_is_noted(cluster: str, message: Any) -> None:
    plan = db.plan(db.models["llama-tiny"], db.Cluster.parse(cluster), planner="dapple", sequence_length=128)
    remark = check_host_memory(plan)
    assert remark is None if message is None else message in (remark or "")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_on_cluster": None}, "names no model to train"),
        ({"partition": "backwards"}, "does not list the units of its model in order"),
    ],
)
def test_a_plan_that_no_rank_can_run_is_refused(options: Any, changes: Any, message: str, tmp_path: Path) -> None:
    plan = Plan.load(options.plan)
    backwards = {"partition": tuple(stage[::-1] for stage in plan.partition)} if "partition" in changes else changes
    replace(plan, **backwards).save(tmp_path / "other.json")
    with pytest.raises(InputError, match=message):
        check(replace(options, plan=tmp_path / "other.json"))


def test_auto_resume_starts_or_continues_a_run(options: Any, tmp_path: Path) -> None:
    restartable = replace(options, checkpoint=tmp_path / "c", auto_resume=True, steps=2)
    first = train_alone(restartable)
    assert [r.step for r in first.reports] == [1, 2]
    assert [r.step for r in train_alone(replace(restartable, steps=3)).reports] == [3]


def rates(options: TrainOptions) -> list[float]:
    """The learning rate of each step."""
    return [report.learning_rate for report in train_alone(options).reports]


def test_adapters_on_random_weights_are_noted(options: Any, tmp_path: Path) -> None:
    plan = Plan.load(options.plan)
    adapted = replace(plan, options=replace(plan.options, lora=2))
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "adapter_config.json").write_text("{}")
    alone = replace(options, load=(tmp_path / "adapters",))
    loaded = replace(options, load=(tmp_path / "whole", tmp_path / "adapters"))
    resumed = replace(options, resume=True)
    for without in (options, alone):
        assert "random ones from the seed: give the checkpoint" in str(frozen_remark(without, adapted))
    assert [frozen_remark(o, adapted) for o in (loaded, resumed)] == [None, None]
    assert frozen_remark(options, plan) is None


def test_loaded_weights_have_a_low_default_rate(options: Any, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    fresh = replace(options, steps=2, warmup=1, learning_rate=None, save=tmp_path / "whole")
    loaded = replace(fresh, load=(tmp_path / "whole",), save=None)
    with_rate = replace(loaded, learning_rate=2e-4)
    assert [rates(o)[0] for o in (fresh, loaded, with_rate)] == [3e-3, 1e-5, 2e-4]
    assert (
        rate_remark(loaded) == "The learning rate's peak is 1e-05, as the weights are loaded: choose another with --lr."
    )
    assert [rate_remark(o) for o in (fresh, with_rate)] == [None, None]


def test_a_run_from_loaded_weights_is_resumed_at_its_rate(options: Any, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    train_alone(replace(options, steps=1, save=tmp_path / "whole"))
    loaded = replace(options, learning_rate=None, load=(tmp_path / "whole",), checkpoint=tmp_path / "c")
    train_alone(replace(loaded, steps=2))
    resumed = with_settings({}, TrainOptions(plan=options.plan, checkpoint=tmp_path / "c", resume=True))
    assert resumed.peak_rate == 1e-5


def test_other_steps_of_a_resumed_run_move_its_schedules_end(options: Any, tmp_path: Path) -> None:
    first = replace(options, steps=3, checkpoint=tmp_path / "c")
    train_alone(first)
    resumed = replace(first, resume=True)
    assert schedule_remark(replace(resumed, steps=20)) == "The cosine schedule ends at step 20 now, not at 3."
    assert [schedule_remark(o) for o in (resumed, replace(resumed, steps=20, lr_schedule="constant"))] == [None, None]
    assert schedule_remark(replace(options, steps=20)) is None


def test_changed_sequences_of_a_resumed_run_are_noted(options: Any, tmp_path: Path) -> None:
    first = replace(options, steps=3, checkpoint=tmp_path / "c")
    train_alone(first)
    plan, resumed = Plan.load(options.plan), replace(first, resume=True)
    before, tokens = plan.degrees.global_batch, plan.options.sequence_length
    twice = replace(plan, options=replace(plan.options, micro_batch_size=2 * plan.options.micro_batch_size))
    assert batch_remark(resumed, plan) is None
    now = f"A step has {2 * before} sequences of {tokens} tokens now, not {before} of {tokens}"
    assert batch_remark(resumed, twice) == f"{now}: the learning rate may have to change with it (--lr)."


def test_a_run_that_has_taken_all_its_steps_writes_its_weights(
    options: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("safetensors")
    finished = replace(options, checkpoint=tmp_path / "c")
    train_alone(replace(finished, save=tmp_path / "first"))
    saved = replace(finished, resume=True, save=tmp_path / "again")

    check(saved)
    assert train(saved) is None
    assert f"All 6 steps are taken: its weights are in {tmp_path}/again." in capsys.readouterr().err
    first, second = (next((tmp_path / name).glob("*.safetensors")) for name in ("first", "again"))
    assert first.read_bytes() == second.read_bytes()
    assert first.stat().st_mode == (tmp_path / "first" / "config.json").stat().st_mode


def test_a_folder_with_another_runs_checkpoints_is_refused(options: Any, tmp_path: Path) -> None:
    with_checkpoint = replace(options, checkpoint=tmp_path / "c")
    train_alone(with_checkpoint)
    with pytest.raises(InputError, match="holds checkpoints already"):
        check(with_checkpoint)
    for steps, taken in ((6, "all 6 steps"), (5, "6 steps, more than the 5 asked for")):
        with pytest.raises(InputError, match=f"step-000006 has taken {taken}: give more with --steps"):
            check(replace(with_checkpoint, resume=True, steps=steps))


def test_resumed_run_needs_its_data_option_again(options: Any, tmp_path: Path) -> None:
    text = tmp_path / "own.txt"
    text.write_text("a text of one's own " * 2000)
    with_checkpoint = replace(options, data=text, checkpoint=tmp_path / "c")
    train_alone(with_checkpoint)
    resumed = replace(with_checkpoint, resume=True, steps=9)
    with pytest.raises(InputError, match=f"000006 read --data {text}: give --data again, as nothing that a checkpoint"):
        check(replace(resumed, data=None))
    check(resumed)
    other = replace(resumed, data=tmp_path / "other.txt")
    assert data_remark(resumed) == f"It reads --data {text}."
    assert data_remark(other) == f"It reads --data {tmp_path}/other.txt (the run before read --data {text})."


def flipped(newest: Path) -> None:
    shard = newest / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 0x40
    shard.write_bytes(content)


DAMAGE = {
    "a flipped bit": (flipped, "the checksum of __0_0.distcp is not"),
    "no progress": (lambda p: (p / "progress.json").unlink(), "progress.json is missing"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE.keys())
def test_run_continues_from_the_newest_complete_checkpoint(
    options: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Any, message: Any
) -> None:
    folder = tmp_path / "c"
    restartable = replace(options, checkpoint=folder, save_every=3, keep=9, auto_resume=True)
    uninterrupted = train_alone(restartable)
    damage(folder / "step-000006")
    resumed = train_alone(replace(restartable, keep=1))
    assert [r.loss for r in resumed.reports] == [r.loss for r in uninterrupted.reports][3:]
    assert sorted(p.name for p in folder.glob("step-*")) == ["step-000006", "step-000006.damaged"]
    [line] = [line for line in capsys.readouterr().err.splitlines() if "damaged" in line]
    assert message in line
    assert line.endswith("It is put aside, and the run goes on from step-000003.")


def test_a_run_that_falls_back_takes_that_checkpoints_settings(options: Any, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    train_alone(replace(options, checkpoint=folder, steps=2, keep=9, clip=0.5))
    train_alone(replace(options, checkpoint=folder, steps=4, keep=9, clip=0.7, resume=True))
    flipped(folder / "step-000004")
    bare = TrainOptions(plan=options.plan, data=options.data, checkpoint=folder, auto_resume=True)
    glanced = with_settings({"steps": 3}, bare)
    assert glanced.clip == 0.7
    train_alone(glanced)
    assert checkpoint_folder.progress_of(folder / "step-000003").recipe.clip == 0.5


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_checkpoint_is_not_resumed(options: Any, tmp_path: Path, damage: Any, message: Any) -> None:
    saving = replace(options, checkpoint=tmp_path / "c", steps=2)
    train_alone(saving)
    damage(tmp_path / "c" / "step-000002")
    for resuming in (replace(saving, steps=4, resume=True), replace(saving, steps=4, auto_resume=True)):
        with pytest.raises((InputError, RunError), match=rf"step-000002 is damaged: .*{re.escape(message)}"):
            train_alone(resuming)


def test_checkpoint_without_checksums_resumes_with_a_note(
    options: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saving = replace(options, checkpoint=tmp_path / "c", steps=2)
    train_alone(saving)
    (tmp_path / "c" / "step-000002" / "manifest.json").unlink()
    train_alone(replace(saving, steps=3, resume=True))
    assert "step-000002 has no checksums: an earlier version wrote it" in capsys.readouterr().err


def test_resumed_run_reports_its_first_step(options: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saving = replace(options, checkpoint=tmp_path / "c", steps=2)
    train_alone(saving)
    train_alone(replace(saving, steps=3, resume=True))
    assert f"It continues from {tmp_path}/c/step-000002, after step 2 of 3." in capsys.readouterr().err


def arguments(options: TrainOptions, *more: str) -> list[str]:
    """Arguments of `debubble train`."""
    return [str(options.plan), "--data", str(options.data), "--warmup", "2", "--lr", "0.01", *more]


def answer_of(finished: tuple[int, str, str]) -> Any:
    """The answer of `debubble train --json`."""
    code, answer, error = finished
    assert code == 0, error
    return json.loads(answer)


def test_two_ranks_resume_a_run_of_one_rank(options: Any, train: Any, tmp_path: Path, plan_file: Any) -> None:
    one_rank = train_alone(options)
    train_alone(replace(options, checkpoint=tmp_path / "c", save_every=3, keep=9))
    checkpoint_folder.latest(tmp_path / "c").rename(tmp_path / "later")
    two = replace(options, plan=plan_file(2))
    more = ["--steps", "6", "--checkpoint", str(tmp_path / "c"), "--resume", "--json"]
    answer = answer_of(train(*arguments(two, *more)))
    assert answer["losses"] == pytest.approx([r.loss for r in one_rank.reports][3:], rel=1e-5)
    assert len(answer["peak_memory"]) == 2
    assert json.loads(msgspec.json.encode(msgspec.convert(answer, ANSWERS["train"]))) == answer


@pytest.fixture
def losses(train: Any) -> Callable[..., list[float]]:
    """The losses of `debubble train`."""
    return lambda options, *more: answer_of(train(*arguments(options, "--json", *more)))["losses"]


MIXTURE = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}


@pytest.mark.parametrize(
    ("degrees", "config"),
    [
        pytest.param({"data": 2, "zero": 2}, {}, id="states", marks=pytest.mark.slow),
        pytest.param({"data": 2, "zero": 3}, {}, id="parameters", marks=pytest.mark.slow),
        pytest.param({"tensor": 2}, {}, id="layers"),
        pytest.param({"context": 2}, {}, id="sequences", marks=pytest.mark.slow),
        pytest.param({"data": 2, "expert": 2}, MIXTURE, id="experts", marks=pytest.mark.slow),
    ],
)
def test_sharded_training_matches_one_rank_and_is_merged(
    options: Any, losses: Any, tmp_path: Path, degrees: dict[str, Any], config: dict[str, Any]
) -> None:
    """Two ranks, then the same resumed bitwise, then one rank alone with all sequences of a step."""
    plan, divided, alone, folder = Plan.load(options.plan), tmp_path / "two.json", tmp_path / "one.json", tmp_path / "c"
    assert plan.model is not None
    plan = replace(plan, model_on_cluster=on_cpus({**plan.model.config, **config}))
    gathered = plan.costs.replace(gathered=int(degrees.get("zero") == 3))
    replace(plan, costs=gathered, options=replace(plan.options, **degrees)).save(divided)
    replace(plan, options=replace(plan.options, micro_batch_size=degrees.get("data", 1))).save(alone)
    saving = ["--steps", "4", "--checkpoint", str(folder), "--save-every", "2", "--keep", "9"]
    one_rank = [r.loss for r in train_alone(replace(options, plan=alone, steps=4)).reports]
    two = losses(replace(options, plan=divided), *saving)
    assert two == pytest.approx(one_rank, rel=1e-5)
    shutil.rmtree(folder / "step-000004")
    assert losses(replace(options, plan=divided), "--resume", *saving) == two[2:]
    shutil.rmtree(folder / "step-000004")
    joined = train_alone(replace(options, plan=alone, checkpoint=folder, resume=True, steps=4))
    assert [r.loss for r in joined.reports] == pytest.approx(one_rank[2:], rel=1e-5)


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_and_leaves_its_checkpoint(
    options: Any, tmp_path: Path, plan_file: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"), prepend=os.pathsep)
    saving = replace(options, plan=plan_file(2), checkpoint=tmp_path / "c", save_every=4, steps=8)
    with pytest.raises(RankFailedError) as failure:
        launch("dying_rank", encode_options(saving), ranks=2)
    doing = r"rank 0 (is in|waits in|meets|reads) [^;]*"
    assert re.fullmatch(rf"Rank 1 was killed by SIGKILL; {doing}; the other ranks were ended\.", str(failure.value))
    assert checkpoint_folder.progress_of(checkpoint_folder.latest(tmp_path / "c")).step == 4


@pytest.mark.slow
@pytest.mark.usefixtures("forked_processes")
def test_hung_rank_is_named_with_what_its_peers_await(options: Any, plan_file: Any) -> None:
    hanging = replace(options, plan=plan_file(2), hang_timeout=2)
    with pytest.raises(RankFailedError) as failure:
        launch("tests.support.hanging_rank", encode_options(hanging), ranks=2)
    assert str(failure.value) == (
        "The run hangs, nothing has moved for 2 s: rank 1 runs the training loop and does not end; rank 0 meets the"
        " other ranks."
    )


def losses_of(options: TrainOptions, **entries: Any) -> list[float]:
    return [report.loss for report in train_alone(replace(options, **entries)).reports]


@pytest.mark.parametrize("interval", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_any_checkpoint_of_a_run_is_resumed_bit_for_bit(options: TrainOptions, tmp_path: Path, interval: int) -> None:
    uninterrupted = losses_of(options, steps=9, checkpoint=tmp_path / "c", save_every=interval, keep=99)
    saved = sorted((tmp_path / "c").glob("step-*"))
    assert [int(p.name[5:]) for p in saved] == [*range(interval, 9, interval), 9]
    for checkpoint in saved[:-1]:
        alone = tmp_path / f"resumed-{checkpoint.name}"
        shutil.copytree(checkpoint, alone / checkpoint.name)
        resumed = losses_of(options, steps=9, checkpoint=alone, save_every=99, resume=True)
        assert resumed == uninterrupted[int(checkpoint.name[5:]) :]


def test_the_checkpoint_at_a_runs_end_is_resumed(options: TrainOptions, tmp_path: Path) -> None:
    constant = replace(options, lr_schedule="constant")
    losses_of(constant, checkpoint=tmp_path / "c", steps=4)
    assert losses_of(constant, checkpoint=tmp_path / "c", resume=True) == losses_of(constant)[4:]
