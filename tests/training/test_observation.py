"""Reports of a run during training and at its end."""

import math
import re
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console

import debubble as db
from debubble.costs.flops import Utilization, flops_per_token
from debubble.ir import InputError, RunOptions
from debubble.ir.trace import TraceEvent
from debubble.runtime.steps.measurements import AllocatorPeaks
from debubble.training.checks import check
from debubble.training.monitoring.progress import DeviceWork, StepReport, bubble_fraction, display
from debubble.training.monitoring.report import TrainingSummary
from debubble.training.options import TrainOptions
from tests.support.training_cases import train_alone

REPORT = StepReport(
    step=3, loss=2.5, gradient_norm=1.25, learning_rate=0.1, seconds=2.0, tokens_per_second=1000,
    peak_memory=(2**20, 2**21), busy=(1.0, 1.5), mfu=0.4, bubble_fraction=0.125,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("process_group")


def test_the_bubble_is_that_of_the_simulated_timeline() -> None:
    costs = db.StageCosts.of(stages=2, communication=1)
    timeline = db.simulate(db.schedules["1f1b"](devices=2, micro_batches=4), costs)
    events = [TraceEvent(o.name, o.device, o.lane, float(o.start), float(o.end)) for o in timeline.operations]
    devices = [DeviceWork.from_events([e for e in events if e.device == device]) for device in range(2)]
    assert bubble_fraction(devices) == pytest.approx(timeline.bubble_fraction)


def test_flops_per_token_count_matrices_and_attention() -> None:
    model = db.models["llama2-7b"]
    matrices = model.parameters - model.vocab * model.hidden
    attention = 32 * 4 * (4096 / 2) * 4096
    assert flops_per_token(model, 4096) == pytest.approx(6 * matrices + 3 * attention)
    adapters = model.trained_parameters(8)
    assert flops_per_token(model, 4096, lora=8) == pytest.approx(4 * matrices + 2 * adapters + 3 * attention)


def test_utilization_is_relative_to_the_peak_of_all_devices() -> None:
    model, cluster = db.models["llama-tiny"], db.Cluster.parse("2xA100-80GB")
    utilization = Utilization.of_run(model, cluster, RunOptions(sequence_length=512), devices=2)
    assert utilization.peak == 2 * 312e12
    assert utilization.mfu(1e6) == pytest.approx(1e6 * flops_per_token(model, 512) / (2 * 312e12))
    options = RunOptions(sequence_length=512, dtype="fp32")
    assert Utilization.of_run(model, db.Cluster.parse("2xCPU"), options, devices=2).mfu(1e6) is None


def test_the_line_of_a_step_has_all_its_figures() -> None:
    assert str(REPORT) == "loss 2.500   norm 1.25   1,000 tokens/s   MFU 40.0%   bubble 12%   peak 2.00 MiB"


@pytest.mark.parametrize(("steps", "width", "words"), [
    (20, 80, "loss 2.500   1,234,567 tokens/s   bubble 12%   peak 70.12 GiB"),
    (20_000, 80, "loss 2.500   1,234,567 tokens/s   peak 70.12 GiB"),
    (20, 120, "loss 2.500   norm 1.25   1,234,567 tokens/s   MFU 40.0%   bubble 12%   peak 70.12 GiB"),
])  # fmt: skip
def test_the_live_line_fits_the_terminal_with_its_memory(steps: int, width: int, words: str) -> None:
    terminal = StringIO()
    console = Console(file=terminal, force_terminal=True, width=width, color_system=None, legacy_windows=False)
    report = replace(REPORT, tokens_per_second=1_234_567, peak_memory=(70.12 * 2**30,))
    with display(steps=steps, done=0, console=console) as show:
        show(report)
    lines = re.split(r"[\n\r]", re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", terminal.getvalue()))
    assert f" {words} " in f" {lines[-2]} "
    assert len(lines[-2].rstrip()) <= width


def outcome(seconds: list[float]) -> TrainingSummary:
    reports = [replace(REPORT, step=i, seconds=s) for i, s in enumerate(seconds)]
    comparison: Any = None  # is not part of the speed
    return TrainingSummary(reports=reports, comparison=comparison, checkpoint=None)


def test_slowdown_of_a_run_is_reported() -> None:
    assert outcome([9.0] * 3 + [1.0] * 4 + [1.5] * 4).slowdown == 1.5
    assert outcome([9.0] * 3 + [1.0] * 3).slowdown is None


def test_summary_has_planned_allocated_and_reserved_bytes(plan_file: Any) -> None:
    summary = train_alone(TrainOptions(plan=plan_file(1), steps=2))
    assert summary.allocator is None
    on_gpu = replace(summary, allocator=[AllocatorPeaks(allocated=3 << 30, reserved=4 << 30)])
    console = Console(width=200, record=True, file=StringIO())
    console.print(on_gpu.render())
    assert " planned, 3.00 GiB allocated, 4.00 GiB reserved." in console.export_text()
    assert on_gpu.as_dict()["allocator"] == [{"allocated": 3 << 30, "reserved": 4 << 30}]


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        ("tensorboard", {"tensorboard": Path("logs")}, "install debubble with its tensorboard extra"),
        ("wandb", {"wandb": "project"}, "install the package wandb"),
    ],
)
def test_missing_packages_are_refused_before_ranks_start(
    plan_file: Any, monkeypatch: pytest.MonkeyPatch, module: str, options: Any, message: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=message):
        check(TrainOptions(plan=plan_file(1), **options))


def test_tensorboard_has_every_steps_figures_of_resumed_runs_too(plan_file: Any, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    options = TrainOptions(plan=plan_file(1), steps=2, checkpoint=tmp_path / "c", tensorboard=tmp_path / "t")
    first = train_alone(options)
    second = train_alone(replace(options, steps=4, resume=True))
    read = accumulator.EventAccumulator(str(tmp_path / "t"))
    read.Reload()
    losses = [(event.step, event.value) for event in read.Scalars("train/loss")]
    assert losses == [(r.step, pytest.approx(r.loss)) for r in (*first.reports, *second.reports)]
    bubbles = [event.value for event in read.Scalars("speed/bubble_fraction")]
    assert all(0 <= bubble < 1 for bubble in bubbles)
    assert [event.value for event in read.Scalars("memory/device_0")] == [
        r.peak_memory[0] for r in (*first.reports, *second.reports)
    ]


def test_weights_and_biases_gets_every_steps_figures(plan_file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Mock()
    monkeypatch.setitem(sys.modules, "wandb", Mock(init=Mock(return_value=run)))
    summary = train_alone(TrainOptions(plan=plan_file(1), steps=2, wandb="project"))
    sent = [(call.kwargs["step"], call.args[0]["train/loss"]) for call in run.log.call_args_list]
    assert sent == [(r.step, r.loss) for r in summary.reports]
    norms = [call.args[0]["train/gradient_norm"] for call in run.log.call_args_list]
    assert norms == [r.gradient_norm for r in summary.reports]
    assert all(math.isfinite(norm) for norm in norms)
    run.finish.assert_called_once_with(exit_code=0)
